"""Planetoid's raw files: the same as PyG, and nothing in them runs."""

import hashlib
import os
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.io import raw_planetoid as raw

from uncollapse.errors import UsageError
from uncollapse.io import planetoid

FOLDER = os.environ.get("UNCOLLAPSE_DATA")


def assert_same_as_pyg(folder: Path, name: str) -> planetoid.Citations:
    io = pytest.importorskip("torch_geometric.io")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the files use names that numpy and scipy gave up
        theirs = io.read_planetoid_data(str(folder), name)
    ours = planetoid.read_planetoid(folder, name)
    expected = (theirs.x, theirs.edge_index, theirs.y, theirs.train_mask, theirs.val_mask, theirs.test_mask)
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    return ours


@pytest.mark.parametrize("name", ["cora", "pubmed", "citeseer"])
def test_same_as_pyg(tmp_path: Path, name: str) -> None:
    raw.write(tmp_path / "raw", name)
    ours = assert_same_as_pyg(tmp_path / "raw", name)
    assert (len(ours.x), int(ours.train.sum()), int(ours.validation.sum()), int(ours.test.sum())) == (518, 6, 500, 8)


def test_nodes_of_citeseer_that_are_in_no_file(tmp_path: Path) -> None:
    raw.write(tmp_path / "raw", "citeseer", gaps=(511, 514))
    ours = assert_same_as_pyg(tmp_path / "raw", "citeseer")
    assert len(ours.x) == 520
    assert not ours.x[[511, 514]].any()
    assert not ours.test[[511, 514]].any()


