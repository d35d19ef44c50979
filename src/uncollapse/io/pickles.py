"""Pickles of numbers, as Python 2 wrote them, read without running anything that stands in them.

A pickle is a program. Here it may use only the instructions that matrices and lists of neighbours need, and every class
that it may name is replaced by a stand-in, which keeps what it is given and does nothing. Sizes that are declared are
compared with the bytes that are there before anything is made of them.
"""

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy
from numpy.typing import NDArray

from uncollapse.errors import UsageError

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
        raise UsageError(
            f"{path} is no intact file of Planetoid's{reason}. Get it again from where it came."
        ) from error


def _check(content: bytes) -> None:
    """Only known instructions, and no memo larger than the file: its size is what the largest index says."""
    allowed = frozenset(INSTRUCTIONS.split())
    for instruction, argument, _ in pickletools.genops(content):
        if instruction.name not in allowed:
            raise ValueError(f"it has the instruction {instruction.name}, which it may not have")
        if instruction.name == "LONG_BINPUT" and int(argument or 0) > len(content):
            raise ValueError("it asks for more memory than it can need")
