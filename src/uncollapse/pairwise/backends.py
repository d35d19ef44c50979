"""The choice of backend: Triton kernels on a GPU where they work, torch operators on tiles everywhere else.

All operators go through `run`, so `torch.compile`, several processes and every loss and layer follow the same choice.
"""

import os
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from uncollapse.errors import UsageError, did_you_mean
from uncollapse.pairwise import numerics

Backend = Literal["auto", "torch", "triton"]
VARIABLE = "UNCOLLAPSE_PAIRWISE"
INSTALLED = find_spec("triton") is not None
HALF = (torch.float16, torch.bfloat16)
MOST_DIFFERENT = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # relative, from the tiles
T = TypeVar("T")

_works: dict[torch.device, bool] = {}  # devices on which the kernels were tried


def _parse_backend(name: str) -> Backend:
    for known in get_args(Backend):
        if name == known:
            return known  # type: ignore[no-any-return]
    hint = did_you_mean(name, get_args(Backend))
    raise UsageError(f"The backend must be 'auto', 'torch' or 'triton', got {name!r}.{hint}")


_setting: Backend = _parse_backend(os.environ.get(VARIABLE) or "auto")


class Switch:
    """Restores the former backend at the end of a `with` block."""

    def __init__(self, former: Backend) -> None:
        self.former = former

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _set(self.former)


def backend(name: Backend) -> Switch:
    """Choose what computes pairs from now on, or for the length of a `with` block, in the whole process.

    Args:
        name: "auto" takes Triton kernels for tensors on a CUDA or ROCm device if Triton is installed and its results
            agree with those of torch there; otherwise torch's fused attention where it applies, or torch operators on
            tiles. "torch" always takes tiles. "triton" insists on the kernels: what keeps them from running is an
            error. On the CPU they run only in Triton's interpreter, with TRITON_INTERPRET=1 set before Python starts.

    The environment variable UNCOLLAPSE_PAIRWISE sets the backend that a process starts with. float64 always takes
    tiles. A backward pass uses the backend that is set when it runs.

    >>> from uncollapse.pairwise import logsumexp
    >>> x = torch.eye(2)
    >>> with backend("torch"):
    ...     logsumexp(x, x, exclude="self")
    tensor([0., 0.])
    """
    former = _setting
    _set(_parse_backend(name))
    return Switch(former)


def _set(name: Backend) -> None:
    global _setting
    _setting = name


def uses_triton(x: Tensor) -> bool:
    """Return whether pairs of rows like x (..., n, d) go to Triton kernels; raise if they should and cannot."""
    if _setting == "torch" or x.dtype == torch.float64 or x.shape[-1] == 0:
        return False
    if _setting == "triton":
        _require(x.device.type)
        return True
    return x.device.type == "cuda" and INSTALLED and _works.get(x.device, True)


def _require(device: str) -> None:
    """Raise unless the kernels can run on this type of device."""
    if not INSTALLED:
        raise UsageError('The backend "triton" needs Triton: pip install "uncollapse[triton]".')
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UsageError(
            f'The backend "triton" needs tensors on a CUDA or ROCm device, got {device}. Choose "auto" or "torch", or '
            "set TRITON_INTERPRET=1 before Python starts to run the kernels in Triton's slow interpreter."
        )


def product_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype in which rows are multiplied: float32, float64, or, with Triton, that of autocast or inputs."""
    first = tensors[0]
    if any(x.dtype == torch.float64 for x in tensors):
        return torch.float64
    if not uses_triton(first):
        return torch.float32
    return _half_dtype(*tensors) or torch.float32


def _half_dtype(*tensors: Tensor) -> torch.dtype | None:
    """Return the half precision that autocast asks for, or that all tensors have."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        wanted = torch.get_autocast_dtype(device)
        return wanted if wanted in HALF else None
    dtype = tensors[0].dtype
    return dtype if dtype in HALF and all(x.dtype == dtype for x in tensors) else None


def run(like: Tensor, tiles: Callable[..., T], *arguments: Any) -> T:
    """Call a function on tiles, or the one of the same name in `fused`, for rows like `like` (b, n, d)."""
    if uses_triton(like) and (_setting == "triton" or _agrees(like)):
        from uncollapse.pairwise import fused

        try:
            return getattr(fused, tiles.__name__)(*arguments)  # type: ignore[no-any-return]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the compiler may raise anything
            if _setting == "triton":
                raise
            _give_up(like.device, " ".join(str(error).split())[:500] or type(error).__name__)
    return tiles(*(numerics.to_full(x) if isinstance(x, Tensor) and x.dtype in HALF else x for x in arguments))


def _agrees(like: Tensor) -> bool:
    """Return whether the kernels give what tiles give for a few rows as wide as these; tried once per device."""
    if like.device not in _works:
        _works[like.device] = True
        try:
            error, most = difference(like), MOST_DIFFERENT[like.dtype]
        except Exception as failure:  # the compiler may raise anything
            _give_up(like.device, " ".join(str(failure).split())[:500] or type(failure).__name__)
        else:
            if not error <= most:
                _give_up(like.device, f"their results differ by {error:.1e} from those of torch, {most:.0e} is allowed")
    return _works[like.device]


def difference(like: Tensor) -> float:
    """Return the largest relative error of means, sums and gradients of 70 random rows, with the width of `like`."""
    from uncollapse.pairwise import fused, walk
    from uncollapse.pairwise.grid import Pairs

    random = torch.Generator().manual_seed(0)
    rows, d_mean = (torch.randn(1, 70, like.shape[-1], generator=random).to(like) for _ in range(2))
    rows, d_mean, d_log, full = rows / like.shape[-1] ** 0.5, d_mean.float(), torch.ones(1, 70).to(like.device), []
    for functions, x in ((fused, rows), (walk, rows.float())):
        saved = functions.forward(x, None, x, None, 0.5, Pairs())
        grads = functions.backward(x, None, x, None, 0.5, Pairs(), saved, d_mean, d_log)
        full.append((*saved[:2], grads[0], grads[2]))
    return max(float((a - b).norm() / b.norm()) for a, b in zip(*full, strict=True))


def _give_up(device: torch.device, reason: str) -> None:
    """Use tiles on this device from now on, with one warning."""
    _works[device] = False
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    warnings.warn(
        f"The Triton kernels do not work on {name}, so torch operators are used, which are slower: {reason}. "
        "Please report this with the output of `uncollapse doctor --gpu`. "
        'uncollapse.pairwise.backend("torch") avoids this warning.',
        stacklevel=2,
    )


def uses_attention(q: Tensor, k: Tensor, v: Tensor, whole: bool) -> bool:
    """Return whether torch's fused attention gives the means: on a GPU without Triton, in half precision.

    whole: all pairs count, or all pairs with earlier keys, as many as queries.
    """
    if not whole or _setting != "auto" or q.device.type not in ATTENTION_DEVICES or uses_triton(q):
        return False
    width = q.shape[-1]
    fits = width % 8 == 0 and 0 < width <= 256 and v.shape[-1] == width and min(q.numel(), k.numel()) > 0
    return fits and _half_dtype(q, k, v) is not None


ATTENTION_DEVICES = ("cuda",)


def attention(q: Tensor, k: Tensor, v: Tensor, temperature: float, causal: bool) -> Tensor:
    """Return softmax means (..., n, e) in half precision, from a kernel of torch that holds no matrix of all pairs."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    dtype = _half_dtype(q, k, v)
    q, k, v = (x.to(dtype).unsqueeze(-3) for x in (q, k, v))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        mean = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=1 / temperature)
    return mean.squeeze(-3)
