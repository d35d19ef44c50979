"""Tables of the page on scale: what each piece takes, by formula, and beside it what was measured.

All formulas of the page are functions here. What is assumed of machines that we do not have is in one place below.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from website.pages.results import RESULTS, Row

FLOAT, DOUBLE = 4, 8  # bytes
GPU, LINK = 100e12, 25e9  # assumed: FLOP/s of a GPU that a training reaches, bytes/s between GPUs in each direction
PRODUCTS = {  # of n × n × d in forward and backward pass together; a test counts them
    "uniform_loss": 1.5,
    "info_nce": 4,
    "info_nce both ways": 4,
    "info_nce, negatives='both'": 2,
    "contra_norm": 5,
}
KERNELS = {  # benchmarks of results/benchmarks.json -> rows, features, kind
    "uniform_loss 8192×128": (8192, 128, "uniform_loss"),
    "info_nce 16384×128": (16384, 128, "info_nce"),
    "info_nce 2×8192×128, negatives='both'": (16384, 128, "info_nce, negatives='both'"),
    "contra_norm 8192×64": (8192, 64, "contra_norm"),
    "contra_norm 19717×32": (19717, 32, "contra_norm"),
}
VIT = {"width": 768, "depth": 12, "tokens": 197, "patch": 16, "classes": 1000}  # ViT-B/16
BATCH, OUT = 4096, 128  # images of all GPUs together, and features of their embeddings
GPUS = (1, 8, 64)
FILES = ((10**7, 1), (10**7, 8), (10**9, 8), (10**9, 64), (10**9, 1024))  # rows, and cores that share them
GATHERED = "(N−1)/N · 4nd bytes forward, and as much backward"
MERGED = "24d² bytes and its sample, once, at the end"


def flops(rows: int, dim: int, kind: str) -> float:
    """Of the products of all pairs of rows, forward and backward."""
    return PRODUCTS[kind] * 2 * rows * rows * dim


def parameters(width: int, depth: int, tokens: int, patch: int, classes: int) -> int:
    """Of a vision transformer: 12 width² a block, the patches, the positions, the head."""
    blocks = depth * (12 * width**2 + 13 * width)
    return blocks + (3 * patch**2 + 1 + tokens + 1 + 2 + classes) * width + classes


def training_flops(width: int, depth: int, tokens: int, **_: int) -> float:
    """Of a training step on one image: three times the forward pass."""
    return 3 * depth * (24 * tokens * width**2 + 4 * tokens**2 * width)


def cure_flops(width: int, depth: int, tokens: int, **_: int) -> float:
    """Of a ContraNorm in every block, on one image."""
    return depth * flops(tokens, width, "contra_norm")


def gather_bytes(rows: int, dim: int, processes: int) -> tuple[float, float]:
    """Return what each process sends forward and backward: its keys to the others, their gradients to their owners."""
    keys = (processes - 1) / processes * rows * dim * FLOAT
    return keys, keys


def ddp_bytes(count: int, processes: int) -> float:
    """What each process sends to average the gradients of so many parameters, with the usual ring."""
    return 2 * (processes - 1) / processes * count * FLOAT


def fsdp_bytes(count: int, processes: int) -> float:
    """Weights are gathered twice, and gradients are summed to where they belong."""
    return 3 * (processes - 1) / processes * count * FLOAT


def moments_bytes(dim: int) -> int:
    """Of the statistics of one layer or file: sums as two numbers each, and a sample of 1,024 rows."""
    return 2 * DOUBLE * (dim * dim + 2 * dim) + 1024 * (dim * FLOAT + DOUBLE)


def merged_bytes(dim: int) -> int:
    """What a process sends of them: a merged sum is three numbers."""
    return 3 * DOUBLE * dim * dim + 1024 * dim * FLOAT


def gram_flops(rows: int, dim: int) -> float:
    """Of XᵀX in float64, of which the blocks below the diagonal are not computed."""
    return 2 * 0.625 * rows * dim * dim


def checkpoint_bytes(count: int) -> tuple[int, int]:
    """With AdamW: weights and two moments; and with an average and the best weights so far besides."""
    return 3 * FLOAT * count, 5 * FLOAT * count


def pieces() -> tuple[Row, Sequence[Row]]:
    """Memory, work and traffic by formula."""
    head = ("part", "memory besides the input", "work", "each of N processes sends")
    kinds = ", ".join(f"{kind}: {count:g}" for kind, count in PRODUCTS.items())
    return head, [
        ("a product of all pairs of n rows with d features", "O(nd): no n × n matrix", "2n²d FLOP", "nothing"),
        ("losses and ContraNorm, forward and backward", "O(nd)", f"number of these products: {kinds}", "nothing"),
        ("`gather=True`, n rows in total", "O(nd): the keys of all", "1/N of the work", GATHERED),
        ("DDP, P parameters", "gradients, P·4 bytes", "one step on 1/N of the batch", "2(N−1)/N · P·4 bytes per step"),
        ("FSDP", "1/N of weights, gradients and optimizer", "the same", "3(N−1)/N · P·4 bytes per step"),
        ("`diagnose`, a layer", "16d² + 4,128d bytes, whatever the data", "1.25·m·d² FLOP for m tokens", MERGED),
        ("`Monitor`", "the same, and the held-out batches", "a diagnosis every few steps", "nothing"),
        ("`embeddings`, n rows", "the same, and parts of 4,096 rows", "1.25·n·d² FLOP in float64", MERGED),
        ("a checkpoint", "12 to 20 bytes per parameter", "written once per epoch", "rank 0 writes"),
        ("`sweep`, `tune`", "one training per worker", "that of the runs", "nothing: results are files"),
    ]


def checked() -> tuple[Row, Sequence[Row]]:
    """Formulas beside measurements, as far as these were made."""
    head = ("what", "by formula", "measured", "rate")
    return head, [*_kernels(), *_memory(), *_cures(), *_streamed()]


def _kernels() -> Iterator[Row]:
    """Times of results/benchmarks.json, forward and backward, with as many threads as it says."""
    for target in _targets(""):
        if target["name"] in KERNELS and target["unit"] == "× as fast":
            work = flops(*KERNELS[target["name"]])
            seconds = float(re.findall(r"([\d.]+) ms ours", target["detail"])[0]) / 1e3
            yield target["name"], f"{work / 1e9:.0f} GFLOP", f"{seconds:.2f} s", f"{work / seconds / 1e9:.0f} GFLOP/s"


def _memory() -> Iterator[Row]:
    for target in _targets(""):
        if target["name"].startswith("softmax_mean 65536×64"):
            one = 65536 * 64 * FLOAT / 2**20
            times = f"{target['measured'] / one:.1f} times the rows"
            yield target["name"], f"O(nd); the rows are {one:.0f} MiB", f"{target['measured']:.0f} MiB", times


def _cures() -> Iterator[Row]:
    """What ContraNorm adds to a step: by the products, and by the clock."""
    small = {**VIT, "width": 384}
    for target in _targets("_attach"):
        if target["name"].startswith("ContraNorm in every block, DeiT-S"):
            share = cure_flops(**small) / training_flops(**small)
            added = f"{100 * (target['measured'] - 1):.0f} % more time"
            yield target["name"], f"{100 * share:.0f} % more FLOP", added, "exponentials and passes count as well"


def _streamed() -> Iterator[Row]:
    found = _streaming()
    if found:
        work, cpu = gram_flops(found["rows"], found["dim"]), found["cpu"]
        name = f"`embeddings`, {found['rows']:,} × {found['dim']}"
        yield name, f"{work / 1e12:.2f} TFLOP in float64", f"{cpu:.0f} s of a core", f"{work / cpu / 1e9:.0f} GFLOP/s"
        own = moments_bytes(found["dim"]) / 2**20
        yield "  its memory", f"{own:.1f} MiB of statistics", f"{found['peak']:.0f} MiB", "Python, torch and parts"


def trained() -> tuple[Row, Sequence[Row]]:
    """A contrastive ViT-B, by the number of GPUs. Nothing of it was run."""
    count = parameters(**VIT)
    head = (f"ViT-B/16, {BATCH:,} images in total", *(f"{n} GPU{'s' if n > 1 else ''}" for n in GPUS))
    rows: dict[str, Callable[[int], str]] = {
        "images per GPU": lambda n: f"{BATCH // n:,}",
        "the network's step": lambda n: _seconds(BATCH / n * training_flops(**VIT) / GPU),
        "ContraNorm in every block adds": lambda n: _seconds(BATCH / n * cure_flops(**VIT) / GPU),
        "InfoNCE both ways adds": lambda n: _seconds(flops(BATCH, OUT, "info_nce both ways") / n / GPU),
        "logits of a dense loss": lambda n: _bytes(2 * BATCH * BATCH / n * FLOAT),
        "InfoNCE sends": lambda n: _bytes(sum(gather_bytes(BATCH, OUT, n))),
        "DDP sends": lambda n: _bytes(ddp_bytes(count, n)),
        "FSDP sends": lambda n: _bytes(fsdp_bytes(count, n)),
        "time to send DDP's": lambda n: _seconds(ddp_bytes(count, n) / LINK),
        "weights and optimizer per GPU, FSDP": lambda n: _bytes(4 * FLOAT * count / n),
        "memory of a diagnosis, 13 layers": lambda n: _bytes(13 * moments_bytes(VIT["width"])),
        "a checkpoint": lambda n: " to ".join(_bytes(size) for size in checkpoint_bytes(count)),
    }
    return head, [(name, *(made(n) for n in GPUS)) for name, made in rows.items()]


def embedded() -> tuple[Row, Sequence[Row]]:
    """Files of embeddings from a laptop to a cluster, at the rate that was measured; nothing if it was not."""
    found = _streaming()
    if not found:
        return (), []
    rate, dim = found["rows"] / found["cpu"], found["dim"]
    head = (f"{dim} features in float16", "file", "cores", "time", "rate", "memory per process", "total traffic")
    rows: list[Row] = []
    for count, cores in FILES:
        seconds, size = count / rate / cores, count * dim * 2
        by, pace = f"{cores:,} core{'s' if cores > 1 else ''}", f"{size / seconds / 1e9:.2f} GB/s"
        held, sent = f"{found['peak']:.0f} MiB", (cores - 1) * merged_bytes(dim)
        rows.append((f"{count:,} rows", _bytes(size), by, _time(seconds), pace, held, _bytes(sent)))
    return head, rows


def _streaming() -> dict[str, Any]:
    """What was measured of a file that was streamed; empty if it was not."""
    found = {target["name"]: target for target in _targets("_streaming")}
    if not found:
        return {}
    peak, time = found["embeddings: peak of the memory"], found["embeddings: time for the file"]
    rows, dim = re.findall(r"([\d,]+) × (\d+)", peak["detail"])[0]
    cpu = float(re.findall(r"([\d.]+) s of processors", time["detail"])[0])
    return {"rows": int(rows.replace(",", "")), "dim": int(dim), "cpu": cpu, "peak": peak["measured"]}


def _targets(name: str) -> list[dict[str, Any]]:
    file = RESULTS / f"benchmarks{name}.json"
    return list(json.loads(file.read_text(encoding="utf-8"))["targets"]) if file.exists() else []


def _bytes(size: float) -> str:
    for unit, step in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= step:
            return f"{size / step:.3g} {unit}"
    return "nothing" if size == 0 else f"{size / 1e3:.3g} kB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 0.1 else f"{1e3 * seconds:.2g} ms" if seconds > 0 else "none"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


PARTS: dict[str, Callable[[], tuple[Row, Sequence[Row]]]] = {
    "scale_pieces": pieces,
    "scale_checked": checked,
    "scale_trained": trained,
    "scale_embedded": embedded,
}
