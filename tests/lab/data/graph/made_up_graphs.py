"""Made-up data sets in the formats of real ones."""

import gzip
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from uncollapse.lab.data.graph.datasets import WITH_SELF_LOOPS, Graph

NODES, SPLITS = 40, 10


def heterophilous() -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file."""
    random = numpy.random.default_rng(0)
    part = numpy.stack([random.permutation(NODES) % 5 for _ in range(SPLITS)])
    return {
        "node_features": numpy.append(numpy.ones((NODES, 1)), random.random((NODES, 5)) < 0.4, 1).astype("float32"),
        "node_labels": numpy.arange(NODES) % 4,
        "edges": random.integers(0, NODES, (90, 2)),
        "train_masks": part < 2,
        "val_masks": part == 2,
        "test_masks": part > 2,
    }


def save(path: Path, **changes: Any) -> Path:
    """A file of it, with other arrays; None leaves one out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {key: value for key, value in (heterophilous() | changes).items() if value is not None}
    numpy.savez(path, **arrays)
    return path


def geom_gcn(folder: Path, name: str, *, indices: bool = False) -> None:
    """The same graph as the texts and masks of Geom-GCN; indices: features as the places of ones, as Actor has them."""
    arrays = heterophilous()
    folder.mkdir(parents=True)
    nodes = ["node\tfeature\tlabel"]
    for node, (row, label) in enumerate(zip(arrays["node_features"], arrays["node_labels"], strict=True)):
        values = row.nonzero()[0] if indices else row.astype(int)
        nodes.append(f"{node}\t{','.join(map(str, values))}\t{label}")
    edges = ["from\tto", *(f"{a}\t{b}" for a, b in arrays["edges"])]
    (folder / "out1_node_feature_label.txt").write_text("\n".join(nodes) + "\n", encoding="ascii")
    (folder / "out1_graph_edges.txt").write_text("\n".join(edges) + "\n", encoding="ascii")
    for index in range(SPLITS):
        masks = {f"{part}_mask": arrays[f"{part}_masks"][index] for part in ("train", "val", "test")}
        numpy.savez(folder / f"{name}_split_0.6_0.2_{index}.npz", **masks)


def arxiv(folder: Path) -> None:
    """Five papers in ogb's format."""
    rows = {"raw/node-feat": ["0.5,-1"] * 5, "raw/node-label": list("01201"), "raw/edge": ["0,1", "1,2", "3,4"]}
    rows |= {"split/time/train": list("012"), "split/time/valid": ["3"], "split/time/test": ["4"]}
    for name, lines in rows.items():
        path = folder / f"{name}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode()))


def assert_sound(graph: Graph) -> None:
    """Edges in both directions, sorted, each once, without loops but where they count; masks that do not overlap."""
    nodes, (start, end) = len(graph.x), graph.edge_index
    assert graph.x.dtype == torch.float32
    assert graph.y.shape == graph.train.shape == graph.validation.shape == graph.test.shape == (nodes,)
    codes = start * nodes + end
    assert bool((codes[1:] > codes[:-1]).all()), "sorted, each once"
    assert graph.name in WITH_SELF_LOOPS or bool((start != end).all())
    assert torch.equal(codes, (end * nodes + start).sort()[0]), "both directions"
    assert int((graph.train.int() + graph.validation.int() + graph.test.int()).max()) == 1
    assert bool(graph.train.any() and graph.validation.any() and graph.test.any())
