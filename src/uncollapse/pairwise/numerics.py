"""Checks and preparation of inputs: shapes, dtypes, padding; unit rows, centered rows and sparse sums of rows."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from uncollapse import distributed
from uncollapse.errors import NotFiniteError

LEAST_TEMPERATURE = 1e-30  # 1/τ is finite in float32


def prepare_tokens(x: Tensor, mask: Tensor | None, name: str = "x") -> Tensor:
    """Check that x (..., n, d) holds finite tokens, and return it as `prepare` does."""
    check_tokens(x, mask, name)
    x = prepare(x, mask)
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
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {type(x).__name__}; convert it with torch.as_tensor.")
    if not x.is_floating_point():
        raise TypeError(
            f"{name} must be a floating-point tensor, got {x.dtype}; convert it, for example with .float()."
        )


def check_mask(mask: Tensor, shape: torch.Size) -> None:
    """Raise unless mask is bool and broadcasts to `shape`."""
    if mask.dtype != torch.bool:
        raise TypeError(
            f"mask must be bool with True = real, got {mask.dtype}. Pass mask.bool() for a mask of 0 and 1. "
            "The graph of each node belongs in batch=, edges in edge_index=."
        )
    behind = shape[len(shape) - mask.dim() :]
    fits = 0 < mask.dim() <= len(shape) and mask.shape[-1] == shape[-1]
    if not fits or any(m not in (1, s) for m, s in zip(mask.shape, behind, strict=True)):
        raise ValueError(f"mask must have shape {tuple(shape)}, one entry per token, got {tuple(mask.shape)}.")


def check_finite(x: Tensor, name: str) -> None:
    """Raise if x holds NaN or Inf; does nothing while `torch.compile` traces, where values are unknown."""
    if torch.compiler.is_compiling() or bool(torch.isfinite(x.detach().sum())):
        return  # one pass: a sum is finite only if all its terms are
    bad = int((~torch.isfinite(x.detach())).sum())
    if bad:  # otherwise only the sum overflowed
        raise NotFiniteError(
            f"{name} must be finite, got {bad} NaN or Inf among {x.numel()} entries. "
            f"Look for the layer that produced them, or exclude those rows with mask."
        )


def prepare(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x in float32 (float64 stays), with zeros in masked rows."""
    x = to_full(x)
    return x if mask is None else x.masked_fill(~mask[..., None], 0)


def to_full(x: Tensor) -> Tensor:
    """Return x in float32; float64 stays."""
    return x.to(full_dtype(x))


def full_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a metric of x is computed and returned: float32 or float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def real_count(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the number of real tokens of each batch element (...), in the dtype of x."""
    if mask is None:
        return x.new_full(x.shape[:-2], x.shape[-2])
    return mask.sum(-1).to(x.dtype).expand(x.shape[:-2])


def center(x: Tensor, mask: Tensor | None) -> Tensor:
    """Subtract the mean of the real tokens from x, as `prepare` returns it. Equal entries become exactly 0."""
    total = x.sum(-2, keepdim=True, dtype=torch.float64)
    return subtract_mean(x, (total / real_count(x, mask).clamp(min=1)[..., None, None]).to(x.dtype), mask)


def subtract_mean(x: Tensor, mean: Tensor, mask: Tensor | None) -> Tensor:
    """Subtract a mean that broadcasts to x; 0 in masked rows and where only rounding errors are left."""
    shift = x - mean
    noise = shift.detach().abs() <= 8 * torch.finfo(torch.float64).eps * mean.detach().abs()
    shift = shift.masked_fill(noise, 0)
    return shift if mask is None else shift.masked_fill(~mask[..., None], 0)


def check_temperature(temperature: float | Tensor) -> None:
    """Raise unless temperature is positive, and 1/τ finite in float32.

    It is a number, or a tensor with one element, which is read on the CPU only.
    """
    if isinstance(temperature, Tensor):
        if temperature.numel() != 1:
            shape = tuple(temperature.shape)
            raise ValueError(f"temperature must be a number or a tensor with one element, got shape {shape}.")
        if torch.compiler.is_compiling() or temperature.device.type != "cpu":
            return
        temperature = temperature.item()
    if not LEAST_TEMPERATURE <= temperature < float("inf"):
        raise ValueError(f"temperature must be positive, at least {LEAST_TEMPERATURE}, and finite, got {temperature}.")


def unit_rows(x: Tensor) -> Tensor:
    """Divide the rows of x (..., n, d) by their norm; zero rows stay zero.

    `F.normalize` divides a zero row by 1e-12, so that its gradient is 1e12; here it is 0.
    """
    unit: Tensor = _UnitRows.apply(to_full(x))  # type: ignore[no-untyped-call]
    return unit.to(x.dtype)


class _UnitRows(torch.autograd.Function):
    """u = x/|x|, dx = (g − u(u·g))/|x|, in fewer passes than autograd needs."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * inverse_norms(x).unsqueeze(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, unit = ctx.saved_tensors
        along: Tensor = (unit * gradient).sum(-1, keepdim=True)
        across: Tensor = torch.addcmul(gradient, unit, along, value=-1)
        return across * inverse_norms(x).unsqueeze(-1)


def inverse_norms(x: Tensor) -> Tensor:
    """Return 1/|x_i| of each row (..., n) in float32 or float64; 0 for zero rows. Value and gradient are finite."""
    if x.shape[-1] == 0:
        return x.new_zeros(x.shape[:-1])
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1)
    if _all_moderate(norms):
        return norms.reciprocal()
    norms = _norms_of_any_size(x)
    present = norms >= torch.finfo(x.dtype).tiny
    return (present / torch.where(present, norms, 1)).to(x.dtype)


