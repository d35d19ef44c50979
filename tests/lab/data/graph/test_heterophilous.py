"""Graphs from .npz files and from Geom-GCN's texts."""

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
from tests.lab.data.graph import made_up_graphs

from uncollapse.errors import UsageError
from uncollapse.lab.data.graph import datasets


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"edges": None}, r"must have .*edges.* It has"),
        ({"node_features": numpy.ones(40)}, "in node_features finite numbers"),
        ({"node_features": numpy.full((40, 2), numpy.inf)}, "in node_features finite numbers"),
        ({"node_features": numpy.ones((0, 2))}, "in node_features finite numbers"),
        ({"node_labels": numpy.ones(40)}, "40 classes counted from 0, got float64"),
        ({"node_labels": numpy.arange(39)}, "40 classes counted from 0"),
        ({"node_labels": numpy.full(40, -1)}, "40 classes counted from 0"),
        ({"node_labels": numpy.full(40, 10**12)}, "40 classes counted from 0"),
        ({"edges": numpy.array([[0, 40]])}, "40 nodes, and edges to 0 … 40"),
        ({"edges": numpy.array([0, 1])}, r"numbers of nodes \(E, 2\)"),
        ({"edges": numpy.array([[0.0, 1.0]])}, r"numbers of nodes \(E, 2\)"),
        ({"train_masks": numpy.ones(40)}, r"masks \(splits, nodes\)"),
        ({"train_masks": numpy.ones((9, 40))}, r"masks \(splits, nodes\)"),
        ({"train_masks": numpy.ones((10, 39))}, "masks of 40"),
        ({"train_masks": numpy.ones((10, 40))}, "in two of training"),
        ({"node_labels": numpy.array([{}] * 40, dtype=object)}, "not a valid"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    made_up_graphs.save(tmp_path / "texas.npz", **changes)
    with pytest.raises(UsageError, match=rf"texas\.npz .*{words}"):
        datasets.load_graph("texas", root=tmp_path)


def test_damaged_files_are_read_or_refused(tmp_path: Path) -> None:
    path = made_up_graphs.save(tmp_path / "texas.npz")
    intact, numbers, refused = path.read_bytes(), random.Random(0), 0
    for _ in range(150):
        damaged = bytearray(intact[: numbers.randrange(len(intact))] if numbers.random() < 0.2 else intact)
        for _ in range(numbers.randint(1, 4)):
            if damaged:
                damaged[numbers.randrange(len(damaged))] = numbers.randrange(256)
        path.write_bytes(damaged)
        try:
            made_up_graphs.assert_sound(datasets.load_graph("texas", root=tmp_path))
        except UsageError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("name", "raw"), [("chameleon", "chameleon/geom_gcn/raw"), ("actor", "actor/raw"), ("cornell", "cornell/raw")]
)
def test_raw_files_of_pyg_give_the_same_graph(tmp_path: Path, name: str, raw: str) -> None:
    pytest.importorskip("torch_geometric")
    made_up_graphs.geom_gcn(tmp_path / raw, {"actor": "film"}.get(name, name), indices=name == "actor")
    before = sorted(tmp_path.rglob("*"))
    found = datasets.load_graph(name, split_index=3, root=tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    made_up_graphs.save(tmp_path / f"{name}.npz")
    assert found.fingerprint() == datasets.load_graph(name, split_index=3, root=tmp_path).fingerprint()


def test_raw_files_that_are_torn(tmp_path: Path) -> None:
    pytest.importorskip("torch_geometric")
    made_up_graphs.geom_gcn(tmp_path / "texas/raw", "texas")
    (tmp_path / "texas/raw/out1_graph_edges.txt").write_text("from\tto\n0\tone\n", encoding="ascii")
    with pytest.raises(UsageError, match=r"texas.*geom-gcn"):
        datasets.load_graph("texas", root=tmp_path)
