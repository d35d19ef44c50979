"""The option --gpu of `uncollapse doctor`: verify and time every Triton kernel on the user's own device."""

import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

from uncollapse import __version__, pairwise
from uncollapse.errors import UsageError
from uncollapse.losses.info_nce import info_nce

ROUNDS = 10  # repetitions that are timed; the median counts
MOST_DIFFERENT = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # relative, from float64
NO_GPU = (
    "torch sees no CUDA or ROCm device, so there is nothing to verify. Run `uncollapse doctor` for the rest of the "
    "installation; if this machine has a GPU, install the torch that is built for it."
)
Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """A function of some tensors in ours and in the dense form, and perhaps a peer's."""

    name: str
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    ours: Function
    dense: Function
    peer: Function | None = None


def check_gpu(device: torch.device | None = None, size: int = 4096) -> Iterator[tuple[str, bool]]:
    """Yield lines of a report to paste into an issue, each with whether it is good news.

    Args:
        device: where to run; None for the current GPU, which must be there.
        size: number of rows.
    """
    if device is None:
        if not torch.cuda.is_available():
            raise UsageError(NO_GPU)
        device = torch.device("cuda", torch.cuda.current_device())
    yield from ((line, True) for line in _versions(device))
    yield f"{'kernel, forward and backward':46} error (allowed)    ms: Triton  tiles  dense   MiB: Triton  dense", True
    for case in cases(size, device):
        yield _line(case, device)


