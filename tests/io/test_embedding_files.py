"""Files of embeddings, read in parts."""

import os
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save_file

from uncollapse.io import UsageError
from uncollapse.io.embedding_files import open_rows
from uncollapse.io.embedding_rows import PART

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = numpy.random.default_rng(0).normal(size=(PART + 1905, 7)).astype("float32")


def write(folder: Path, kind: str, x: numpy.ndarray) -> tuple[Path, str | None]:
    """A file of this kind, and the key of the array in it."""
    path = folder / f"file.{kind.partition(' ')[0]}"
    if kind.startswith("npy"):
        numpy.save(path, numpy.asfortranarray(x) if kind == "npy by column" else x)
    elif kind.startswith("npz"):
        (numpy.savez if kind == "npz" else numpy.savez_compressed)(path, a=x, b=x[:2])
        return path, "a"
    elif kind == "safetensors":
        save_file({"a": torch.from_numpy(x.copy()), "b": torch.ones(2, 2)}, path)
        return path, "a"
    else:
        columns = {
            "parquet lists": {"id": range(len(x)), "vector": list(x)},
            "parquet fixed": {"vector": pyarrow.FixedSizeListArray.from_arrays(x.ravel(), x.shape[1])},
            "parquet columns": {"id": range(len(x)), **{f"f{i}": x[:, i] for i in range(x.shape[1])}},
        }
        parquet.write_table(pyarrow.table(columns[kind]), path, row_group_size=1500)
    return path, None


KINDS = ["npy", "npy by column", "npz", "npz packed", "safetensors"]
PARQUET = ["parquet lists", "parquet fixed", "parquet columns"]


@pytest.mark.parametrize("kind", KINDS + PARQUET)
def test_rows_come_back_exactly_and_in_even_parts(tmp_path: Path, kind: str) -> None:
    rows = open_rows(*write(tmp_path, kind, ROWS))
    assert (rows.count, rows.dim, rows.part_count(1000)) == (len(ROWS), 7, 7)
    for size in (PART, 1000, 7000):
        parts = list(rows.parts(size))
        assert {len(part) for part in parts[:-1]} <= {size}
        assert torch.equal(torch.cat(parts), torch.from_numpy(ROWS))


@pytest.mark.parametrize("kind", KINDS + PARQUET)
def test_shares_are_the_rows_in_order(tmp_path: Path, kind: str) -> None:
    rows = open_rows(*write(tmp_path, kind, ROWS))
    for of in (1, 2, 7):
        shares = [rows.share(number, of) for number in range(of)]
        assert sum(share.count for share in shares) == rows.count
        parts = [torch.cat(list(share.parts(500))) for share in shares]
        assert [len(part) for part in parts] == [share.count for share in shares]
        assert torch.equal(torch.cat(parts), torch.from_numpy(ROWS))
    assert list(open_rows(*write(tmp_path, kind, ROWS[:2])).share(0, 3).parts()) == []


