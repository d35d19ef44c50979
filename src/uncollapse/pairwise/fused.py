"""The Triton backend: launches `kernels`, with the names and signatures of the functions on tiles.

q, k and v have one dtype: float32, which is multiplied exactly, or float16 or bfloat16, which go through tensor cores.
All sums and results are float32, gradients included.

A gradient can be far below what float16 holds. For that type, incoming gradients are therefore multiplied by a power of
two that brings the entries of G near the top of its range, and the results divided by it, without waiting for a GPU.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
import triton
from torch import Tensor

from uncollapse.pairwise import kernels
from uncollapse.pairwise.grid import ABSENT, DOMINATED, LOG2E, Pairs

HALF = (torch.float16, torch.bfloat16)
LIFT = {torch.float16: 14}  # exponent of the largest weights and entries of G
MOST_LIFT = 120  # a larger power of two may not be finite in float32
SHARES = 256  # most programs that sum columns; each needs memory for two numbers per key
Saved = tuple[Tensor, Tensor, Tensor, Tensor]
Gradients = tuple[Tensor, Tensor | None, Tensor, Tensor | None]


class Blocks(NamedTuple):
    """Own rows and other rows of a tile, the most features at once, warps, and stages of the pipeline."""

    rows: int
    others: int
    features: int
    warps: int
    stages: int


class Side(NamedTuple):
    """Queries or keys (b, n, d), their values or gradients (b, n, e), and numbers (b, n) as `kernels.pull` has them."""

    rows: Tensor
    values: Tensor | None = None
    shift: Tensor | None = None
    level: Tensor | None = None
    limit: Tensor | None = None


class Pattern(NamedTuple):
    """Which others count for each own row, [first, behind), and excluded pairs by blocks of own rows from `start`."""

    first: Tensor | None = None
    behind: Tensor | None = None
    start: Tensor | None = None
    own: Tensor | None = None
    other: Tensor | None = None


ANY = 1 << 30  # features
# By kernel, for float32 and for half precision: the largest blocks that leave no register spilled, up to some width.
# `python -m benchmarks.compiled` compiles all of them and reads what they take.
EXACT = {
    "softmax_rows": {32: Blocks(64, 32, 32, 8, 2), ANY: Blocks(64, 64, 32, 8, 2)},
    "pull": {16: Blocks(32, 32, 32, 8, 2), 32: Blocks(64, 64, 16, 8, 1), ANY: Blocks(64, 64, 32, 8, 2)},
    "both_sums": {ANY: Blocks(64, 32, 32, 8, 2)},
    "pull, both ways": {16: Blocks(32, 32, 32, 8, 2), 32: Blocks(64, 64, 16, 8, 2), ANY: Blocks(64, 64, 32, 8, 2)},
}
HALVES = {
    "softmax_rows": {128: Blocks(64, 64, 128, 8, 2), ANY: Blocks(64, 64, 64, 8, 2)},
    "pull": {64: Blocks(64, 64, 128, 8, 2), 128: Blocks(64, 32, 128, 8, 2), ANY: Blocks(64, 64, 64, 8, 2)},
    "both_sums": {128: Blocks(64, 64, 128, 8, 2), ANY: Blocks(64, 64, 64, 8, 2)},
    "pull, both ways": {64: Blocks(64, 64, 128, 8, 2), 128: Blocks(64, 32, 128, 8, 2), ANY: Blocks(64, 64, 64, 8, 2)},
}


def blocks(kernel: str, dtype: torch.dtype, width: int, amd: bool = torch.version.hip is not None) -> Blocks:
    """Return the blocks of a kernel for rows with `width` features; AMD has more registers per thread in four warps."""
    table = (HALVES if dtype in HALF else EXACT)[kernel]
    size = next(size for widest, size in table.items() if width <= widest)
    return size._replace(warps=4, stages=1) if amd else size


def forward(
    q: Tensor, k: Tensor | None, v: Tensor, bias: Tensor | None, temperature: float, pairs: Pairs, keep: bool = False
) -> Saved:
    """Return mean (b, n, e), log of the sum (b, n), which rows a key dominates (b, n), and no weights."""
    k = q if k is None else k
    (batch, n, d), (m, e) = q.shape, v.shape[1:]
    size = blocks("softmax_rows", q.dtype, max(d, e))
    mean = q.new_zeros(batch, n, e, dtype=torch.float32)
    log2sum = q.new_empty(batch, n, dtype=torch.float32)
    dominated = torch.empty_like(log2sum, dtype=torch.uint8)
    pattern = _pattern(pairs, n, m, size.rows, q.device)
    arguments = (q, k, v, _base_two(bias), *pattern, mean, log2sum, dominated, n, m, d, e, LOG2E / temperature)
    options = {"LIFT": LIFT.get(q.dtype, 0), "NO_SELF": pairs.no_self, "KEYS": size.others, **_widths(size, D=d, E=e)}
    _launch(kernels.softmax_rows, size, batch * triton.cdiv(n, size.rows), arguments, options)
    return mean, log2sum.div_(LOG2E), dominated, mean.new_empty(batch, 0, 0)


def backward(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    bias: Tensor | None,
    temperature: float,
    pairs: Pairs,
    saved: Saved,
    d_mean: Tensor,
    d_log: Tensor,
) -> Gradients:
    """Return the gradients of q, k, v and bias; with k = None, that of q includes its role as k."""
    mean, log_sum, kind, _ = saved
    nothing = torch.isneginf(log_sum)
    d_mean, d_log = d_mean.float().masked_fill(nothing[..., None], 0), d_log.masked_fill(nothing, 0)
    lift = _lift(q, d_mean, 2 * _longest(d_mean) * _longest(v.float()), d_log)
    pulled, d_log = (d_mean * lift).to(q.dtype), d_log * lift
    level = d_log - (pulled * mean).sum(-1)  # of what was rounded, so that dO·(v − o) keeps its digits if v is near o
    limit = torch.where(kind == DOMINATED, 0.5, 2.0) if v.shape[-1] else None
    queries = Side(q, pulled, _shift(log_sum), level, limit)
    keys = Side(q if k is None else k, v, _base_two(bias))
    dq, _, rest = _pull(queries, keys, temperature, pairs, "queries", d_values=False, goal=d_log)
    dk, dv, d_bias = _pull(keys, queries, temperature, pairs, "keys", rest=rest)
    dq = dq + dk if k is None else dq
    return dq / lift, None if k is None else dk / lift, dv / lift, None if bias is None else d_bias / lift


def spread(q: Tensor, k: Tensor | None, d: Tensor, bias: Tensor | None, temperature: float, pairs: Pairs) -> Tensor:
    """Return Pᵀ d (b, m, e) for d (b, n, e), the adjoint of the mean."""
    keys = q if k is None else k
    log_sum = forward(q, k, keys[..., :0], bias, temperature, pairs)[1]
    own, other = Side(keys, shift=_base_two(bias)), Side(q, d, _shift(log_sum))
    return _pull(own, other, temperature, pairs, "keys", d_rows=False)[1]


def spread_backward(
    q: Tensor, k: Tensor | None, d: Tensor, bias: Tensor | None, temperature: float, pairs: Pairs, d_out: Tensor
) -> Gradients:
    """Return the gradients of q, k, d and bias: those of a mean of d_out, for an incoming d."""
    lift = _lift(q, d_out)
    v = (d_out * lift).to(q.dtype)
    saved = forward(q, k, v, bias, temperature, pairs)
    dq, dk, _, d_bias = backward(q, k, v, bias, temperature, pairs, saved, d, torch.zeros_like(saved[1]))
    return dq / lift, None if dk is None else dk / lift, saved[0] / lift, None if d_bias is None else d_bias / lift


def log_sums(q: Tensor, k: Tensor, temperature: float, no_self: bool) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exps of rows (b, n) and of columns (b, m)."""
    (batch, n, d), m = q.shape, k.shape[1]
    size = blocks("both_sums", q.dtype, d)
    span = max(1, triton.cdiv(triton.cdiv(n, size.rows), SHARES)) * size.rows  # rows of a program
    shares = triton.cdiv(n, span)
    row_peak, row_total = (q.new_full((batch, 1, n), value, dtype=torch.float32) for value in (ABSENT, 0.0))
    key_peak, key_total = (row_peak.new_empty(batch, shares, m) for _ in range(2))
    arguments = (q, k, row_peak, row_total, key_peak, key_total, n, m, d, LOG2E / temperature, span)
    options = {"NO_SELF": no_self, "KEYS": size.others, **_widths(size, D=d)}
    _launch(kernels.both_sums, size, batch * shares, arguments, options)
    return _log_total(row_peak, row_total), _log_total(key_peak, key_total)


