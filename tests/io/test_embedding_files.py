"""Files of embeddings, read in parts."""

import csv
import json
import os
import struct
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save_file

from uncollapse.errors import UsageError
from uncollapse.io.embedding_files import open_rows
from uncollapse.io.embedding_rows import PART

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("pyarrow.ipc")

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
    elif kind == "pt":
        torch.save({"a": torch.from_numpy(x.copy()), "b": "text"}, path)
    elif kind == "pt tensor":
        torch.save(torch.from_numpy(x.copy()), path)
    elif kind.startswith("jsonl"):
        lines = [row if kind == "jsonl" else {"id": number, "a": row} for number, row in enumerate(x.tolist())]
        path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    elif kind.startswith("faiss"):
        head = struct.pack("<iqqq?i", x.shape[1], len(x), 1 << 20, 1 << 20, True, 1)
        outer, ids = (b"IxM2" + head, b"ids") if kind == "faiss ids" else (b"", b"")
        path.write_bytes(outer + b"IxF2" + head + struct.pack("<Q", x.size) + x.tobytes() + ids)
    elif kind[:3] in ("csv", "tsv"):
        _write_delimited(path, kind, x)
    elif kind.startswith("arrow"):
        table = pyarrow.table({"id": range(len(x)), "vector": list(x)})
        new = pyarrow.ipc.new_stream if kind == "arrow stream" else pyarrow.ipc.new_file
        with new(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=1500)
    else:
        columns = {
            "parquet lists": {"id": range(len(x)), "vector": list(x)},
            "parquet fixed": {"vector": pyarrow.FixedSizeListArray.from_arrays(x.ravel(), x.shape[1])},
            "parquet columns": {"id": range(len(x)), **{f"f{i}": x[:, i] for i in range(x.shape[1])}},
        }
        parquet.write_table(pyarrow.table(columns[kind]), path, row_group_size=1500)
    return path, None


def _write_delimited(path: Path, kind: str, x: numpy.ndarray) -> None:
    between = "\t" if path.suffix == ".tsv" else ","
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=between)
        if kind == "csv lists":
            writer.writerow(["id", "text", "vector"])
            writer.writerows([n, 'a "quoted"\nline', json.dumps(row)] for n, row in enumerate(x.tolist()))
        elif kind == "csv numbers":
            writer.writerows(x.tolist())
        else:
            writer.writerow(["id", *(f"dim_{i}" for i in range(x.shape[1])), "name"])
            writer.writerows([n, *row, "007"] for n, row in enumerate(x.tolist()))


KINDS = ["npy", "npy by column", "npz", "npz packed", "safetensors", "pt", "pt tensor", "jsonl", "jsonl objects"]
KINDS += ["faiss", "faiss ids"]
PARQUET = ["parquet lists", "parquet fixed", "parquet columns", "csv", "csv lists", "csv numbers", "tsv"]
PARQUET += ["arrow", "arrow stream"]


@pytest.mark.parametrize("kind", KINDS + PARQUET)
def test_rows_come_back_exactly_and_in_even_parts(tmp_path: Path, kind: str) -> None:
    rows = open_rows(*write(tmp_path, kind, ROWS))
    assert (rows.count, rows.dim, rows.part_count(1000)) == (len(ROWS), 7, 7)
    for size in (PART, 1000, 7000):
        parts = list(rows.parts(size))
        assert {len(part) for part in parts[:-1]} <= {size}
        assert torch.equal(torch.cat(parts).float(), torch.from_numpy(ROWS))


@pytest.mark.parametrize("kind", KINDS + PARQUET)
def test_shares_are_the_rows_in_order(tmp_path: Path, kind: str) -> None:
    rows = open_rows(*write(tmp_path, kind, ROWS))
    for of in (1, 2, 7):
        shares = [rows.share(number, of) for number in range(of)]
        assert sum(share.count for share in shares) == rows.count
        parts = [torch.cat(list(share.parts(500))) for share in shares]
        assert [len(part) for part in parts] == [share.count for share in shares]
        assert torch.equal(torch.cat(parts).float(), torch.from_numpy(ROWS))
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
    there_is_no = r"There is no \.npy.* file "
    for path, says in ((tmp_path / "none", there_is_no + "in"), (tmp_path / "*.npy", there_is_no + "that matches")):
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
    with pytest.raises(UsageError, match="valid"):
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
        with pytest.raises(UsageError, match=r"--pairs-key for --pairs: one, two"):
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
    for kind in ("npy", "npz", "parquet", "safetensors", "txt"):
        (tmp_path / f"text.{kind}").write_text("no numbers", encoding="utf-8")
    words = {"cube.npy": r"\(2, 3, 4\)", "words.npy": "numbers", "empty.npy": "no embeddings", "objects.npy": "valid"}
    words |= {f"text.{kind}": "not a valid" for kind in ("npy", "npz", "parquet", "safetensors")}
    for name, expected in {
        **words,
        "text.txt": "unknown suffix",
        "cub.npy": r"There is no file .*cub\.npy\. Did you mean 'cube\.npy'",
    }.items():
        with pytest.raises(UsageError, match=expected):
            open_rows(tmp_path / name)


