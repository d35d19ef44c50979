"""Planetoid's raw files of Cora, CiteSeer and PubMed, read as PyG reads them and without its unpickler."""

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from uncollapse.errors import UsageError

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


def read_planetoid(folder: Path, name: str) -> Citations:
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


T = TypeVar("T")

INSTRUCTIONS = (
    "PROTO STOP MARK GLOBAL REDUCE NEWOBJ BUILD BINPUT LONG_BINPUT BINGET LONG_BINGET NONE NEWTRUE NEWFALSE "
    "BININT BININT1 BININT2 SHORT_BINSTRING BINSTRING TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_TUPLE EMPTY_LIST EMPTY_DICT "
    "APPEND APPENDS SETITEM SETITEMS"
)
NUMBERS = {code: numpy.dtype(f"<{code.decode()}") for code in (b"i4", b"i8", b"f4", b"f8")}
MOST = 2**26  # values of a dense matrix, five times the largest of Planetoid's


class _Held:
    """Keeps the arguments that it is called with and the state that it is given."""

    __slots__ = ("arguments", "state")

    def __init__(self, *arguments: Any) -> None:
        self.arguments: Any = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Array(_Held):
    __slots__ = ()

    def values(self) -> NDArray[Any]:
        version, shape, kind, by_columns, content = self.state
        if not isinstance(kind, _Kind) or kind.arguments[0] not in NUMBERS or kind.state[1] != b"<":
            raise ValueError("it has an array of something else than numbers")
        dtype = NUMBERS[kind.arguments[0]]
        if version != 1 or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError("it has an array in another format")
        if type(content) is not bytes or len(content) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"it has an array of shape {tuple(shape)} with another number of bytes")
        return numpy.frombuffer(content, dtype).reshape(shape, order="F" if by_columns else "C")


class _Kind(_Held):
    __slots__ = ()


class _Rows(_Held):
    """A sparse matrix: the values of row i, and their columns, are at places indptr[i] … indptr[i + 1]."""

    __slots__ = ()

    def values(self) -> NDArray[Any]:
        rows, columns = self.state[b"_shape"]
        ends, places, values = (self.state[key].values() for key in (b"indptr", b"indices", b"data"))
        counts = numpy.diff(ends)
        if not type(rows) is type(columns) is int or len(counts) != rows or rows * columns > MOST:
            raise ValueError(f"it has a sparse matrix of {rows} × {columns} values with {len(counts)} rows")
        whole = ends[0] == 0 and (counts >= 0).all() and ends[-1] == len(places) == len(values)
        if not whole or (len(places) and not 0 <= places.min() <= places.max() < columns):
            raise ValueError("it has a sparse matrix with values out of place")
        dense = numpy.zeros((rows, columns), values.dtype)
        numpy.add.at(dense, (numpy.repeat(numpy.arange(rows), counts), places), values)  # twice the same place: the sum
        return dense


class _Table(dict[Any, Any]):
    """A dictionary; what it was told to make for missing keys is ignored."""

    __slots__ = ()

    def __init__(self, *ignored: Any) -> None:
        super().__init__()


STAND_INS: dict[tuple[str, str], type] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Kind,
    ("scipy.sparse.csr", "csr_matrix"): _Rows,
    ("collections", "defaultdict"): _Table,
    ("__builtin__", "list"): _Held,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in STAND_INS:
            raise ValueError(f"it asks for {module}.{name}, which it may not have")
        return STAND_INS[module, name]


def read_matrix(path: Path) -> NDArray[numpy.float32]:
    """A dense or sparse matrix of finite numbers, as a dense one."""

    def matrix(content: Any, size: int) -> NDArray[numpy.float32]:
        if not isinstance(content, _Array | _Rows):
            raise ValueError("it has no matrix")
        values = content.values()
        if values.ndim != 2 or not numpy.isfinite(values).all():
            raise ValueError(f"it has no matrix of finite numbers, but an array of shape {values.shape}")
        return values.astype(numpy.float32)

    return _read(path, matrix)


def read_neighbours(path: Path) -> dict[int, list[int]]:
    """A dictionary from each node to the list of its neighbours."""

    def neighbours(content: Any, size: int) -> dict[int, list[int]]:
        if not isinstance(content, dict) or not all(type(them) is list for them in content.values()):
            raise ValueError("it has no dictionary of lists")
        if sum(map(len, content.values())) > size:  # a list that is named many times
            raise ValueError("it has more neighbours than bytes")
        if not all(type(node) is int for them in (content, *content.values()) for node in them):
            raise ValueError("it has nodes that are no integers")
        return dict(content)

    return _read(path, neighbours)


def _read(path: Path, understand: Callable[[Any, int], T]) -> T:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        _check(content)
        return understand(_Unpickler(io.BytesIO(content), encoding="bytes").load(), len(content))
    except Exception as error:  # a pickle can make the unpickler and numpy raise anything
        reason = f": {error}" if isinstance(error, ValueError) else ""
        raise UsageError(f"{path} is not a valid Planetoid file{reason}. Download it again.") from error


def _check(content: bytes) -> None:
    """Only known instructions, and no memo larger than the file: its size is what the largest index says."""
    allowed = frozenset(INSTRUCTIONS.split())
    for instruction, argument, _ in pickletools.genops(content):
        if instruction.name not in allowed:
            raise ValueError(f"it has the instruction {instruction.name}, which it may not have")
        if instruction.name == "LONG_BINPUT" and int(argument or 0) > len(content):
            raise ValueError("it asks for more memory than it can need")
