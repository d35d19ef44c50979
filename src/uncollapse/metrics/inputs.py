"""What all metrics do with their inputs: check them, compute in float32 or float64, put padding out of the way."""

import torch
from torch import Tensor


def tokens(x: Tensor, mask: Tensor | None, name: str = "x") -> Tensor:
    """x (..., n, d) as `prepared` gives it, or an error if it is not made of finite tokens."""
    check_tokens(x, mask, name)
    x = prepared(x, mask)
    check_finite(x, name)
    return x


def check_tokens(x: Tensor, mask: Tensor | None, name: str = "x") -> None:
    """Raise unless x is a float tensor (..., n, d) and mask, if given, a bool tensor that fits (..., n)."""
    check_float(x, name)
    if x.dim() < 2 or x.shape[-1] == 0:
        raise ValueError(f"{name} must have shape (..., n, d) with d > 0, got {tuple(x.shape)}.")
    if mask is not None:
        check_mask(mask, x.shape[:-1])


def check_float(x: Tensor, name: str) -> None:
    """Raise unless x is a real floating-point tensor."""
    if not x.is_floating_point():
        raise TypeError(
            f"{name} must be a floating-point tensor, got {x.dtype}; convert it, for example with {name}.float()."
        )


def check_mask(mask: Tensor, shape: torch.Size) -> None:
    """Raise unless mask is bool and broadcasts to `shape`."""
    if mask.dtype != torch.bool:
        raise TypeError(
            f"mask must be bool with True = real, got {mask.dtype}; for a 0/1 attention mask pass mask.bool()."
        )
    behind = shape[len(shape) - mask.dim() :]
    fits = 0 < mask.dim() <= len(shape) and mask.shape[-1] == shape[-1]
    if not fits or any(m not in (1, s) for m, s in zip(mask.shape, behind, strict=True)):
        raise ValueError(f"mask must have shape {tuple(shape)}, one entry a token, got {tuple(mask.shape)}.")


def check_finite(x: Tensor, name: str) -> None:
    """Raise if x holds NaN or Inf; not while `torch.compile` traces, where the values are not known."""
    if torch.compiler.is_compiling() or bool(torch.isfinite(x.detach().sum())):
        return  # one pass: a sum is finite only if all its terms are
    bad = int((~torch.isfinite(x.detach())).sum())
    if bad:  # otherwise only the sum overflowed
        raise ValueError(
            f"{name} must be finite, got {bad} NaN or Inf among {x.numel()} entries; "
            f"look for the layer that made them, or leave out those rows with mask."
        )


def prepared(x: Tensor, mask: Tensor | None) -> Tensor:
    """x in float32, or float64 if it is that, with zeros in the rows that are not real."""
    x = as_full(x)
    return x if mask is None else x.masked_fill(~mask[..., None], 0)


def as_full(x: Tensor) -> Tensor:
    """float64 stays, every other dtype becomes float32."""
    return x.to(full_dtype(x))


def full_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a metric of x is computed and returned."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def real_count(x: Tensor, mask: Tensor | None) -> Tensor:
    """Number of real tokens of each batch element (...), in x's dtype."""
    if mask is None:
        return x.new_full(x.shape[:-2], x.shape[-2])
    return mask.sum(-1).to(x.dtype).expand(x.shape[:-2])


def centred(x: Tensor, mask: Tensor | None) -> Tensor:
    """`prepared` x minus the mean of its real tokens. What rounding leaves of equal entries becomes exactly 0."""
    total = x.sum(-2, keepdim=True, dtype=torch.float64)
    mean = (total / real_count(x, mask).clamp(min=1)[..., None, None]).to(x.dtype)
    shift = x - mean
    noise = shift.detach().abs() <= 8 * torch.finfo(torch.float64).eps * mean.detach().abs()
    shift = shift.masked_fill(noise, 0)
    return shift if mask is None else shift.masked_fill(~mask[..., None], 0)
