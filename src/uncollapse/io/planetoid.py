"""Planetoid's raw files of Cora, CiteSeer and PubMed, read as PyG reads them and without its unpickler."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from uncollapse.errors import UsageError
from uncollapse.io.pickles import MOST, read_matrix, read_neighbours

PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
VALIDATION = 500  # nodes of the public split, those behind the training nodes


class Citations(NamedTuple):
    """Features x (n, d), edges (2, E) sorted by the second node, classes y (n,), and the masks (n,) of a split."""

    x: Tensor
    edge_index: Tensor
    y: Tensor
    train: Tensor
    validation: Tensor
    test: Tensor


def file_names(name: str) -> list[str]:
    """The files of a data set."""
    return [f"ind.{name.lower()}.{part}" for part in PARTS]


def read(folder: Path, name: str) -> Citations:
    """Read the eight files of Cora, CiteSeer or PubMed.

    `allx` and `ally` have the first nodes, of which the first ones, in `x` and `y`, are for training. `tx` and `ty`
    have the test nodes, in the order of `test.index`. CiteSeer's test nodes without any edge are not in them: they get
    zeros for features, and class 0. The split is the public one.
    """
    labelled, allx, tx, ally, ty = _matrices(folder, name)
    test = _test_index(folder / file_names(name)[7])
    nodes = int(test.max()) + 1 if name.lower() == "citeseer" else len(allx) + len(tx)
    _check_test(folder, test, (len(allx), len(tx), nodes), allx.shape[1])
    if nodes < labelled + VALIDATION:
        raise UsageError(f"{folder}: {name} must have {VALIDATION} nodes more than the {labelled} of y, got {nodes}.")
    places = torch.arange(nodes)
    return Citations(
        _all_nodes(allx, tx, test, nodes),
        _edges(folder / file_names(name)[6], nodes),
        _all_nodes(ally, ty, test, nodes).max(dim=1)[1],
        places < labelled,
        (places >= labelled) & (places < labelled + VALIDATION),
        torch.zeros(nodes, dtype=torch.bool).index_fill(0, test, True),
    )


def _matrices(folder: Path, name: str) -> tuple[int, Tensor, Tensor, Tensor, Tensor]:
    """How many nodes are for training, and the features and labels of the first and of the test nodes."""
    x, tx, allx, y, ty, ally = (torch.from_numpy(read_matrix(folder / file)) for file in file_names(name)[:6])
    if not (len(x) == len(y) and len(tx) == len(ty) and len(allx) == len(ally)):
        raise UsageError(f"{folder}: the files of {name} do not belong together, they differ in the number of nodes.")
    if not (x.shape[1] == tx.shape[1] == allx.shape[1] and y.shape[1] == ty.shape[1] == ally.shape[1] > 0):
        raise UsageError(f"{folder}: the files of {name} do not belong together, they differ in features or classes.")
    return len(y), allx, tx, ally, ty


def _all_nodes(first: Tensor, last: Tensor, test: Tensor, nodes: int) -> Tensor:
    """The rows of all nodes; row i of the last ones belongs to node test[i], and nodes in neither get zeros."""
    rows = torch.cat([first, first.new_zeros(nodes - len(first), first.shape[1])])
    rows[test] = last
    return rows


def _test_index(path: Path) -> Tensor:
    try:
        index = torch.tensor([int(line) for line in path.read_text(encoding="ascii").split()], dtype=torch.long)
        if len(index) == 0:
            raise ValueError
        return index
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"{path} must have the number of a node in each line.") from error


def _check_test(folder: Path, test: Tensor, sizes: tuple[int, int, int], features: int) -> None:
    first, last, nodes = sizes
    fits = len(test) == last == len(set(test.tolist())) and bool(((test >= first) & (test < nodes)).all())
    if not fits or nodes * features > MOST:
        raise UsageError(
            f"{folder}: test.index must have the {last} test nodes, each once, from {first} on and below {nodes}, "
            f"got {len(test)} from {int(test.min())} to {int(test.max())}."
        )


def _edges(path: Path, nodes: int) -> Tensor:
    """Each edge once, without self-loops."""
    neighbours = read_neighbours(path)
    ends = [(node, other) for node, others in neighbours.items() for other in others if node != other]
    if not all(0 <= node < nodes for pair in ends for node in pair):
        raise UsageError(f"{path} has edges to nodes that are not among the {nodes}.")
    start, end = torch.tensor(ends, dtype=torch.long).reshape(-1, 2).T
    codes = torch.unique(end * nodes + start)
    return torch.stack([codes % nodes, codes // nodes])