def _versions(device: torch.device) -> Iterator[str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "processor"
    triton = metadata.version("triton") if find_spec("triton") else "not installed: pip install 'uncollapse[triton]'"
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    yield f"device {name}, {build if device.type == 'cuda' else 'no GPU'}"
    yield f"uncollapse {__version__}, torch {torch.__version__}, triton {triton}, python {platform.python_version()}"
    yield f"Inf-CL {'is' if find_spec('inf_cl') else 'is not'} installed"


def cases(size: int, device: torch.device) -> Iterator[Case]:
    """Yield what is verified: every kernel, in every dtype, with features in registers and in memory."""
    square, wide = ((size, 64), (size, 64)), ((max(1, size // 512), min(size, 512), 384),) * 2
    ring = torch.arange(size, device=device)
    edges = torch.stack([ring, ring.roll(1)])
    mean, columns = _mean, partial(_mean, normalize="columns")
    yield Case("softmax_mean", torch.float32, square, mean, _dense_mean)
    yield Case("softmax_mean, wide", torch.bfloat16, wide, mean, _dense_mean)
    yield Case("softmax_mean, wide", torch.float16, wide, mean, _dense_mean)
    without = partial(_mean, exclude=edges)
    yield Case("softmax_mean, pairs excluded", torch.bfloat16, square, without, partial(_dense_mean, exclude=edges))
    causal = partial(_mean, causal=True)
    yield Case("softmax_mean, causal", torch.bfloat16, square, causal, partial(_dense_mean, causal=True))
    yield Case("columns", torch.bfloat16, square, columns, partial(_dense_mean, dim=-2))
    yield Case("logsumexp", torch.bfloat16, square, _log_sum, lambda q, k: (q @ k.mT).logsumexp(-1))
    rows = ((size, 128), (size, 128))
    peer = _inf_cl if find_spec("inf_cl") else None
    for dtype in (torch.float32, torch.bfloat16):
        yield Case("info_nce both ways", dtype, rows, _both_ways, _dense_both_ways, peer)


def _mean(x: Tensor, v: Tensor, **options: object) -> Tensor:
    return pairwise.softmax_mean(x, x, v, temperature=4.0, **options)  # type: ignore[arg-type]


def _dense_mean(
    x: Tensor, v: Tensor, dim: int = -1, causal: bool = False, exclude: Tensor | None = None
) -> Tensor:  # fmt: skip
    logits = x @ x.mT / 4.0
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
    if exclude is not None:
        logits = logits.index_put((exclude[0], exclude[1]), logits.new_tensor(-torch.inf))
    return logits.softmax(dim) @ v


def _log_sum(q: Tensor, k: Tensor) -> Tensor:
    return pairwise.logsumexp(q, k)


def _both_ways(x: Tensor, y: Tensor) -> Tensor:
    """Return the loss on unit rows; half precision goes through tensor cores, as under autocast."""
    with torch.autocast(x.device.type, dtype=x.dtype if x.dtype != torch.float32 else None, enabled=x.dtype in HALF):
        return info_nce(x, y, temperature=0.1, symmetric=True)


HALF = (torch.float16, torch.bfloat16)


def _dense_both_ways(x: Tensor, y: Tensor) -> Tensor:
    logits = F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).mT / 0.1
    at = torch.arange(len(x), device=x.device)
    return (F.cross_entropy(logits, at) + F.cross_entropy(logits.mT, at)) / 2


def _inf_cl(x: Tensor, y: Tensor) -> Tensor:
    from inf_cl import cal_flash_loss

    x, y = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
    both = (cal_flash_loss(a, b, scale=10.0, head_dim=128).mean() for a, b in ((x, y), (y, x)))
    return sum(both) / 2  # type: ignore[no-any-return]


def _line(case: Case, device: torch.device) -> tuple[str, bool]:
    """Return the line of a case, and whether the kernels agree with the dense formula in float64."""
    name = f"{case.name}, {str(case.dtype).removeprefix('torch.')}, {'×'.join(map(str, case.shapes[0]))}"
    try:
        inputs = _inputs(case, device)
        with pairwise.backend("triton"):
            error = _error(case, inputs)
            ours, held = _measure(case.ours, inputs)
        with pairwise.backend("torch"):
            tiles, _ = _measure(case.ours, inputs)
        dense, most = _measure(case.dense, inputs)
    except Exception as failure:  # the other kernels are still tried
        return f"{name:46} FAILED: {type(failure).__name__}: {' '.join(str(failure).split())[:300]}", False
    good = error <= MOST_DIFFERENT[case.dtype]
    line = f"{name:46} {error:.1e} ({MOST_DIFFERENT[case.dtype]:.0e}) {'' if good else 'WRONG':6}"
    line += f"{1e3 * ours:11.2f} {1e3 * tiles:6.2f} {1e3 * dense:6.2f} {held:13.0f} {most:6.0f}"
    line += f"  {dense / ours:.1f}× as fast as dense"
    return line + _next_to_peer(case, inputs, ours), good


def _next_to_peer(case: Case, inputs: list[Tensor], ours: float) -> str:
    """Return how fast we are compared with the peer, or its error, which does not end the check."""
    if case.peer is None:
        return ""
    try:
        return f", {_measure(case.peer, inputs)[0] / ours:.1f}× as fast as Inf-CL"
    except Exception as failure:
        return f", Inf-CL failed: {type(failure).__name__}: {' '.join(str(failure).split())[:100]}"


def _inputs(case: Case, device: torch.device) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    made = (torch.randn(shape, generator=random, device="cpu") / shape[-1] ** 0.25 for shape in case.shapes)
    return [x.to(device, case.dtype).requires_grad_() for x in made]


def _error(case: Case, inputs: list[Tensor]) -> float:
    """Return the largest relative error of the value and the gradients, from the dense formula in float64."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    got, want = case.ours(*inputs), case.dense(*exact)
    finite = torch.isfinite(want)
    found = [got[finite], *torch.autograd.grad(got[finite].float().square().sum(), inputs)]
    wanted = [want[finite], *torch.autograd.grad(want[finite].square().sum(), exact)]
    return max(float((a.detach().double() - b.detach()).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))


def _measure(function: Function, inputs: list[Tensor]) -> tuple[float, float]:
    """Return the median seconds of forward and backward, and the MiB that they hold at most beyond the inputs."""
    gpu, times = inputs[0].device.type == "cuda", []
    before = torch.cuda.memory_allocated() if gpu else 0
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(ROUNDS + 1):  # the first compiles
        start = time.perf_counter()
        torch.autograd.grad(function(*inputs).float().sum(), inputs)
        if gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() - before if gpu else 0
    return sorted(times[1:])[ROUNDS // 2], peak / 2**20