@pytest.mark.parametrize("kind", ["npy", "npz packed", "safetensors", "parquet lists"])
def test_files_of_a_folder_are_read_as_one(tmp_path: Path, kind: str) -> None:
    folder, key = tmp_path / "parts", None
    folder.mkdir()
    for number, rows in enumerate(numpy.array_split(ROWS, 3)):
        path, key = write(tmp_path, kind, rows)
        path.rename(folder / f"{number}{path.suffix}")
    (folder / "_SUCCESS").touch()
    (folder / f".hidden{path.suffix}").touch()
    for place in (folder, folder / f"*{path.suffix}", folder / f"[0-9]{path.suffix}"):
        found = open_rows(place, key)
        assert (found.count, found.dim, len(found.paths)) == (len(ROWS), 7, 3)
        assert torch.equal(torch.cat(list(found.parts(999))), torch.from_numpy(ROWS))
        assert torch.equal(torch.cat(list(found.share(1, 2).parts())), torch.from_numpy(ROWS[len(ROWS) // 2 :]))
    assert open_rows(folder / f"0{path.suffix}", key).count == len(numpy.array_split(ROWS, 3)[0])


def test_folders_that_do_not_fit(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    for path, says in ((tmp_path / "none", "There is no .npy"), (tmp_path / "*.npy", "There is no .npy")):
        with pytest.raises(UsageError, match=says):
            open_rows(path)
    numpy.save(tmp_path / "a.npy", ROWS)
    numpy.save(tmp_path / "b.npy", ROWS[:, :3])
    with pytest.raises(UsageError, match=r"features.*a\.npy"):
        open_rows(tmp_path / "?.npy")
    numpy.savez(tmp_path / "c.npz", ROWS)
    with pytest.raises(UsageError, match="one kind"):
        open_rows(tmp_path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    numpy.save(tmp_path / "x.npy", ROWS)
    parts = open_rows(tmp_path / "x.npy").parts()
    next(parts)
    os.truncate(tmp_path / "x.npy", 100_000)
    with pytest.raises(UsageError, match="not a valid"):
        list(parts)


def test_wide_rows_come_in_smaller_parts(tmp_path: Path) -> None:
    numpy.save(tmp_path / "x.npy", numpy.ones((300, 1 << 15), "float16"))
    rows = open_rows(tmp_path / "x.npy")
    assert [len(part) for part in rows.parts()] == [128, 128, 44]
    assert rows.part_count() == 3


@pytest.mark.parametrize("dtype", [">f4", ">f2", "longdouble", ">i4"])
def test_numbers_that_torch_has_no_name_for(tmp_path: Path, dtype: str) -> None:
    x = (8 * ROWS[:5]).round().astype(dtype)
    numpy.save(tmp_path / "x.npy", x)
    assert torch.equal(next(open_rows(tmp_path / "x.npy").parts()).double(), torch.from_numpy(x.astype("float64")))


@pytest.mark.parametrize("kind", [kind for kind in KINDS + PARQUET if kind != "npy by column"])
def test_a_nan_is_named_by_its_row(tmp_path: Path, kind: str) -> None:
    x = ROWS.copy()
    x[PART + 3, 2] = numpy.nan
    with pytest.raises(UsageError, match=f"row {PART + 3}"):
        list(open_rows(*write(tmp_path, kind, x)).parts())


@pytest.mark.parametrize(("dtype", "expected"), [("float16", "float32"), ("float64", "float64"), ("int8", "float32")])
def test_dtypes(tmp_path: Path, dtype: str, expected: str) -> None:
    numpy.save(tmp_path / "x.npy", (10 * ROWS[:9]).astype(dtype))
    (part,) = open_rows(tmp_path / "x.npy").parts()
    assert part.dtype == getattr(torch, expected)
    assert torch.equal(part.double(), torch.from_numpy((10 * ROWS[:9]).astype(dtype).astype("float64")))


def test_bfloat16(tmp_path: Path) -> None:
    x = torch.randn(5, 3).bfloat16()
    save_file({"x": x}, tmp_path / "x.safetensors")
    assert torch.equal(torch.cat(list(open_rows(tmp_path / "x.safetensors").parts())), x.float())


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_which_array_is_meant(tmp_path: Path, kind: str) -> None:
    path, _ = write(tmp_path, kind, ROWS)
    for key in (None, "c"):
        with pytest.raises(UsageError, match="--key"):
            open_rows(path, key)


def test_which_column_is_meant(tmp_path: Path) -> None:
    lists = pyarrow.table({"one": [[1.0, 2.0]], "two": [[3.0, 4.0]], "id": [1]})
    parquet.write_table(lists, tmp_path / "x.parquet")
    assert next(open_rows(tmp_path / "x.parquet", "two").parts()).tolist() == [[3.0, 4.0]]
    for key in (None, "id"):
        with pytest.raises(UsageError, match=r"--key.*one, two"):
            open_rows(tmp_path / "x.parquet", key)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"v": [[1.0, 2.0], [3.0]]}, "row 1 has 1 numbers, and the first row has 2"),
        ({"v": [[1.0, 2.0], None]}, "empty entries"),
        ({"v": [[1.0, 2.0], [3.0, None]]}, "empty entries"),
        ({"a": [1.0, None], "b": [1.0, 2.0]}, "empty entries"),
        ({"a": [1.0, 2.0], "name": ["x", "y"]}, "neither a column of lists"),
        ({"v": pyarrow.array([], pyarrow.list_(pyarrow.float32()))}, "has no embeddings"),
    ],
)
def test_parquet_files_that_do_not_fit(tmp_path: Path, table: dict[str, list[object]], words: str) -> None:
    parquet.write_table(pyarrow.table(table), tmp_path / "x.parquet")
    with pytest.raises(UsageError, match=words):
        list(open_rows(tmp_path / "x.parquet").parts())


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    numpy.save(tmp_path / "cube.npy", numpy.ones((2, 3, 4)))
    numpy.save(tmp_path / "words.npy", numpy.array([["a", "b"]]))
    numpy.save(tmp_path / "empty.npy", numpy.ones((0, 4)))
    numpy.save(tmp_path / "objects.npy", numpy.array([[{}]]), allow_pickle=True)
    for kind in ("npy", "npz", "parquet", "safetensors", "csv"):
        (tmp_path / f"text.{kind}").write_text("no numbers", encoding="utf-8")
    words = {"cube.npy": r"\(2, 3, 4\)", "words.npy": "numbers", "empty.npy": "no embeddings", "objects.npy": "valid"}
    words |= {f"text.{kind}": "not a valid" for kind in ("npy", "npz", "parquet", "safetensors")}
    for name, expected in {**words, "text.csv": "unknown suffix", "none.npy": "There is no file"}.items():
        with pytest.raises(UsageError, match=expected):
            open_rows(tmp_path / name)
