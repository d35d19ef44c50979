"""Graphs by name."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.io import raw_planetoid
from tests.lab.data.graph import made_up_graphs

from uncollapse.errors import UsageError
from uncollapse.lab.data.graph import datasets as graphs
from uncollapse.lab.data.graph import graph_files

FOLDER = os.environ.get("UNCOLLAPSE_DATA")
FINGERPRINTS = {
    "cora": "9b6ea8b58404974c",
    "citeseer": "dddc5ff8c83b6c93",
    "pubmed": "2896ccc4d720474e",
    "chameleon": "a1a0b4bd03d226c5",
    "squirrel": "0060af454e96fc4c",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, folder in (("cora", "Cora"), ("citeseer", "CiteSeer"), ("pubmed", "PubMed")):
        raw_planetoid.write(tmp_path / folder / "raw", name)
    for name in graph_files.LOADERS:
        made_up_graphs.save(tmp_path / "heterophilous" / f"{name}.npz")
    made_up_graphs.arxiv(tmp_path / "ogbn_arxiv")
    return tmp_path


@pytest.mark.parametrize("split", [split for split in graphs.SPLITS if split != "contranorm"])
def test_every_graph_with_every_split(root: Path, split: str) -> None:
    for name in graphs.NAMES:
        if (name, split) not in {("arxiv", "60/20/20"), ("arxiv", "48/32/20")}:  # five nodes are too few
            made_up_graphs.assert_sound(graphs.load_graph(name, split=split, root=root))


def test_published_test_nodes_are_all_others(root: Path) -> None:
    published, public = (graphs.load_graph("cora", split=split, root=root) for split in ("published", "public"))
    assert torch.equal(published.train, public.train)
    assert torch.equal(published.validation, public.validation)
    assert torch.equal(published.test, ~(public.train | public.validation))
    assert int(public.test.sum()) == 8


def test_self_loops_of_the_files_count_as_published(root: Path) -> None:
    edges = made_up_graphs.heterophilous()["edges"]
    looped = sorted({int(a) for a, b in edges if a == b})
    assert looped
    published, none = (
        graphs.load_graph("chameleon", self_loops=which, root=root).edge_index for which in graphs.SELF_LOOPS
    )
    assert published[0, published[0] == published[1]].tolist() == looped
    assert torch.equal(none, published[:, published[0] != published[1]])
    other = graphs.load_graph("texas", root=root).edge_index
    assert bool((other[0] != other[1]).all())
    directed = made_up_graphs.save(root / "heterophilous" / "chameleon_directed.npz", edges=edges[:80])
    assert graphs.load_graph("chameleon", root=root).edge_index.shape[1] < published.shape[1]  # it is preferred
    directed.unlink()
    made_up_graphs.save(root / "heterophilous" / "chameleon.npz", edges=edges[edges[:, 0] != edges[:, 1]])
    with pytest.raises(UsageError, match="chameleon_directed"):
        graphs.load_graph("chameleon", root=root)
    with pytest.raises(UsageError, match="self_loops"):
        graphs.load_graph("chameleon", self_loops="twice", root=root)


def test_chance_is_said_by_the_index() -> None:
    first, again, other = (graphs.load_graph("csbm", split_index=index).fingerprint() for index in (0, 0, 1))
    assert first == again != other


def test_a_fingerprint_changes_with_anything(root: Path) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"missing": 0.5},
        {"normalise": "none"},
        {"split": "60/20/20"},
        {"split_index": 1},
    ]
    found = {graphs.load_graph("texas", root=root, **option).fingerprint() for option in options}
    assert len(found) == len(options)


def test_missing_features_are_those_of_validation_and_test_nodes(root: Path) -> None:
    graph = graphs.load_graph("cora", normalise="standard", missing=1.0, root=root)
    assert torch.equal((graph.x == 0).all(1), graph.validation | graph.test)
    half = graphs.load_graph("cora", normalise="standard", missing=0.5, root=root)
    assert int((half.x == 0).all(1).sum()) == round(0.5 * 512)


def test_normalisation(root: Path) -> None:
    assert torch.allclose(graphs.load_graph("chameleon", root=root).x.sum(1).max(), torch.tensor(1.0))
    assert float(graphs.load_graph("arxiv", root=root).x[0, 0]) == 0.5
    assert float(graphs.load_graph("csbm", normalise="unit").x.norm(dim=1).max()) == pytest.approx(1.0)


@pytest.mark.skipif(FOLDER is None, reason="UNCOLLAPSE_DATA names the folder that has the data sets")
@pytest.mark.parametrize("name", FINGERPRINTS)
def test_results_are_of_these_data(name: str) -> None:
    graph = graphs.load_graph(name, root=Path(str(FOLDER)))
    made_up_graphs.assert_sound(graph)
    assert graph.fingerprint() == FINGERPRINTS[name]


def test_names_that_are_none() -> None:
    with pytest.raises(UsageError, match="'chameleon'"):
        graphs.load_graph("chameleom")


def test_graphs_that_are_not_there_say_where_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("torch_geometric.datasets")

    def refuse(self: Any) -> None:
        raise OSError("no connection")

    for kind in (datasets.Planetoid, datasets.WikipediaNetwork, datasets.Actor, datasets.WebKB):
        monkeypatch.setattr(kind, "download", refuse)
    monkeypatch.setitem(sys.modules, "ogb", None)
    for name in graphs.NAMES:
        if name in (*graphs.DRAWN, "karate"):
            continue
        with pytest.raises(UsageError, match="--data-root") as told:
            graphs.load_graph(name, root=tmp_path)
        assert str(tmp_path) in str(told.value)
        assert "GitHub" in str(told.value) or name == "arxiv"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="ogb"):
        graphs.load_graph("arxiv", root=tmp_path)
