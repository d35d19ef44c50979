"""Mending a file of embeddings that is larger than what may be used of the memory: `uncollapse embeddings --mend auto`.

The rows are those of `streaming` with a larger mean, so that two of them are alike and there is something to mend. The
command reads the file, writes the mended one and measures that; both need room in the folder for temporary files.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import streaming
from benchmarks.streaming import DIM, ROWS
from benchmarks.targets import Result

SHARED = 1.0  # size of the entries of the mean: a mean cosine of about 0.5


def files(rows: int = ROWS) -> Iterator[Result]:
    with tempfile.TemporaryDirectory() as folder:
        path, new = Path(folder) / "embeddings.npy", Path(folder) / "mended.npy"
        size = rows * DIM * 2
        if shutil.disk_usage(folder).free < 2.2 * size:
            raise SystemExit(f"{folder} has no room for twice {size:,} bytes; set TMPDIR, or give fewer --rows.")
        streaming.write(path, rows, SHARED)
        streaming.forget(path)
        found = streaming.measured(path, "--mend", "auto", "--out", str(new))
        if new.stat().st_size < size:
            raise SystemExit(f"{new} has {new.stat().st_size:,} bytes instead of {size:,}.")
    detail = f"{rows:,} × {DIM} float16, {size / 1e9:.2f} GB; with Python and torch"
    yield Result("mending: peak of the memory", 1024, found["peak"], "MiB", False, detail)
    before, after = (abs(of["mean_cosine"]) for of in found["measures"])
    clock = f"{found['wall']:.0f} s by the clock at a load of {os.getloadavg()[0]:.1f}"
    detail = f"{found['method']}, mean cosine {before:.2f} → {after:.2f}; {clock}"
    yield Result("mending: processor time to read, write and measure", None, found["cpu"], "s", False, detail)
