"""Planetoid's raw files as Python 2 wrote them: protocol 2, strings of bytes, the old names of numpy and scipy."""

import struct
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray


def string(content: bytes) -> bytes:
    return b"U" + bytes([len(content)]) + content if len(content) < 256 else b"T" + number(len(content)) + content


def number(value: int) -> bytes:
    return struct.pack("<i", value)


def integer(value: int) -> bytes:
    return b"J" + number(value)


def group(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def kind(code: bytes, order: bytes = b"<") -> bytes:
    made = b"cnumpy\ndtype\n" + group(string(code), integer(0), integer(1)) + b"R"
    return made + group(integer(3), string(order), b"NNN", *map(integer, (-1, -1, 0))) + b"b"


def array_of(shape: tuple[int, ...], kind: bytes, content: bytes, *, by_columns: bool = False) -> bytes:
    made = (
        b"cnumpy.core.multiarray\n_reconstruct\n" + group(b"cnumpy\nndarray\n", group(integer(0)), string(b"b")) + b"R"
    )
    flag = b"\x88" if by_columns else b"\x89"
    return made + group(integer(1), group(*map(integer, shape)), kind, flag, string(content)) + b"b"


def array(values: NDArray[Any]) -> bytes:
    return array_of(values.shape, kind(values.dtype.str[1:].encode()), values.tobytes())


def sparse_of(shape: tuple[int, int], **parts: bytes) -> bytes:
    items = [string(b"_shape"), group(*map(integer, shape))]
    for name, part in parts.items():
        items += [string(name.encode()), part]
    return b"cscipy.sparse.csr\ncsr_matrix\n)\x81}(" + b"".join(items) + b"ub"


def sparse(values: NDArray[Any]) -> bytes:
    ends = numpy.append(0, (values != 0).sum(1).cumsum()).astype("int32")
    columns = values.nonzero()[1].astype("int32")
    return sparse_of(values.shape, indptr=array(ends), indices=array(columns), data=array(values[values != 0]))


def neighbours(lists: dict[int, list[int]]) -> bytes:
    items = b""
    for place, (node, others) in enumerate(lists.items()):
        items += integer(node) + b"]r" + number(place) + b"(" + b"".join(map(integer, others)) + b"e"
    return b"ccollections\ndefaultdict\nc__builtin__\nlist\n\x85R(" + items + b"u"


def whole(content: bytes) -> bytes:
    return b"\x80\x02" + content + b"."


def write(folder: Path, name: str = "cora", *, first: int = 510, tests: int = 8, gaps: tuple[int, ...] = ()) -> None:
    """A random graph of some first nodes, six of them for training, and of test nodes in random order.

    gaps: test nodes that are in no file, as in CiteSeer.
    """
    random = numpy.random.default_rng(0)
    folder.mkdir(parents=True)
    nodes = first + tests
    features = (random.random((nodes, 5)) * (random.random((nodes, 5)) < 0.5)).astype("float32")
    labels = numpy.eye(3, dtype="int32")[random.integers(0, 3, nodes)]
    index = numpy.array([node for node in range(first, nodes + len(gaps)) if node not in gaps])
    random.shuffle(index)
    lists = {node: random.integers(0, nodes, 3).tolist() for node in random.permutation(nodes).tolist()}
    parts = {"x": sparse(features[:6]), "allx": sparse(features[:first]), "tx": sparse(features[first:])}
    parts |= {"y": array(labels[:6]), "ally": array(labels[:first]), "ty": array(labels[first:])}
    for part, content in (parts | {"graph": neighbours(lists)}).items():
        (folder / f"ind.{name}.{part}").write_bytes(whole(content))
    (folder / f"ind.{name}.test.index").write_text("".join(f"{node}\n" for node in index), encoding="ascii")
