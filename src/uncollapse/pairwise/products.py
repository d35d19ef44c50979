"""Matrix products of tiles in full float32: by torch's BLAS or, where that is slower, by oneDNN, which torch also has.

torch multiplies float32 with Intel's MKL, which may use half of the vector width on processors of other makers that
have AVX-512. oneDNN uses all of it, and multiplies large matrices faster there. It is chosen for such processors only,
and only if it gives the same product as MKL when it is first used. It takes one matrix per call. Batches of matrices go
to it where AVX-512 is as wide as it says, on AMD's family 26 (Zen 5) and later: at 64×197×192 twice as fast as MKL.
Before that, the vectors are computed in two halves, and MKL, which takes a batch in one call, is faster.
"""

import functools
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LEAST = 1 << 21  # multiplications of a product from which on oneDNN pays: a call takes 10 µs


def multiply(left: Tensor, right: Tensor, scale: float, out: Tensor) -> Tensor:
    """Return scale · left (b, r, d) times right (b, m, d) transposed, in `out`."""
    if not pays(left, right.shape[1]):
        return torch.baddbmm(out, left, right.mT, beta=0, alpha=scale, out=out)
    for each, a, b in zip(out, left, right, strict=True):
        torch.mul(linear(a, b), scale, out=each)
    return out


def accumulate(out: Tensor, left: Tensor, right: Tensor, beta: float = 1.0, alpha: float = 1.0) -> None:
    """Set out (b, r, e) to beta · out + alpha · left (b, r, m) times right (b, m, e); beta is 0 or 1."""
    if not pays(left, out.shape[-1]) or not (_is_dense(left) or _is_dense(left.mT)):
        out.baddbmm_(left, right, beta=beta, alpha=alpha)
        return
    if not _is_dense(left) and left.shape[-1] <= right.shape[-1]:
        left = left.contiguous()  # it is smaller than the product, which is transposed otherwise
    for each, a, b in zip(out, left, right, strict=True):
        product = linear(a, b.mT) if a.is_contiguous() else linear(b.mT, a).mT
        if beta == 0:
            torch.mul(product, alpha, out=each)
        else:
            each.add_(product, alpha=alpha)


def _is_dense(x: Tensor) -> bool:
    """Return whether each matrix of x (b, r, m) is contiguous; others would have to be copied."""
    return x.stride(-1) == 1 and x.stride(-2) == x.shape[-1]


def pays(x: Tensor, columns: int) -> bool:
    """Return whether oneDNN multiplies matrices x (b, r, d) with so many columns faster, in full precision."""
    if (
        x.shape[1:].numel() * columns < LEAST
        or x.dtype != torch.float32
        or x.device.type != "cpu"
        or type(x) is not Tensor
    ):
        return False
    return _is_faster() and (len(x) == 1 or _has_wide_vectors()) and _is_full_precision()


def _is_full_precision() -> bool:
    """Return whether torch is not set to multiply float32 in fewer digits."""
    one_dnn: Any = torch.backends.mkldnn
    return one_dnn.matmul.fp32_precision in ("none", "ieee")


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x (r, d) times weight (m, d) transposed, by oneDNN."""
    if not (weight.is_contiguous() or weight.mT.is_contiguous()):  # a thousand times slower
        weight = weight.contiguous()
    operator: Any = torch.ops.mkldnn._linear_pointwise  # what torch.compile calls for a linear layer on a CPU
    product: Tensor = operator(x.detach(), weight.detach(), None, "none", [], "")
    return product


@functools.cache
def _is_faster() -> bool:
    """Return whether this processor has AVX-512, is not Intel's, and oneDNN's product is right."""
    processor = _processor()
    if not processor or "GenuineIntel" in processor or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    x, y = (torch.linspace(-1, 2, 35 * 17).sin().reshape(35, 17) * factor for factor in (1.0, 0.3))
    try:
        found = torch.stack([linear(x, y), linear(x, y.mT.contiguous().mT)])
    except (RuntimeError, AttributeError, TypeError):  # a build of torch without it, or with another signature
        return False
    return torch.allclose(found, (x.double() @ y.double().mT).float().expand_as(found), rtol=1e-5, atol=1e-5)


@functools.cache
def _has_wide_vectors() -> bool:
    """Return whether AVX-512 is not computed in two halves: AMD's family 26 and later."""
    family = re.search(r"^cpu family\s*:\s*(\d+)", _processor(), re.MULTILINE)
    return "AuthenticAMD" in _processor() and family is not None and int(family[1]) >= 26


def _processor() -> str:
    """Return what the system says about the processors; nothing where it does not."""
    file = Path("/proc/cpuinfo")
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
