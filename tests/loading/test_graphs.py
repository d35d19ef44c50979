"""Graphs by name and file."""

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import scipy.sparse
import torch
from typer.testing import Result

from uncollapse.diagnosis import Diagnosis
from uncollapse.loading import UsageError, graphs

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
    graph, words = graphs.load(str(path), None)
    assert words == "small.npz"
    assert graph.x.dtype == torch.float32
    pairs = set(map(tuple, graph.edge_index.T.tolist()))
    assert pairs == {(0, 1), (1, 0), (1, 2), (2, 1), (3, 0), (0, 3)}


def test_pt_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "small.pt"
    x, edges = torch.randn(4, 3), torch.tensor([[0, 1], [1, 2]])
    torch.save({"x": x, "edge_index": edges}, path)
    graph, _ = graphs.load(str(path), None)
    assert torch.equal(graph.x, x)
    assert torch.equal(graph.edge_index, edges)


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    numpy.savez(tmp_path / "a.npz", features=numpy.eye(2))
    numpy.savez(tmp_path / "b.npz", node_features=numpy.eye(2), edges=[[0, 5]])
    numpy.savez(tmp_path / "c.npz", node_features=numpy.ones(2), edges=[[0, 1]])
    (tmp_path / "d.npz").write_bytes(b"no archive")
    torch.save([1, 2], tmp_path / "e.pt")
    (tmp_path / "f.csv").touch()
    words = {
        "a.npz": "There are: features",
        "b.npz": "2 nodes, and edges to 0 … 5",
        "c.npz": "got",
        "d.npz": "no intact",
        "e.pt": "edge_index",
    }
    for name, expected in {**words, "f.csv": ".npz", "g.npz": "nor a file"}.items():
        with pytest.raises(UsageError, match=expected):
            graphs.load(str(tmp_path / name), None)


def raw_planetoid(folder: Path, nodes: int = 520) -> None:
    """A ring of nodes in Planetoid's format, whose split takes 500 for validation; the last two are test nodes."""
    folder.mkdir(parents=True)
    features, labels = scipy.sparse.csr_matrix(numpy.eye(nodes, 5, dtype="float32")), numpy.eye(nodes, 2)
    parts = {"x": features[:2], "tx": features[-2:], "allx": features[:-2]}
    parts |= {"y": labels[:2], "ty": labels[-2:], "ally": labels[:-2]}
    parts["graph"] = {node: [(node + 1) % nodes, (node - 1) % nodes] for node in range(nodes)}
    for name, part in parts.items():
        (folder / f"ind.cora.{name}").write_bytes(pickle.dumps(part))
    (folder / "ind.cora.test.index").write_text(f"{nodes - 2}\n{nodes - 1}\n", encoding="utf-8")


@pytest.mark.parametrize("place", ["Cora/raw", "planetoid/Cora/raw"])
def test_planetoid_files_are_read_and_left_alone(tmp_path: Path, place: str) -> None:
    raw_planetoid(tmp_path / place)
    before = sorted(tmp_path.rglob("*"))
    graph, words = graphs.load("cora", tmp_path)
    assert (words, graph.num_nodes, graph.num_edges) == ("Cora", 520, 1040)
    assert sorted(tmp_path.rglob("*")) == before


def test_planetoid_files_that_are_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_geometric.datasets import Planetoid

    def refuse(self: Planetoid) -> None:
        raise OSError("no connection")

    monkeypatch.setattr(Planetoid, "download", refuse)
    with pytest.raises(UsageError, match="--data-root"):
        graphs.load("cora", tmp_path)