@pytest.mark.skipif(FOLDER is None, reason="UNCOLLAPSE_DATA names the folder that has the datasets")
@pytest.mark.parametrize("name", ["Cora", "CiteSeer", "PubMed"])
def test_public_files_give_the_same_tensors_in_both_ways(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, read_with_pyg, names = Path(str(FOLDER)) / "planetoid" / name / "raw", planetoid._read_with_pyg, []

    def spy(contents: Any, name: str) -> planetoid.Citations:
        names.append(name)
        return read_with_pyg(contents, name)

    monkeypatch.setattr(planetoid, "_read_with_pyg", spy)
    assert_same_as_pyg(folder, name)
    assert names == [name]
    monkeypatch.setattr(planetoid, "_are_public", lambda contents: False)
    assert_same_as_pyg(folder, name)
    assert names == [name]


def test_pyg_reads_no_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file with another SHA-256 is enough, and so is a machine without PyG."""
    raw.write(tmp_path / "raw")
    contents = {name: (tmp_path / "raw" / name).read_bytes() for name in planetoid.file_names("cora")}
    assert not planetoid._are_public(contents)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    table = tmp_path / "data" / "planetoid.sha256"
    table.parent.mkdir()
    table.write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()), encoding="ascii")
    monkeypatch.setattr(planetoid, "files", lambda package: tmp_path)
    assert planetoid._are_public(contents)
    monkeypatch.setattr(planetoid, "_read_with_pyg", lambda *_: pytest.fail("PyG was asked"))
    monkeypatch.setattr(planetoid, "find_spec", lambda name: None)
    assert len(planetoid.read_planetoid(tmp_path / "raw", "cora").x) == 518
    monkeypatch.undo()
    monkeypatch.setattr(planetoid, "files", lambda package: tmp_path)
    for name in contents:
        assert not planetoid._are_public(contents | {name: contents[name] + b" "})


def test_arrays_by_columns_and_values_twice_in_a_place(tmp_path: Path) -> None:
    raw.write(tmp_path / "raw")
    labels = numpy.eye(3, dtype="int32")[numpy.arange(510) % 3]
    by_columns = raw.array_of((510, 3), raw.kind(b"i4"), labels.tobytes(order="F"), by_columns=True)
    (tmp_path / "raw/ind.cora.ally").write_bytes(raw.whole(by_columns))
    ends = raw.array(numpy.array([0] + [2] * 6, dtype="int32"))
    parts = {"indices": raw.array(numpy.array([1, 1], "int32")), "data": raw.array(numpy.array([0.5, 2.0]))}
    (tmp_path / "raw/ind.cora.x").write_bytes(raw.whole(raw.sparse_of((6, 5), indptr=ends, **parts)))
    ours = assert_same_as_pyg(tmp_path / "raw", "cora")
    assert ours.y[:4].tolist() == [0, 1, 2, 0]
    assert planetoid.read_matrix(tmp_path / "raw/ind.cora.x")[0].tolist() == [0.0, 2.5, 0.0, 0.0, 0.0]


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


FLOATS, TWO = raw.kind(b"f4"), raw.array(numpy.zeros(2, "int32"))
CALL = raw.group(raw.string(b"open('ran', 'w')")) + b"R"
PROGRAMS = {
    "eval": b"c__builtin__\neval\n" + CALL,
    "new eval": b"cbuiltins\neval\n" + CALL,
    "system": b"cposix\nsystem\n" + raw.group(raw.string(b"touch ran")) + b"R",
    "old instance": b"(" + raw.string(b"touch ran") + b"ios\nsystem\n",
    "old object": b"(cos\nsystem\n" + raw.string(b"touch ran") + b"o",
    "in a matrix": raw.sparse_of((1, 1), indptr=b"cos\nsystem\n" + raw.group(raw.string(b"touch ran")) + b"R"),
    "dotted": b"cnumpy\ncore.multiarray._reconstruct\n" + CALL,
    "by number": b"\x82\x01" + CALL,
    "by persistent name": b"Pran\n",
    "real ndarray": b"cnumpy\nndarray\n" + raw.group(raw.group(raw.integer(2**31 - 1), raw.integer(2**31 - 1))) + b"R",
    "state of a class": b"cnumpy\nndarray\n}b",
    "attributes of a class": b"ccollections\ndefaultdict\nN}" + raw.string(b"__missing__") + b"Ns\x86b",
    "objects": raw.array_of((1, 1), raw.kind(b"O8"), b"12345678"),
    "a kind in a kind": raw.array_of((1, 1), b"cnumpy\ndtype\n" + raw.group(FLOATS) + b"R", b"1234"),
    "another byte order": raw.array_of((1, 1), raw.kind(b"f4", b">"), b"1234"),
    "more values than bytes": raw.array_of((2**31 - 1, 2**31 - 1), FLOATS, b"1234"),
    "fewer than none": raw.array_of((-1, -1), FLOATS, b"1234"),
    "one dimension": raw.array_of((1,), FLOATS, b"1234"),
    "not finite": raw.array(numpy.array([[1.0, numpy.nan]])),
    "an array without state": b"cnumpy.core.multiarray\n_reconstruct\n" + raw.group(raw.integer(2**31 - 1)) + b"R",
    "many columns": raw.sparse_of((1, 2**31 - 1), indptr=TWO, indices=TWO, data=TWO),
    "many rows": raw.sparse_of((2**31 - 1, 1), indptr=TWO, indices=TWO, data=TWO),
    "columns out of place": raw.sparse_of(
        (1, 2),
        indptr=raw.array(numpy.array([0, 2], "int32")),
        indices=raw.array(numpy.array([0, 7], "int32")),
        data=TWO,
    ),
    "rows that go back": raw.sparse_of((2, 2), indptr=raw.array(numpy.array([0, 3, 2])), indices=TWO, data=TWO),
    "a sparse matrix of itself": raw.sparse_of((1, 1), indptr=b"h\x01").replace(b"\x81", b"\x81q\x01"),
    "a large memo": b"]r\xff\xff\xff\x7f",
    "no matrix": b"N",
    "nothing": b"",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_matrix_that_is_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("ind.cora.x")
    path.write_bytes(raw.whole(PROGRAMS[program]))
    with pytest.raises(UsageError, match=r"ind\.cora\.x"):
        planetoid.read_matrix(path)
    assert list(Path().iterdir()) == [path]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_programs_of_every_protocol(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "ind.cora.graph"
    path.write_bytes(pickle.dumps({0: [Evil(tmp_path / "ran")]}, protocol))
    with pytest.raises(UsageError, match="not allowed"):
        planetoid.read_neighbours(path)
    assert list(tmp_path.iterdir()) == [path]


def test_neighbours_that_are_none(tmp_path: Path) -> None:
    shared = b"]q\x01(" + raw.integer(1) * 100 + b"e"
    table = b"}(" + raw.integer(0) + shared + b"".join(raw.integer(i) + b"h\x01" for i in range(1, 100)) + b"u"
    cases = {
        "more neighbours than bytes": table,
        "no dictionary of lists": b"}" + raw.integer(0) + TWO + b"s",
        "not integers": b"}" + raw.integer(0) + b"](" + raw.string(b"a") + b"es",
        "not integers ": b"}\x88](" + raw.integer(1) + b"es",
    }
    for words, content in cases.items():
        (tmp_path / "graph").write_bytes(raw.whole(content))
        with pytest.raises(UsageError, match=words.strip()):
            planetoid.read_neighbours(tmp_path / "graph")


@pytest.mark.parametrize(
    ("part", "content", "words"),
    [
        ("ally", raw.whole(raw.array(numpy.eye(3))), "differ in the number of nodes"),
        ("x", raw.whole(raw.array(numpy.ones((6, 4)))), "differ in features or classes"),
        ("graph", raw.whole(raw.neighbours({0: [518]})), "not among the 518"),
        ("graph", raw.whole(raw.neighbours({-1: [0]})), "not among the 518"),
        ("test.index", b"510\n511\n512\n513\n514\n515\n516\n518\n", "each once"),
        ("test.index", b"510\n511\n512\n513\n514\n515\n516\n516\n", "each once"),
        ("test.index", b"510\n", "each once"),
        ("test.index", b"", "number of a node"),
        ("test.index", b"five\n", "number of a node"),
        ("test.index", b"9" * 30, "number of a node"),
    ],
)
def test_files_that_do_not_belong_together(tmp_path: Path, part: str, content: bytes, words: str) -> None:
    raw.write(tmp_path / "raw")
    (tmp_path / f"raw/ind.cora.{part}").write_bytes(content)
    with pytest.raises(UsageError, match=words):
        planetoid.read_planetoid(tmp_path / "raw", "cora")


def test_a_far_test_node_of_citeseer_takes_no_memory(tmp_path: Path) -> None:
    raw.write(tmp_path / "raw", "citeseer", tests=2)
    (tmp_path / "raw/ind.citeseer.test.index").write_bytes(b"510\n900000000000\n")
    with pytest.raises(UsageError, match="each once"):
        planetoid.read_planetoid(tmp_path / "raw", "citeseer")


def test_too_few_nodes_and_no_file(tmp_path: Path) -> None:
    raw.write(tmp_path / "raw", first=400)
    with pytest.raises(UsageError, match="500 nodes"):
        planetoid.read_planetoid(tmp_path / "raw", "cora")
    (tmp_path / "raw/ind.cora.ty").unlink()
    with pytest.raises(UsageError, match="read"):
        planetoid.read_planetoid(tmp_path / "raw", "cora")


def test_damaged_files_are_read_or_refused(tmp_path: Path) -> None:
    raw.write(tmp_path / "raw")
    numbers, refused = random.Random(0), 0
    for _ in range(200):
        path = tmp_path / "raw" / numbers.choice(planetoid.file_names("cora"))
        intact = path.read_bytes()
        damaged = bytearray(intact[: numbers.randrange(len(intact))] if numbers.random() < 0.2 else intact)
        for _ in range(numbers.randint(1, 3)):
            # the first bytes say most about what a file is
            place = (
                numbers.randrange(min(len(damaged), 300) if numbers.random() < 0.7 else len(damaged)) if damaged else 0
            )
            damaged[place : place + 1] = bytes([numbers.randrange(256)])
        path.write_bytes(damaged)
        try:
            planetoid.read_planetoid(tmp_path / "raw", "cora")
        except UsageError:
            refused += 1
        path.write_bytes(intact)
    assert refused > 100
