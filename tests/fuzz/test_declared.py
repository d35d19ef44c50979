"""Small files that declare huge contents are refused before memory is taken: all of them in a process with a limit."""

import io
import json
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy
import pyarrow
import pyarrow.parquet
import pytest
import torch
from numpy.lib import format as npy

from .intact import CASES

ROOM = 3 * 2**28  # bytes that reading may take: three quarters of a GiB
ZEROS = 2**30  # bytes that bombs unpack to

READ = """
import json, resource, sys, time, warnings
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from fuzz.damage import answer
from fuzz.intact import CASES
import torch_geometric.data, torch_geometric.utils, torch_geometric.datasets

pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
told = {}
for name, kind in json.load(open(sys.argv[2] + "/cases.json")).items():
    started = time.monotonic()
    try:
        found = answer(CASES[kind].read, Path(sys.argv[2], name, CASES[kind].name), refusals=CASES[kind].refusals)
        told[name] = f"refused: {found}" if isinstance(found, Exception) else "read"
    except BaseException as error:
        told[name] = f"broken: {type(error).__name__}: {error}"
    print(name, round(time.monotonic() - started, 2), told[name][:200], file=sys.stderr)
print(json.dumps(told))
"""


def header(shape: tuple[int, ...], dtype: str = "<f4") -> bytes:
    """The beginning of a .npy file, with a few numbers behind it."""
    file = io.BytesIO()
    npy.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue() + bytes(72)


