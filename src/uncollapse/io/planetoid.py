"""Planetoid's raw files of Cora, CiteSeer and PubMed, without running anything that they contain.

The files are pickles, and a pickle is a program. PyG unpickles them only if every file is one of the public files, by
its SHA-256. Other files go through a restricted unpickler: it allows only the instructions that matrices and lists of
neighbors need, and replaces every class by a stand-in that stores its arguments and does nothing. Declared sizes are
compared with the number of bytes before any memory is taken. Both ways give the same tensors to the bit.
"""

import hashlib
import io
import math
import pickle
import pickletools
import tempfile
from collections.abc import Callable, Mapping
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from uncollapse.errors import UsageError, import_optional
from uncollapse.io.loading import silence_libraries

T = TypeVar("T")

SUFFIXES = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
VALIDATION = 500  # nodes of the public split: those after the training nodes
MOST = 2**26  # values of a dense matrix: five times the largest of Planetoid's
INSTRUCTIONS = (
    "PROTO STOP MARK GLOBAL REDUCE NEWOBJ BUILD BINPUT LONG_BINPUT BINGET LONG_BINGET NONE NEWTRUE NEWFALSE "
    "BININT BININT1 BININT2 SHORT_BINSTRING BINSTRING TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_TUPLE EMPTY_LIST EMPTY_DICT "
    "APPEND APPENDS SETITEM SETITEMS"
)
NUMBERS = {code: numpy.dtype(f"<{code.decode()}") for code in (b"i4", b"i8", b"f4", b"f8")}


class Citations(NamedTuple):
    """Features x (n, d), edges (2, E) sorted by the second node, classes y (n,), and the masks (n,) of a split."""

    x: Tensor
    edge_index: Tensor
    y: Tensor
    train: Tensor
    validation: Tensor
    test: Tensor


def file_names(name: str) -> list[str]:
    """Return the names of a dataset's files."""
    return [f"ind.{name.lower()}.{suffix}" for suffix in SUFFIXES]


def read_planetoid(folder: Path, name: str) -> Citations:
    """Read the eight files of Cora, CiteSeer or PubMed.

    `allx` and `ally` have the first nodes; the first of these, in `x` and `y`, are for training. `tx` and `ty` have the
    test nodes, in the order of `test.index`. CiteSeer's test nodes without any edge are missing there: they get zeros
    as features, and class 0. The split is the public one.
    """
    contents = {file: _read_bytes(folder / file) for file in file_names(name)}
    if _are_public(contents) and find_spec("torch_geometric") is not None and find_spec("scipy") is not None:
        return _read_with_pyg(contents, name)
    return _read_restricted(folder, name, contents)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error


def _are_public(contents: Mapping[str, bytes]) -> bool:
    """Return whether all files are the published ones, by their SHA-256."""
    lines = (files("uncollapse.io") / "data" / "planetoid.sha256").read_text(encoding="ascii").splitlines()
    known = {name: digest for digest, name in map(str.split, lines)}
    return all(known.get(name) == hashlib.sha256(content).hexdigest() for name, content in contents.items())


def _read_with_pyg(contents: Mapping[str, bytes], name: str) -> Citations:
    """Read public files with PyG, from a private copy that cannot be replaced after the check of SHA-256."""
    with silence_libraries(), tempfile.TemporaryDirectory() as folder:
        for file, content in contents.items():
            (Path(folder) / file).write_bytes(content)
        data: Any = import_optional("torch_geometric.io", "pyg").read_planetoid_data(folder, name)
    return Citations(data.x, data.edge_index, data.y, data.train_mask, data.val_mask, data.test_mask)