def test_a_folder_of_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"text": [str(n) for n in range(30)], "vector": ROWS[:30].tolist()})
    data.save_to_disk(str(tmp_path / "data"), num_shards=3)
    (tmp_path / "data" / "cache-1.arrow").write_bytes(b"not a part of it")
    found = open_rows(tmp_path / "data")
    assert (found.count, found.dim, len(found.paths)) == (30, 7, 3)
    torch.testing.assert_close(torch.cat(list(found.parts())).float(), torch.from_numpy(ROWS[:30]))
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(UsageError, match="test, train"):
        open_rows(tmp_path / "splits")


def test_whole_numbers_in_the_first_rows_are_still_features(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("id,dim_0,dim_1\n1,0.5,0\n2,0.25,1\n3,1.5,2.5\n", encoding="utf-8")
    rows = open_rows(tmp_path / "x.csv")
    assert torch.cat(list(rows.parts())).tolist() == [[0.5, 0.0], [0.25, 1.0], [1.5, 2.5]]


def test_columns_that_pandas_numbered_are_a_head(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("0,1,2\n0.5,0,1\n0.25,1,2\n", encoding="utf-8")
    rows = open_rows(tmp_path / "x.csv")
    assert torch.cat(list(rows.parts())).tolist() == [[0.5, 0.0, 1.0], [0.25, 1.0, 2.0]]


@pytest.mark.parametrize(
    ("head", "expected"),
    [("id,dim_0,dim_1", [[3.0, -1.0], [2.0, 5.0]]), ("red,green,blue", [[7.0, 3.0, -1.0], [8.0, 2.0, 5.0]])],
)
def test_an_id_is_no_feature_of_whole_numbers(tmp_path: Path, head: str, expected: list[list[float]]) -> None:
    (tmp_path / "x.csv").write_text(f"{head}\n7,3,-1\n8,2,5\n", encoding="utf-8")
    assert torch.cat(list(open_rows(tmp_path / "x.csv").parts())).tolist() == expected


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("x.jsonl", b'{"a": [1, 2]}\n{"a": [1]}', "row 1"),
        ("x.jsonl", b"[1, 2]\n3", "row 1"),
        ("x.jsonl", b'{"a": [1, true]}', "none"),
        ("x.jsonl", b"[" * 10**6, "valid"),
        ("x.csv", b"a,b\n1.5,x\n", "neither"),
        ("x.csv", b"", "columns"),
        ("x.csv", b"a,b\n", "no rows"),
        ("x.csv", b"0,1,2\n", "no rows"),
        ("x.csv", b"a,a\n1.5,2.5\n", "same name"),
        ("x.csv", b"a,b\n1.5,2.5\n1.5\n", "valid"),
        ("x.arrow", b"ARROW1" + b"x" * 99, "valid"),
        ("x.faiss", b"IwFl" + b"x" * 99, "reconstruct_n"),
        ("x.faiss", b"IxF2" + struct.pack("<iqqq?iQ", 4, 10**9, 0, 0, True, 1, 4 * 10**9), "valid"),
        ("x.faiss", b"IxF2", "valid"),
        ("x.pt", b"x" * 99, "torch.save"),
    ],
)
def test_damaged_files_are_usage_errors(tmp_path: Path, name: str, content: bytes, word: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=word):
        list(open_rows(tmp_path / name).parts())


def test_a_torch_file_with_code_is_refused(tmp_path: Path) -> None:
    torch.save({"a": Path("x")}, tmp_path / "x.pt")
    with pytest.raises(UsageError, match="code"):
        open_rows(tmp_path / "x.pt")