def zipped(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        for name, content in members.items():
            made.writestr(f"{name}.npy", content)
    return file.getvalue()


def repeats(part: bytes, times: int) -> bytes:
    """A deflated stream of a part again and again, which is packed only once."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return (packer.compress(part) + packer.flush(zlib.Z_FULL_FLUSH)) * times + b"\x03\x00"


def bomb(name: str, first: bytes = b"") -> bytes:
    """An archive with a member of zeros; its check sum is wrong, which shows only once all is unpacked."""
    stored = zlib.compressobj(0, zlib.DEFLATED, -15)
    begin = stored.compress(first) + stored.flush(zlib.Z_FULL_FLUSH)
    packed = begin + repeats(bytes(2**24), ZEROS // 2**24)
    facts = struct.pack("<HHHHHIIIHH", 20, 0, 8, 0, 0, 0, len(packed), len(first) + ZEROS, len(name), 0)
    local = b"PK\x03\x04" + facts + name.encode() + packed
    central = b"PK\x01\x02" + struct.pack("<H", 20) + facts + struct.pack("<HHHII", 0, 0, 0, 0, 0) + name.encode()
    return local + central + b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), len(local), 0)


def packed_text() -> bytes:
    return b"\x1f\x8b\x08" + bytes(7) + repeats(b"0,1\n" * 2**22, ZEROS // 2**24) + bytes(8)


def png(side: int) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    facts = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", facts) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


def bmp(side: int) -> bytes:
    return (
        b"BM"
        + struct.pack("<IHHI", 154, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0)
        + bytes(100)
    )


def endless_list() -> bytes:
    """One row that repeats a number millions of times, in a few bytes."""
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"vector": [numpy.zeros(3_000_000, "float32")]}), file)
    return file.getvalue()


def scenes(count: int, chunk: int) -> bytes:
    """A file that declares many large pictures, of which one chunk is written, or none if chunks are too large."""
    file = io.BytesIO()
    with h5py.File(file, "w") as made:
        for name, colors, dtype in (("images", (3,), "u1"), ("depths", (), "f4")):
            sizes = (count, *colors, 4096, 4096)
            array = made.create_dataset(
                name, sizes, dtype, chunks=(1, *colors, chunk, chunk) if chunk < 4096 else sizes
            )
            if chunk < 4096:
                array[(0,) * len(sizes)] = 1
    return file.getvalue()


def repeated() -> bytes:
    """A graph of a number that is repeated a trillion times."""
    file = io.BytesIO()
    torch.save({"x": torch.ones(1).expand(10**6, 10**6), "edge_index": torch.zeros(1).long().expand(2, 10**12)}, file)
    return file.getvalue()


MATRIX = CASES["matrix"].content.replace((40).to_bytes(4, "little"), (2**31 - 1).to_bytes(4, "little"), 1)
TENSOR = b'{"a":{"dtype":"F32","shape":[1000000000,1000],"data_offsets":[0,4000000000000]}}'
PICTURES = {"data": header((9,), "|u1"), "offsets": header((3,), "<i8"), "labels": header((2,), "<i8")}
PICTURES["classes"] = header((10**9,), "<U100")
MADE: dict[str, tuple[str, Callable[[], bytes]]] = {  # the kind of file, and its content
    "npy-rows": ("npy", lambda: header((10**12, 6))),
    "npy-wraps": ("npy", lambda: header((2**40, 2**40))),
    "npy-negative": ("npy", lambda: header((-1, 6))),
    "npy-wide": ("npy", lambda: header((1, 10**10))),
    "npz-rows": ("npz", lambda: zipped(a=header((10**12, 6)))),
    "npz-wide": ("npz packed", lambda: bomb("a.npy", header((1, ZEROS // 4))[:-72])),
    "npz-graph": ("graph npz", lambda: zipped(node_features=header((10**9, 10**3)), edges=header((10**12, 2), "<i8"))),
    "npz-bomb": ("graph npz", lambda: bomb("node_features.npy", header((ZEROS // 4, 1))[:-72])),
    "npz-split": ("split", lambda: zipped(train=header((10**12,), "<i8"), val=header((1,)), test=header((1,)))),
    "npz-pictures": ("packed pictures", lambda: bomb("data.npy", header((ZEROS,), "|u1")[:-72])),
    "npz-names": ("packed pictures", lambda: zipped(**PICTURES)),
    "safetensors-header": ("safetensors", lambda: (10**10).to_bytes(8, "little") + b'{"a": {}}'),
    "safetensors-data": ("safetensors", lambda: len(TENSOR).to_bytes(8, "little") + TENSOR),
    "parquet-list": ("parquet lists", endless_list),
    "png": ("picture PNG", lambda: png(60_000)),
    "png-of-a-model": ("picture of a model PNG", lambda: png(60_000)),
    "bmp": ("picture BMP", lambda: bmp(50_000)),
    "gzip": ("arxiv", packed_text),
    "zip": ("brown", lambda: bomb("brown/ca01")),
    "hdf5-pictures": ("scenes", lambda: scenes(90_000, 64)),
    "hdf5-chunk": ("scenes", lambda: scenes(20, 4096)),
    "torch-repeats": ("graph pt", repeated),
    "torch-bomb": ("weights pt", lambda: bomb("archive/data/0")),
    "pickle-text": ("matrix", lambda: b"\x80\x02T" + (2**31 - 1).to_bytes(4, "little") + b"x."),
    "pickle-memo": ("matrix", lambda: b"\x80\x02Nr" + (2**31 - 1).to_bytes(4, "little") + b"."),
    "pickle-matrix": ("matrix", lambda: MATRIX),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    if not sys.platform.startswith("linux"):
        pytest.skip("the memory of a process is bounded on Linux only")
    folder = tmp_path_factory.mktemp("declared")
    for name, (kind, make) in MADE.items():
        path = folder / name / CASES[kind].name
        path.parent.mkdir(parents=True)
        path.write_bytes(make())
    (folder / "cases.json").write_text(json.dumps({name: kind for name, (kind, _) in MADE.items()}))
    done = subprocess.run(
        [sys.executable, "-c", READ, str(Path(__file__).parents[1]), str(folder), str(ROOM)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", MADE)
def test_it_is_refused_within_the_memory(told: dict[str, str], name: str) -> None:
    assert told[name].startswith("refused: "), told[name]
    assert "more memory than there is" not in told[name]