def _read_restricted(folder: Path, name: str, contents: Mapping[str, bytes]) -> Citations:
    paths = [folder / file for file in file_names(name)]
    labelled, allx, tx, ally, ty = _read_matrices(folder, name, contents)
    test = _read_test_index(paths[7], contents[paths[7].name])
    nodes = int(test.max()) + 1 if name.lower() == "citeseer" else len(allx) + len(tx)
    _check_test_index(folder, test, (len(allx), len(tx), nodes), allx.shape[1])
    if nodes < labelled + VALIDATION:
        raise UsageError(f"{folder}: {name} must have {VALIDATION} nodes more than the {labelled} of y, got {nodes}.")
    numbers = torch.arange(nodes)
    return Citations(
        _join_nodes(allx, tx, test, nodes),
        _read_edges(paths[6], contents[paths[6].name], nodes),
        _join_nodes(ally, ty, test, nodes).max(dim=1)[1],
        numbers < labelled,
        (numbers >= labelled) & (numbers < labelled + VALIDATION),
        torch.zeros(nodes, dtype=torch.bool).index_fill(0, test, True),
    )


def _read_matrices(
    folder: Path, name: str, contents: Mapping[str, bytes]
) -> tuple[int, Tensor, Tensor, Tensor, Tensor]:
    """Return the number of training nodes, and the features and labels of the first and of the test nodes."""
    matrices = (torch.from_numpy(_matrix(folder / file, contents[file])) for file in file_names(name)[:6])
    x, tx, allx, y, ty, ally = matrices
    if not (len(x) == len(y) and len(tx) == len(ty) and len(allx) == len(ally)):
        raise UsageError(f"{folder}: the files of {name} do not belong together, they differ in the number of nodes.")
    if not (x.shape[1] == tx.shape[1] == allx.shape[1] and y.shape[1] == ty.shape[1] == ally.shape[1] > 0):
        raise UsageError(f"{folder}: the files of {name} do not belong together, they differ in features or classes.")
    return len(y), allx, tx, ally, ty


def _join_nodes(first: Tensor, last: Tensor, test: Tensor, nodes: int) -> Tensor:
    """Return the rows of all nodes. Row i of the last ones belongs to node test[i]; nodes in neither get zeros."""
    rows = torch.cat([first, first.new_zeros(nodes - len(first), first.shape[1])])
    rows[test] = last
    return rows


def _read_test_index(path: Path, content: bytes) -> Tensor:
    try:
        index = torch.tensor([int(line) for line in content.decode("ascii").split()], dtype=torch.long)
        if len(index) == 0:
            raise ValueError
        return index
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"{path} must have the number of a node on each line.") from error


def _check_test_index(folder: Path, test: Tensor, sizes: tuple[int, int, int], features: int) -> None:
    first, last, nodes = sizes
    fits = len(test) == last == len(set(test.tolist())) and bool(((test >= first) & (test < nodes)).all())
    if not fits or nodes * features > MOST:
        raise UsageError(
            f"{folder}: test.index must have the {last} test nodes, each once, from {first} on and below {nodes}, "
            f"got {len(test)} from {int(test.min())} to {int(test.max())}."
        )


