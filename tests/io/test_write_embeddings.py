"""Embeddings that were changed, in a new file of the same kind."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from uncollapse.errors import UsageError
from uncollapse.io.embedding_files import open_rows, write_changed

ROWS = numpy.random.default_rng(0).normal(size=(9000, 5))  # more than one part


def save(path: Path, dtype: Any) -> Path:
    array = ROWS.astype(dtype)
    if path.suffix == ".npy":
        numpy.save(path, array)
    elif path.suffix == ".npz":
        numpy.savez(path, vectors=array)
    elif path.suffix == ".safetensors":
        pytest.importorskip("safetensors.numpy").save_file({"vectors": array}, path)
    elif path.suffix == ".pt":
        torch.save({"vectors": torch.from_numpy(array)}, path)
    else:
        arrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
        names = arrow.array([f"row {number}" for number in range(len(array))])
        parquet.write_table(arrow.table({"name": names, "vectors": list(array)}), path)
    return path


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors", ".parquet", ".pt"])
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
    with pytest.raises(UsageError, match="several"):
        write_changed(open_rows(tmp_path), tmp_path / "new.npy", lambda rows: rows, 5)


def test_an_error_leaves_no_file(tmp_path: Path) -> None:
    source = open_rows(save(tmp_path / "old.npy", "float32"))

    def fail(rows: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        write_changed(source, tmp_path / "new.npy", fail, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["old.npy"]


LINES = {
    "x.csv": "id,dim_0,dim_1\n007,0.5,1\n008,1.5,2.5\n",
    "x.tsv": "id\tvector\n007\t[0.5, 1]\n008\t[1.5, 2.5]\n",
    "x.jsonl": '{"id": "007", "vector": [0.5, 1]}\n{"id": "008", "vector": [1.5, 2.5]}\n',
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("x.csv", '"id","dim_0","dim_1"\n"007",1,2\n"008",3,5\n'),
        ("x.tsv", '"id"\t"vector"\n"007"\t"[1.0, 2.0]"\n"008"\t"[3.0, 5.0]"\n'),
        ("x.jsonl", '{"id": "007", "vector": [1.0, 2.0]}\n{"id": "008", "vector": [3.0, 5.0]}\n'),
    ],
)
def test_text_files_keep_all_else(tmp_path: Path, name: str, expected: str) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / name).write_text(LINES[name], encoding="utf-8")
    path = write_changed(open_rows(tmp_path / name), tmp_path / f"new_{name}", lambda rows: 2 * rows, 2)
    assert path.read_text(encoding="utf-8") == expected


def test_single_features_get_new_names_if_there_are_fewer(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "x.csv").write_text(LINES["x.csv"], encoding="utf-8")
    path = write_changed(open_rows(tmp_path / "x.csv"), tmp_path / "new.csv", lambda rows: rows[:, 1:], 1)
    assert path.read_text(encoding="utf-8").splitlines()[0] == '"id","f0"'


def test_a_flat_index_is_written_as_faiss_does(tmp_path: Path) -> None:
    # written by faiss 1.15: IndexFlatIP(2) with the vectors (1, 2), (3, 4), (5, 6)
    known = "49784649020000000300000000000000000010000000000000001000000000000100000000060000000000000000"
    vectors = numpy.arange(1, 7, dtype="<f4").tobytes().hex()
    (tmp_path / "x.faiss").write_bytes(bytes.fromhex(known[:-2] + vectors))
    rows = open_rows(tmp_path / "x.faiss")
    assert torch.cat(list(rows.parts())).tolist() == [[1, 2], [3, 4], [5, 6]]
    path = write_changed(rows, tmp_path / "new.faiss", lambda x: x, 2)
    assert path.read_bytes() == (tmp_path / "x.faiss").read_bytes()
