"""Tables of the page on the kernel: what the Triton kernels take on GPUs, and the times that follow by arithmetic.

Nothing here was measured on a GPU. Registers and shared memory come from compiled objects in results/; what is assumed
of the GPUs is in one place below.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from website.pages.results import NOT_RUN, RESULTS, Row


@dataclass(frozen=True)
class Gpu:
    """What a data sheet says: multiprocessors, clock, products, and bytes/s of the cache that all of them share."""

    target: str
    processors: int
    clock: float  # Hz
    half: float  # FLOP/s of tensor cores, summed in float32
    exact: float  # FLOP/s of float32
    cache: float  # bytes/s
    shared: int  # bytes of shared memory per multiprocessor

    @property
    def exponentials(self) -> float:
        """Per second: 16 per multiprocessor and clock."""
        return 16 * self.processors * self.clock


GPUS = {
    "A100": Gpu("sm_80", 108, 1.41e9, 312e12, 19.5e12, 5120 * 1.41e9, 164 * 1024),
    "H100": Gpu("sm_90", 132, 1.83e9, 989e12, 67e12, 5120 * 1.83e9, 228 * 1024),  # its cache: assumed as an A100's
}
MEAN, QUERIES, KEYS = "mean and log-sum-exp", "gradient of the queries", "gradient of keys and values"
BOTH, BOTH_GRADIENT = "log-sum-exps both ways", "gradient both ways"
# kernel -> products of d and of e features, exponentials, sums of d and of e features, of each pair
WORK = {MEAN: (1, 1, 1, 0, 1), QUERIES: (2, 1, 1, 1, 0), KEYS: (2, 2, 1, 1, 1), BOTH: (1, 0, 2, 0, 0)}
WORK[BOTH_GRADIENT] = (2, 0, 2, 1, 0)
CONTRA_NORM, INFO_NCE = (MEAN, QUERIES, KEYS), (BOTH, BOTH_GRADIENT, BOTH_GRADIENT)
CASES = [  # name, sequences, rows, width, dtype, kernels
    ("contra_norm 64×197×384", 64, 197, 384, "bfloat16", CONTRA_NORM),
    ("contra_norm 8×2,048×768", 8, 2048, 768, "bfloat16", CONTRA_NORM),
    ("contra_norm 19,717×128", 1, 19_717, 128, "bfloat16", CONTRA_NORM),
    ("contra_norm 19,717×128", 1, 19_717, 128, "float32", CONTRA_NORM),
    ("info_nce 16,384×128, symmetric", 1, 16_384, 128, "bfloat16", INFO_NCE),
    ("info_nce 16,384×128, symmetric", 1, 16_384, 128, "float32", INFO_NCE),
]


def compiled() -> tuple[Row, Sequence[Row]]:
    """Return the largest needs of each kernel with all options, over its widths, by target and dtype."""
    stored = [row for row in _stored() if row["options"] == "all"]
    head = (
        "kernel",
        "dtype",
        "widths",
        *(f"{target}: registers, shared memory" for target in _targets(stored)),
        "spilled",
    )
    rows: list[Row] = []
    for kernel, dtype in dict.fromkeys((row["kernel"], row["dtype"]) for row in stored):
        own = [row for row in stored if (row["kernel"], row["dtype"]) == (kernel, dtype)]
        widths = ", ".join(f"{width:,}" for width in sorted({row["width"] for row in own}))
        needs = (_most([row for row in own if row["target"] == target]) for target in _targets(stored))
        rows.append((kernel, dtype, widths, *needs, f"{sum(row['spilled'] for row in own)} bytes"))
    return head, rows or [(NOT_RUN,) * len(head)]


def _most(rows: list[dict[str, Any]]) -> str:
    registers, shared = (max(row[key] for row in rows) for key in ("registers", "shared"))
    return f"{registers}, {shared / 1024:.0f} of {rows[0]['shared_limit'] / 1024:.0f} KiB"


def expected() -> tuple[Row, Sequence[Row]]:
    """Return the least time of forward and backward on each GPU, and what it is spent on. Computed, not measured."""
    head = (
        "forward and backward",
        "dtype",
        *(f"{name}, computed" for name in GPUS),
        *(f"{name}: limited by" for name in GPUS),
    )
    rows: list[Row] = []
    for name, batch, n, width, dtype, kernels in CASES:
        limits = [[kernel_time(gpu, kernel, batch, n, width, dtype) for kernel in kernels] for gpu in GPUS.values()]
        times = (f"{1e3 * sum(max(parts.values()) for parts in each):.2g} ms" for each in limits)
        reasons = (", ".join(dict.fromkeys(max(p, key=lambda key: p[key]) for p in each)) for each in limits)
        rows.append((name, dtype, *times, *reasons))
    return head, rows


def kernel_time(gpu: Gpu, kernel: str, batch: int, n: int, width: int, dtype: str) -> dict[str, float]:
    """Return the seconds that products, exponentials and the cache need for n × n pairs, each on its own.

    The slowest counts. Multiprocessors that are idle because the last programs do not fill them all count as busy.
    """
    row = _nearest(kernel, width, dtype, gpu.target)
    size, each = row["blocks"], 2 if dtype == "bfloat16" else 4
    of_rows, of_values, exponentials, sum_rows, sum_values = WORK[kernel]
    tiles = batch * math.ceil(n / size["rows"]) * math.ceil(n / size["others"])
    pairs = tiles * size["rows"] * size["others"]
    wide = width > size["features"]
    loaded = (size["others"] + wide * size["rows"]) * (of_rows + of_values) * width * each
    summed = wide * size["rows"] * (sum_rows + sum_values) * width * 8  # read and written in float32
    share = _busy(gpu, row, batch * math.ceil(n / size["rows"]))
    return {
        "products": 2 * pairs * (of_rows + of_values) * width / (gpu.half if each == 2 else gpu.exact) / share,
        "exponentials": pairs * exponentials / gpu.exponentials / share,
        "cache": tiles * (loaded + summed) / gpu.cache,
    }


def _busy(gpu: Gpu, row: dict[str, Any], programs: int) -> float:
    """Return the share of multiprocessors with work: programs run in rounds, as many at once as registers allow."""
    threads = 32 * row["blocks"]["warps"]
    registers = 8 * math.ceil(row["registers"] / 8) * threads
    at_once = min(65_536 // registers, gpu.shared // (row["shared"] + 1024), 2048 // threads) * gpu.processors
    return float(programs / (math.ceil(programs / at_once) * at_once))


def _nearest(kernel: str, width: int, dtype: str, target: str) -> dict[str, Any]:
    """Return the compiled kernel of this width, without options if it was compiled so."""
    found = [
        r for r in _stored() if (r["kernel"], r["width"], r["dtype"], r["target"]) == (kernel, width, dtype, target)
    ]
    return min(found, key=lambda row: row["options"] != "none")


def _stored() -> list[dict[str, Any]]:
    file = RESULTS / "triton_compiled.json"
    return list(json.loads(file.read_text(encoding="utf-8"))["kernels"]) if file.exists() else []


def _targets(stored: list[dict[str, Any]]) -> Iterator[str]:
    return iter(dict.fromkeys(row["target"] for row in stored))


PARTS: dict[str, Callable[[], tuple[Row, Sequence[Row]]]] = {"triton_compiled": compiled, "triton_expected": expected}
