"""ogbn-arxiv, from ogb's files."""

import gzip
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from tests.lab.data.graph import made_up_graphs

from uncollapse.errors import UsageError
from uncollapse.lab.data.graph import datasets, graph_files


def test_ogb_fetches_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(name: str, root: str) -> None:
        assert name == "ogbn-arxiv"
        made_up_graphs.arxiv(Path(root) / "ogbn_arxiv")

    library: Any = ModuleType("ogb.nodeproppred")
    library.NodePropPredDataset = fetch
    monkeypatch.setitem(sys.modules, "ogb", ModuleType("ogb"))
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", library)
    graph = datasets.load_graph("arxiv", root=tmp_path)
    assert graph.edge_index.T.tolist() == [[0, 1], [1, 0], [1, 2], [2, 1], [3, 4], [4, 3]]
    assert (graph.y.tolist(), graph.classes, graph.train.tolist()) == ([0, 1, 2, 0, 1], 3, [True] * 3 + [False] * 2)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("raw/edge", b"torn", "not a valid file"),
        ("raw/edge", None, r"ogbn_arxiv is not complete\. .* \(raw/edge\.csv\.gz\), or name"),
        ("raw/edge", "0,5\n", "above its 5 nodes"),
        ("raw/edge", "", "not a valid file"),
        ("raw/node-feat", "nan,0\n" * 5, "finite"),
        ("raw/node-label", "0\n", "labels"),
        ("split/time/test", "0\n", "in two of"),
        ("split/time/test", "7\n", "no node for"),
    ],
)
def test_files_of_arxiv_that_do_not_fit(tmp_path: Path, file: str, content: bytes | str | None, words: str) -> None:
    folder = tmp_path / "ogbn_arxiv"
    made_up_graphs.arxiv(folder)
    path = folder / f"{file}.csv.gz"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else gzip.compress(content.encode()))
    with pytest.raises(UsageError, match=words):
        graph_files.read_arxiv(tmp_path)


def test_arxiv_without_the_library_that_fetches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ogb", None)
    with pytest.raises(UsageError, match="install ogb"):
        graph_files.read_arxiv(tmp_path)


@pytest.mark.parametrize(
    ("error", "words"), [(SystemExit(-1), "ogb gave up"), (ConnectionResetError("reset"), "no network: reset")]
)
def test_why_arxiv_was_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, words: str
) -> None:
    def fetch(name: str, root: str) -> None:
        raise error

    library: Any = ModuleType("ogb.nodeproppred")
    library.NodePropPredDataset = fetch
    monkeypatch.setitem(sys.modules, "ogb", ModuleType("ogb"))
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", library)
    with pytest.raises(UsageError, match=f"{words}.*--data-root"):
        graph_files.read_arxiv(tmp_path)


def test_features_of_a_file_have_a_row_per_node(tmp_path: Path) -> None:
    x = torch.randn(5, 3, dtype=torch.float64)
    numpy.save(tmp_path / "x.npy", x.numpy())
    torch.save(x, tmp_path / "x.pt")
    for name in ("x.npy", "x.pt"):
        assert torch.equal(graph_files.read_features(tmp_path / name, 5), x.float())


class Harmful:
    """Pickles into a call."""

    def __reduce__(self) -> Any:
        return print, ("loaded",)


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("x.npy", numpy.zeros((4, 3)), "row"),
        ("x.npy", numpy.zeros(5), "row"),
        ("x.npy", numpy.zeros((5, 3), dtype=int), "floats"),
        ("x.npy", numpy.full((5, 3), numpy.nan), "finite"),
        ("x.npy", numpy.array([[Harmful()]] * 5, dtype=object), "valid"),
        ("x.npy", b"torn", "valid"),
        ("x.pt", torch.zeros(4, 3), "row"),
        ("x.pt", {"x": torch.zeros(5, 3)}, "dict"),
        ("x.pt", Harmful(), "code"),
        ("x.pt", b"torn", "valid"),
        ("x.csv", b"0,1", "npy"),
    ],
)
def test_features_that_do_not_fit(
    tmp_path: Path, name: str, content: Any, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif name == "x.npy":
        numpy.save(path, content)
    else:
        torch.save(content, path)
    with pytest.raises(UsageError, match=word):
        graph_files.read_features(path, 5)
    assert capsys.readouterr().out == ""  # nothing in a file runs
