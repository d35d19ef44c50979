"""Graphs by name and file."""

import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.io import raw_planetoid
from typer.testing import Result

from uncollapse.diagnosis.result import Diagnosis
from uncollapse.errors import UsageError
from uncollapse.io import download as fetching
from uncollapse.io import graphs, planetoid

pytest.importorskip("torch_geometric")

MODEL = """
def gcn():
    from torch_geometric.nn import GCN
    return GCN(34, 8, 2)
"""


def test_karate_club_without_data(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    result = run("diagnose", "model.py:gcn", "--json")
    assert result.exit_code == 0, result.stderr
    found = Diagnosis.from_json(result.stdout)
    assert (found.tokens, found.data) == (34, "Zachary's karate club (34 nodes, 156 directed edges)")
    assert "dirichlet_energy" in found.layers[-1].measures


def test_npz_has_edges_in_both_directions(tmp_path: Path) -> None:
    path = tmp_path / "small.npz"
    numpy.savez(path, node_features=numpy.eye(4), node_labels=numpy.arange(4), edges=[[0, 1], [1, 2], [3, 0]])
    graph, words = graphs.load_graph(str(path), None)
    assert words == "small.npz"
    assert graph.x.dtype == torch.float32
    pairs = set(map(tuple, graph.edge_index.T.tolist()))
    assert pairs == {(0, 1), (1, 0), (1, 2), (2, 1), (3, 0), (0, 3)}


def test_pt_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "small.pt"
    x, edges = torch.randn(4, 3), torch.tensor([[0, 1], [1, 2]])
    torch.save({"x": x, "edge_index": edges}, path)
    graph, _ = graphs.load_graph(str(path), None)
    assert torch.equal(graph.x, x)
    assert torch.equal(graph.edge_index, edges)


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    numpy.savez(tmp_path / "a.npz", features=numpy.eye(2))
    numpy.savez(tmp_path / "b.npz", node_features=numpy.eye(2), edges=[[0, 5]])
    numpy.savez(tmp_path / "c.npz", node_features=numpy.ones(2), edges=[[0, 1]])
    (tmp_path / "d.npz").write_bytes(b"no archive")
    torch.save([1, 2], tmp_path / "e.pt")
    (tmp_path / "f.csv").touch()
    numpy.savez(tmp_path / "h.npz", node_features=numpy.eye(2), edges=[[0.0, 0.5]])
    numpy.savez(tmp_path / "i.npz", node_features=numpy.array([["a"]]), edges=[[0, 0]])
    numpy.savez(tmp_path / "j.npz", node_features=numpy.array([[{}]], dtype=object), edges=[[0, 0]])
    words = {
        "a.npz": "It has: features",
        "b.npz": "2 nodes",
        "c.npz": "got",
        "d.npz": "not a valid",
        "e.pt": "edge_index",
        "h.npz": "node indices",
        "i.npz": "numbers in node_features",
        "j.npz": "not a valid",
    }
    for name, expected in {**words, "f.csv": ".npz", "g.npz": "nor a file"}.items():
        with pytest.raises(UsageError, match=expected):
            graphs.load_graph(str(tmp_path / name), None)


@pytest.mark.parametrize("place", ["Cora/raw", "planetoid/Cora/raw"])
def test_planetoid_files_are_read_and_left_alone(tmp_path: Path, place: str) -> None:
    raw_planetoid.write(tmp_path / place)
    before = sorted(tmp_path.rglob("*"))
    graph, words = graphs.load_graph("cora", tmp_path)
    assert (words, graph.num_nodes, int(graph.train_mask.sum())) == ("Cora", 518, 6)
    assert sorted(tmp_path.rglob("*")) == before


def refuse(self: Any) -> None:
    raise OSError("no connection")


def test_planetoid_files_that_are_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_geometric.datasets import Planetoid

    monkeypatch.setattr(Planetoid, "download", refuse)
    raw_planetoid.write(tmp_path / "Cora" / "raw")
    (tmp_path / "Cora/raw/ind.cora.ty").unlink()
    with pytest.raises(UsageError, match="--data-root") as told:
        graphs.load_graph("cora", tmp_path)
    assert str(told.value).startswith(
        f"{tmp_path / 'Cora/raw'} has no ind.cora.ty, and the download failed (no connection)."
    )


def test_why_files_cannot_be_fetched() -> None:
    def urlopen() -> None:
        try:
            raise socket.gaierror(-2, "Name or service not known")
        except socket.gaierror as error:
            raise OSError(f"<urlopen error {error}>") from error

    with pytest.raises(OSError, match="urlopen") as raised:
        urlopen()
    assert fetching.cause(raised.value) == "no network: Name or service not known"
    assert fetching.cause(FileNotFoundError("https://example.org/x")) == "not found: https://example.org/x"
    assert fetching.cause(RuntimeError()) == "RuntimeError"


def test_only_missing_files_are_fetched_and_pyg_reads_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_geometric.datasets import Planetoid

    raw_planetoid.write(tmp_path / "elsewhere")
    raw_planetoid.write(tmp_path / "Cora" / "raw")
    (tmp_path / "Cora/raw/ind.cora.ty").unlink()
    (tmp_path / "Cora/raw/ind.cora.y").write_bytes(b"mine")

    def download(self: Any) -> None:
        shutil.copytree(tmp_path / "elsewhere", self.raw_dir, dirs_exist_ok=True)

    monkeypatch.setattr(Planetoid, "download", download)
    monkeypatch.setattr(Planetoid, "process", refuse)
    with pytest.raises(UsageError, match=r"ind\.cora\.y"):
        graphs.load_graph("cora", tmp_path)
    (tmp_path / "Cora/raw/ind.cora.y").unlink()
    graphs.load_graph("cora", tmp_path)
    assert {path.name for path in (tmp_path / "Cora").rglob("*")} == {"raw", *planetoid.file_names("Cora")}
    assert len(list(tmp_path.iterdir())) == 2