def _read_edges(path: Path, content: bytes, nodes: int) -> Tensor:
    """Return each edge once, without self-loops."""
    neighbours = _neighbours(path, content)
    ends = [(node, other) for node, others in neighbours.items() for other in others if node != other]
    if not all(0 <= node < nodes for pair in ends for node in pair):
        raise UsageError(f"{path} has edges to nodes that are not among the {nodes}.")
    start, end = torch.tensor(ends, dtype=torch.long).reshape(-1, 2).T
    codes = torch.unique(end * nodes + start)
    return torch.stack([codes % nodes, codes // nodes])


def read_matrix(path: Path) -> NDArray[numpy.float32]:
    """Read a dense or sparse matrix of finite numbers as a dense one, with the restricted unpickler."""
    return _matrix(path, _read_bytes(path))


def _matrix(path: Path, pickled: bytes) -> NDArray[numpy.float32]:
    def convert(content: Any) -> NDArray[numpy.float32]:
        if not isinstance(content, _Array | _SparseMatrix):
            raise ValueError("it has no matrix")
        values = content.values()
        if values.ndim != 2 or not numpy.isfinite(values).all():
            raise ValueError(f"it has no matrix of finite numbers, but an array of shape {values.shape}")
        return values.astype(numpy.float32)

    return _unpickle(path, pickled, convert)


def read_neighbours(path: Path) -> dict[int, list[int]]:
    """Read a dictionary from each node to the list of its neighbors, with the restricted unpickler."""
    return _neighbours(path, _read_bytes(path))


def _neighbours(path: Path, pickled: bytes) -> dict[int, list[int]]:
    def convert(content: Any) -> dict[int, list[int]]:
        if not isinstance(content, dict) or not all(type(them) is list for them in content.values()):
            raise ValueError("it has no dictionary of lists")
        if sum(map(len, content.values())) > len(pickled):  # a list that is named many times
            raise ValueError("it has more neighbours than bytes")
        if not all(type(node) is int for them in (content, *content.values()) for node in them):
            raise ValueError("it has nodes that are not integers")
        return dict(content)

    return _unpickle(path, pickled, convert)


def _unpickle(path: Path, pickled: bytes, convert: Callable[[Any], T]) -> T:
    try:
        _check_instructions(pickled)
        return convert(_Unpickler(io.BytesIO(pickled), encoding="bytes").load())
    except Exception as error:  # a pickle can make the unpickler and numpy raise anything
        reason = f": {error}" if isinstance(error, ValueError) else ""
        raise UsageError(f"{path} is not a valid Planetoid file{reason}. Download it again.") from error


def _check_instructions(pickled: bytes) -> None:
    """Raise for unknown instructions, and for a memo index beyond the file: the memo grows to the largest index."""
    allowed = frozenset(INSTRUCTIONS.split())
    for instruction, argument, _ in pickletools.genops(pickled):
        if instruction.name not in allowed:
            raise ValueError(f"it has the instruction {instruction.name}, which is not allowed")
        if instruction.name == "LONG_BINPUT" and int(argument or 0) > len(pickled):
            raise ValueError("it asks for more memory than it can need")


class _StandIn:
    """Stores the arguments that it is called with and the state that it is given."""

    __slots__ = ("arguments", "state")

    def __init__(self, *arguments: Any) -> None:
        self.arguments: Any = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Dtype(_StandIn):
    __slots__ = ()


class _Array(_StandIn):
    __slots__ = ()

    def values(self) -> NDArray[Any]:
        version, shape, dtype, by_columns, content = self.state
        if not isinstance(dtype, _Dtype) or dtype.arguments[0] not in NUMBERS or dtype.state[1] != b"<":
            raise ValueError("it has an array of something other than numbers")
        numbers = NUMBERS[dtype.arguments[0]]
        if version != 1 or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError("it has an array in another format")
        if type(content) is not bytes or len(content) != math.prod(shape) * numbers.itemsize:
            raise ValueError(f"it has an array of shape {tuple(shape)} with another number of bytes")
        return numpy.frombuffer(content, numbers).reshape(shape, order="F" if by_columns else "C")


class _SparseMatrix(_StandIn):
    """A CSR matrix: the values of row i, and their columns, are at indptr[i] … indptr[i + 1]."""

    __slots__ = ()

    def values(self) -> NDArray[Any]:
        rows, columns = self.state[b"_shape"]
        ends, places, values = (self.state[key].values() for key in (b"indptr", b"indices", b"data"))
        counts = numpy.diff(ends)
        if not type(rows) is type(columns) is int or len(counts) != rows or rows * columns > MOST:
            raise ValueError(f"it has a sparse matrix of {rows} × {columns} values with {len(counts)} rows")
        valid = ends[0] == 0 and (counts >= 0).all() and ends[-1] == len(places) == len(values)
        if not valid or (len(places) and not 0 <= places.min() <= places.max() < columns):
            raise ValueError("it has a sparse matrix with values out of place")
        dense = numpy.zeros((rows, columns), values.dtype)
        numpy.add.at(dense, (numpy.repeat(numpy.arange(rows), counts), places), values)  # duplicates are summed
        return dense


class _Dictionary(dict[Any, Any]):
    """A dictionary that ignores a default factory."""

    __slots__ = ()

    def __init__(self, *ignored: Any) -> None:
        super().__init__()


STAND_INS: dict[tuple[str, str], type] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("scipy.sparse.csr", "csr_matrix"): _SparseMatrix,
    ("collections", "defaultdict"): _Dictionary,
    ("__builtin__", "list"): _StandIn,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in STAND_INS:
            raise ValueError(f"it asks for {module}.{name}, which is not allowed")
        return STAND_INS[module, name]
