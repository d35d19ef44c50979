"""Embeddings that were changed, in a new file of the same kind."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from uncollapse.errors import UsageError
from uncollapse.io.embedding_files import open_rows
from uncollapse.io.embedding_writer import write_changed

ROWS = numpy.random.default_rng(0).normal(size=(9000, 5))  # more than one part


def save(path: Path, dtype: Any) -> Path:
    array = ROWS.astype(dtype)
    if path.suffix == ".npy":
        numpy.save(path, array)
    elif path.suffix == ".npz":
        numpy.savez(path, vectors=array)
    elif path.suffix == ".safetensors":
        pytest.importorskip("safetensors.numpy").save_file({"vectors": array}, path)
    else:
        arrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
        names = arrow.array([f"row {number}" for number in range(len(array))])
        parquet.write_table(arrow.table({"name": names, "vectors": list(array)}), path)
    return path


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors", ".parquet"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_new_file_has_the_changed_rows_in_the_type_of_the_old(tmp_path: Path, suffix: str, dtype: str) -> None:
    source = open_rows(save(tmp_path / f"old{suffix}", dtype))
    assert source.dtype == dtype
    new = open_rows(write_changed(source, tmp_path / f"new{suffix}", lambda rows: 2 * rows[:, :3], 3))
    assert (new.count, new.dim, new.dtype, new.key) == (9000, 3, dtype, source.key)
    expected = 2 * torch.cat(list(source.parts()))[:, :3]
    torch.testing.assert_close(torch.cat(list(new.parts())), expected, rtol=1e-3, atol=1e-3)


def test_other_columns_of_a_parquet_file_stay(tmp_path: Path) -> None:
    source = open_rows(save(tmp_path / "old.parquet", "float32"))
    path = write_changed(source, tmp_path / "new.parquet", lambda rows: rows + 1, 5)
    table = pytest.importorskip("pyarrow.parquet").read_table(path)
    assert table.column_names == ["name", "vectors"]
    assert table["name"][8999].as_py() == "row 8999"


def test_what_cannot_be_written(tmp_path: Path) -> None:
    source = open_rows(save(tmp_path / "old.npy", "float32"))
    for path, word in (("new.npz", "kind"), ("old.npy", "another name")):
        with pytest.raises(UsageError, match=word):
            write_changed(source, tmp_path / path, lambda rows: rows, 5)
    save(tmp_path / "second.npy", "float32")
    with pytest.raises(UsageError, match="one by one"):
        write_changed(open_rows(tmp_path), tmp_path / "new.npy", lambda rows: rows, 5)


def test_an_error_leaves_no_file(tmp_path: Path) -> None:
    source = open_rows(save(tmp_path / "old.npy", "float32"))

    def fail(rows: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        write_changed(source, tmp_path / "new.npy", fail, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["old.npy"]
