"""The example that maps statistics over a parquet data set with Dask, in two workers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import uncollapse as uc

pytest.importorskip("dask.distributed")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

EXAMPLE = Path(__file__).parents[2] / "examples" / "embeddings_dask.py"
SIZES = (900, 400, 1, 1200, 599)
EXACT = ("mean_cosine", "effective_rank", "dataset_rank", "token_variance", "feature_correlation", "alignment")


def test_parts_in_two_workers_give_the_diagnosis_of_all_rows(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(SIZES), 5, generator=generator) @ torch.randn(5, 16, generator=generator) + 0.4
    x = x + 0.2 * torch.randn(x.shape, generator=generator)
    y = x + 0.1 * torch.randn(x.shape, generator=generator)
    (tmp_path / "parts").mkdir()
    for number, (first, second) in enumerate(zip(x.split(SIZES), y.split(SIZES), strict=True)):
        table = pyarrow.table({"first": list(first.numpy()), "second": list(second.numpy())})
        parquet.write_table(table, tmp_path / "parts" / f"{number}.parquet", row_group_size=500)
    command = [sys.executable, str(EXAMPLE), "parts", "--column", "first", "--pairs", "second", "--out", "d.json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"over {len(x):,} pairs" in done.stdout
    found = uc.Diagnosis.load(tmp_path / "d.json")
    layer, expected = found.layers[0], uc.diagnose_rows([x], pairs=[y]).layers[0]
    assert (found.tokens, found.data) == (len(x), f"{len(SIZES)} files: {len(x)} rows")
    for name in EXACT:
        assert layer[name] == pytest.approx(expected[name], rel=1e-12), name
    assert layer["uniformity"] == pytest.approx(expected["uniformity"], rel=0.05)  # of another sample
    assert layer.spectrum == expected.spectrum
