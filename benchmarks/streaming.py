"""A file of embeddings that is larger than what may be used of the memory: how fast it is measured, and in how much.

The file is written to the folder for temporary files, and taken out of the system's memory again before it is read. It
has 384 features in float16, as sentence encoders have them; `--rows` says how many rows, 10 million without it.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from benchmarks.measure import best
from benchmarks.targets import Result
from uncollapse.diagnosis.embeddings import RowStatistics
from uncollapse.diagnosis.stats import moments
from uncollapse.diagnosis.stats.compensated_sum import CompensatedSum

ROWS, DIM, RANK = 10_000_000, 384, 48
PIECE = 50_000  # rows that are written at a time
COMMAND = """
import sys, time
from uncollapse.cli import app
try:
    app(sys.argv[2:])
except SystemExit as end:
    assert end.code == 0, end.code
peak = open("/proc/self/status").read().split("VmHWM:")[1].split()[0]  # of this process alone
open(sys.argv[1], "w").write(f"{int(peak) / 1024} {time.process_time()}")
"""


def reading(rows: int = ROWS) -> Iterator[Result]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small things, which threads would make slower
    yield accumulating()
    yield merging()
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "embeddings.npy"
        write(path, rows)
        forget(path)
        found = measured(path)
    size, seconds = rows * DIM * 2, found["seconds"]
    detail = f"{rows:,} × {DIM} float16, {size / 1e9:.2f} GB; with Python and torch"
    yield Result("embeddings: peak of the memory", 1024, found["peak"], "MiB", False, detail)
    detail = f"{found['wall']:.1f} s with the start of Python and the report, {found['cpu']:.1f} s of processors"
    yield Result("embeddings: time for the file", None, seconds, "s", False, detail)
    detail = f"{size / seconds / 1e9:.2f} GB/s"
    yield Result("embeddings: rate", 300_000, rows / seconds, "rows/s", True, detail)


def measured(path: Path, *options: str) -> dict[str, Any]:
    """`uncollapse embeddings` in a process of its own: its JSON, the wall and processor seconds, the peak in MiB."""
    told, started = path.with_name("told"), time.perf_counter()
    command = [sys.executable, "-c", COMMAND, str(told), "embeddings", str(path), *options, "--json"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    wall = time.perf_counter() - started
    peak, cpu = map(float, told.read_text().split())
    found: dict[str, Any] = json.loads(out)
    return found | {"peak": peak, "cpu": cpu, "wall": wall}


def write(path: Path, rows: int, shared: float = 0.3) -> None:
    """Rows near a few dimensions, around a mean that all share; `shared` is the size of its entries."""
    if shutil.disk_usage(path.parent).free < 1.2 * rows * DIM * 2:
        raise SystemExit(f"{path.parent} has no room for {rows * DIM * 2:,} bytes; set TMPDIR, or give fewer --rows.")
    random = numpy.random.default_rng(0)
    shape: dict[str, Any] = {"dtype": numpy.float32}
    basis, mean = random.standard_normal((RANK, DIM), **shape) / 7, shared * random.standard_normal(DIM, **shape)
    with path.open("wb") as file:
        head = {"descr": "<f2", "fortran_order": False, "shape": (rows, DIM)}
        numpy.lib.format.write_array_header_1_0(file, head)
        for start in range(0, rows, PIECE):
            count = min(PIECE, rows - start)
            x = random.standard_normal((count, RANK), **shape) @ basis + mean
            x += 0.2 * random.standard_normal((count, DIM), **shape)
            file.write(x.astype("float16").tobytes())
        file.flush()
        os.fsync(file.fileno())


def forget(path: Path) -> None:
    """Ask the system to keep nothing of the file in memory, where it does such things."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def accumulating() -> Result:
    """What adding a Gram matrix to its sum costs beside making it, for the rows that are added at a time."""
    x = torch.randn(1024, DIM, dtype=torch.float64)
    total, gram = CompensatedSum.zero(DIM, DIM), torch.zeros(DIM, DIM, dtype=torch.float64)
    product = moments.TOGETHER * best(lambda: moments._gram(x, gram))
    adding = best(lambda: total.add(gram))
    detail = f"{1e3 * product:.2f} ms for XᵀX of {1024 * moments.TOGETHER}×{DIM}, {1e3 * adding:.2f} ms to add it"
    return Result("Moments: adding beside the product", 0.25, adding / product, "of its time", False, detail)


def merging() -> Result:
    parts = [RowStatistics(DIM, seed=seed) for seed in range(2)]
    for part in parts:
        part.update(torch.randn(4096, DIM))
    size = sum(torch.as_tensor(value).nbytes for value in (parts[0] + parts[1]).state().values())
    detail = f"exact, {DIM} features; {size / 2**20:.1f} MiB to send"
    return Result("RowStatistics: one merge", None, 1e3 * best(lambda: parts[0] + parts[1]), "ms", False, detail)