def log_sums_backward(
    d_row: Tensor,
    d_column: Tensor,
    row: Tensor,
    column: Tensor,
    q: Tensor,
    k: Tensor,
    temperature: float,
    no_self: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of q and k; `row` and `column` may be sums over more keys and queries than these."""
    d_row, d_column = d_row.masked_fill(torch.isneginf(row), 0), d_column.masked_fill(torch.isneginf(column), 0)
    lift = _lift(q, 2 * d_row, 2 * d_column)
    queries, keys = Side(q, shift=_shift(row), level=d_row * lift), Side(k, shift=_shift(column), level=d_column * lift)
    sides, pairs = ((queries, keys), (keys, queries)), Pairs(no_self=no_self)
    dq, dk = (_pull(*side, temperature, pairs, "queries", both_ways=True)[0] / lift for side in sides)
    return dq, dk


def _pull(
    own: Side,
    other: Side,
    temperature: float,
    pairs: Pairs,
    own_rows: Literal["queries", "keys"],
    *,
    d_rows: bool = True,
    d_values: bool = True,
    goal: Tensor | None = None,
    rest: Tensor | None = None,
    both_ways: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx (b, n, d), du (b, n, e) and sums of G (b, n) as `kernels.pull` has them; undefined if not wanted."""
    (batch, n, d), m = own.rows.shape, other.rows.shape[1]
    e = 0 if other.values is None else other.values.shape[-1]
    size = blocks("pull, both ways" if both_ways else "pull", own.rows.dtype, max(d, e))
    pattern = _pattern(pairs, n, m, size.rows, own.rows.device, transposed=own_rows == "keys")
    dx, du = (own.rows.new_zeros(batch, n, width, dtype=torch.float32) for width in (d, e))
    sums = dx.new_empty(batch, n)
    values = (own.values, other.values) if e else (None, None)
    numbers = (own.shift, other.shift, own.level, other.level, own.limit, other.limit, goal, rest)
    out = (dx if d_rows else None, du if d_values and e else None, sums if d_rows else None)
    arguments = (own.rows, other.rows, *values, *numbers, *pattern, *out, n, m, d, e, LOG2E / temperature)
    lift = LIFT.get(own.rows.dtype, 0)
    options = {"LIFT": lift, "NO_SELF": pairs.no_self, "BOTH_WAYS": both_ways, "OTHERS": size.others}
    _launch(kernels.pull, size, batch * triton.cdiv(n, size.rows), arguments, options | _widths(size, D=d, E=e))
    return dx.div_(temperature), du.mul_(2.0**-lift), sums


def _launch(kernel: Any, size: Blocks, programs: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Run a kernel on the device of its tensors."""
    if programs == 0:
        return
    arguments = tuple(x.contiguous() if isinstance(x, Tensor) else x for x in arguments)
    with _on_device(arguments[0].device):
        kernel[(programs,)](*arguments, **options, ROWS=size.rows, num_warps=size.warps, num_stages=size.stages)


def _on_device(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _widths(size: Blocks, **widths: int) -> dict[str, int]:
    """Return widths and how many features of each are handled at once."""
    blocks = {f"BLOCK_{name}": min(size.features, max(16, triton.next_power_of_2(w))) for name, w in widths.items()}
    return widths | blocks


def _pattern(pairs: Pairs, n: int, m: int, rows: int, device: torch.device, transposed: bool = False) -> Pattern:
    """Return the pairs that count for n own rows and m others, in blocks of `rows`; transposed: own rows are keys."""
    pattern = Pattern()
    groups = (pairs.row_group, pairs.key_group) if not transposed else (pairs.key_group, pairs.row_group)
    if pairs.offset is not None or groups[0] is not None:
        pattern = Pattern(*_ranges(groups, pairs.offset, n, m, device, transposed))
    if pairs.excluded is None:
        return pattern
    own, other = pairs.excluded.flip(0) if transposed else pairs.excluded
    order = (own.div(rows, rounding_mode="floor") * m + other).argsort()
    edges = torch.arange(triton.cdiv(n, rows) + 1, device=device) * rows
    start = torch.searchsorted(own.sort().values, edges)
    return pattern._replace(start=start.int(), own=own[order].int(), other=other[order].int())


def _ranges(
    groups: tuple[Tensor | None, Tensor | None], offset: int | None, n: int, m: int, device: torch.device, keys: bool
) -> tuple[Tensor, Tensor]:
    """Return the first other row that counts for each own row, and the one behind the last; both ascend."""
    row = torch.arange(n, device=device)
    first, behind = torch.zeros_like(row), torch.full_like(row, m)
    if groups[0] is not None and groups[1] is not None:
        first = torch.searchsorted(groups[1].contiguous(), groups[0].contiguous())
        behind = torch.searchsorted(groups[1].contiguous(), groups[0].contiguous(), right=True)
    if offset is not None and keys:
        first = torch.maximum(first, row - offset)
    elif offset is not None:
        behind = torch.minimum(behind, row + offset + 1)
    return first.clamp(0, m).int(), behind.clamp(0, m).int()


def _lift(x: Tensor, *largest: Tensor) -> Tensor:
    """Return a power of two that brings the largest of the numbers near the top of float16; 1 for other dtypes of x."""
    if x.dtype not in LIFT:
        return x.new_ones((), dtype=torch.float32)
    most = torch.stack([t.abs().amax() if t.numel() else t.new_zeros(()) for t in largest]).amax()
    exponent = LIFT[x.dtype] - torch.frexp(most).exponent
    return torch.ldexp(torch.ones_like(most), exponent.clamp(max=MOST_LIFT))


def _longest(x: Tensor) -> Tensor:
    """Return the largest norm of a row."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norms.amax() if norms.numel() else norms.new_zeros(())


def _base_two(bias: Tensor | None) -> Tensor | None:
    """Return log-weights to the base 2, finite for excluded keys."""
    return None if bias is None else (bias * LOG2E).clamp(min=ABSENT)


def _shift(log_sum: Tensor) -> Tensor:
    """Return minus the logarithm to the base 2; rows without a key get a number that makes all weights 0."""
    return (log_sum * -LOG2E).masked_fill(torch.isneginf(log_sum), ABSENT)


def _log_total(peak: Tensor, total: Tensor) -> Tensor:
    """Return the natural logarithm (b, n) of sums (b, shares, n) relative to powers of two; −inf for nothing."""
    if peak.shape[1] == 0:
        return peak.new_full((peak.shape[0], peak.shape[2]), -torch.inf)
    top = peak.amax(1)
    summed = (total * (peak - top.unsqueeze(1)).exp2()).sum(1).log2().add_(top)
    return summed.masked_fill_((top < ABSENT / 2) & ~summed.isnan(), -torch.inf).div_(LOG2E)