def _norms_of_any_size(x: Tensor) -> Tensor:
    if x.dtype == torch.float32 and x.device.type == "cpu" and not torch.compiler.is_compiling():
        exact: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
        return exact
    # squares of float64 overflow too, beyond 1e154; and on other devices float64 is slow or missing
    largest = x.detach().abs().amax(-1, keepdim=True)
    largest = torch.where(largest > 0, largest, 1)
    scaled: Tensor = torch.linalg.vector_norm(x / largest, dim=-1)
    return scaled * largest.squeeze(-1)


def _all_moderate(norms: Tensor) -> bool:
    """Return whether squares of all norms are safe in float32; False where reading them would stall a GPU."""
    if torch.compiler.is_compiling() or norms.device.type != "cpu" or norms.numel() == 0:
        return False
    low, high = norms.detach().aminmax()
    return low.item() >= 1e-15 and high.item() <= 1e15


def check_positive(value: int, name: str) -> None:
    """Raise unless value is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}.")


def check_positive_number(value: float, name: str) -> None:
    """Raise unless value is a positive, finite number: a tensor in its place is meant for another argument."""
    if isinstance(value, Tensor):
        raise TypeError(f"{name} must be a number, got a tensor. Pass a mask as mask=, a second view as y=.")
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be positive and finite, got {value}.")


def csr_matrix(start: Tensor, column: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return a sparse matrix whose row i has the values start[i] … start[i + 1], without torch's warnings."""
    with _without_sparse_warnings():
        return torch.sparse_csr_tensor(start, column, values, shape, check_invariants=False)


def to_csr(dense: Tensor) -> Tensor:
    """Return a dense matrix as a sparse one of its nonzero entries, without torch's warnings."""
    with _without_sparse_warnings():
        return dense.to_sparse_csr()


@contextmanager
def _without_sparse_warnings() -> Iterator[None]:
    """Ignore that CSR matrices are in beta, and, of torch 2.11, that their indices are not checked."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support|Sparse invariant checks")
        yield


def row_starts(row: Tensor, rows: int) -> Tensor:
    """Return where each row starts among entries that are sorted by row: (rows + 1,)."""
    counts = torch.bincount(row, minlength=rows)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def sum_pairs(pairs: Tensor, x: Tensor, rows: int) -> Tensor:
    """Return the sum of x_j over the pairs (i, j) of each row i: pairs (2, E) sorted by i, x (m, d) -> (rows, d)."""
    ones = x.new_ones(pairs.shape[1])
    matrix = csr_matrix(row_starts(pairs[0], rows), pairs[1].contiguous(), ones, (rows, len(x)))
    return matrix @ x


def check_rows(x: Tensor, mask: Tensor | None = None, name: str = "x", gather: bool = False) -> None:
    """Raise unless x is a float tensor (..., n, d) and mask fits it; x may be empty only if rows are gathered.

    Rows that are gathered must be alike in all processes, see `distributed.check_alike`.

    Values are not checked: a check for NaN in a loss would stall a GPU in every step.
    """
    if gather:
        distributed.check_alike(x)  # first: an error in one process only would let the others wait
    _check_own_rows(x, mask, name, gather)


def _check_own_rows(x: Tensor, mask: Tensor | None, name: str, gather: bool) -> None:
    check_tokens(x, mask, name)
    if x.numel() == 0 and not gather:
        raise ValueError(f"{name} must have at least one row, got shape {tuple(x.shape)}.")


def check_pair(x: Tensor, y: Tensor, names: tuple[str, str] = ("x", "y"), gather: bool = False) -> None:
    """Raise unless x and y have the same shape: row i of x belongs to row i of y."""
    if gather:
        distributed.check_alike(x, y)
    _check_own_rows(x, None, names[0], gather)
    _check_own_rows(y, None, names[1], gather)
    if x.shape != y.shape:
        raise ValueError(
            f"{names[0]} and {names[1]} must have the same shape, row i of one belongs to row i of the other; "
            f"got {tuple(x.shape)} and {tuple(y.shape)}."
        )


def check_matrix(x: Tensor, name: str = "x") -> None:
    """Raise if x has batch dimensions."""
    if x.dim() != 2:
        raise ValueError(f"{name} must have shape (n, d), without batch dimensions, got {tuple(x.shape)}.")
