"""The kernel for all pairs of rows, in linear memory: `softmax_mean`, `logsumexp` and `nearest`.

Layers and losses build on it.

For queries q_i, keys k_j and values v_j

    logits_ij = q_i·k_j / τ      Z_i = Σ_j exp(logits_ij)      m_i = Σ_j exp(logits_ij) v_j / Z_i

`softmax_mean` returns m and `logsumexp` returns log Z. Both are exact, can be differentiated once, and need memory
linear in the number of queries, keys and excluded pairs. Excluding padding, later tokens, self or given pairs removes
terms from both sums. Passing the same tensor as q and k is recognized and saves work. `nearest` finds the key with the
smallest distance to each query among the same pairs.

Sums are accumulated in float32 (float64 for float64 inputs), also under autocast, as in a normalization layer. Results
have the dtype of the inputs. Under `torch.compile` the kernel is one opaque operator. On a GPU it is a fused Triton
kernel where Triton is installed, which multiplies half precision on tensor cores, see `backend`; it has been run in
Triton's interpreter only.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from uncollapse.pairwise import backends, numerics
from uncollapse.pairwise.backends import backend as backend
from uncollapse.pairwise.both_ways import log_sums_operator
from uncollapse.pairwise.grid import Pairs as Pairs
from uncollapse.pairwise.grid import keeps_weights
from uncollapse.pairwise.grid import sort_by_query as sort_by_query
from uncollapse.pairwise.operators import Nearest as Nearest
from uncollapse.pairwise.operators import (
    all_pairs_eagerly,
    all_pairs_operator,
    nearest_distances,
    nearest_operator,
    spread_operator,
)

Exclude = Literal["self"] | Tensor | None


def softmax_mean(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    causal: bool = False,
    exclude: Exclude = None,
    normalize: Literal["rows", "columns"] = "rows",
) -> Tensor:
    """Return the softmax-weighted mean of the values for each query, over all keys that are not excluded.

        rows:     m_i = Σ_j exp(q_i·k_j/τ) v_j / Z_i,   Z_i = Σ_j exp(q_i·k_j/τ)
        columns:  m_i = Σ_j exp(q_i·k_j/τ) v_j / Z_j,   Z_j = Σ_i exp(q_i·k_j/τ)

    `rows` is attention, and the gradient of a uniformity loss; `columns` is the second term of that gradient
    (ContraNorm, arXiv 2303.06562, Eq. 5).

    Args:
        q: queries (..., n, d). The batch dimensions of all arguments broadcast.
        k: keys (..., m, d).
        v: values (..., m, e).
        temperature: τ > 0; a tensor with one element can be learned.
        mask: (..., m) bool, True = real key. Other keys and their values may hold anything.
        causal: query i sees key j only if j ≤ i + m − n.
        exclude: "self" (pairs i = j; needs n = m), or a (2, E) tensor of integer pairs (query, key), which are excluded
            in every batch element.
        normalize: the sum that the weights are divided by.

    Returns:
        (..., n, e) in the dtype of v; 0 in rows where no key is left.

    >>> x = torch.eye(3)
    >>> softmax_mean(x, x, x, exclude="self")
    tensor([[0.0000, 0.5000, 0.5000],
            [0.5000, 0.0000, 0.5000],
            [0.5000, 0.5000, 0.0000]])
    """
    if normalize not in ("rows", "columns"):
        raise ValueError(f"normalize must be 'rows' or 'columns', got {normalize!r}.")
    pairs = _pairs(q, k, causal, exclude)
    _check_key_mask(mask, q, k, v)
    k = _zero_masked(k, mask)
    if normalize == "columns":
        return column_mean(q, k, v, temperature, pairs, mask)
    if mask is not None:
        v = v.masked_fill(~mask.unsqueeze(-1), 0)
    return row_mean(q, k, v, temperature, pairs, log_weight(mask, v)).to(v.dtype)


def logsumexp(
    q: Tensor,
    k: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    causal: bool = False,
    exclude: Exclude = None,
) -> Tensor:
    """Return log Σ_j exp(q_i·k_j/τ) for each query, over all keys that are not excluded.

    The arguments are those of `softmax_mean`.

    Returns:
        (..., n) in the dtype of q; −inf, with a gradient of zero, in rows where no key is left.

    >>> logsumexp(torch.zeros(2, 3), torch.zeros(4, 3)).exp()
    tensor([4., 4.])
    """
    pairs = _pairs(q, k, causal, exclude)
    _check_key_mask(mask, q, k, k)
    k = _zero_masked(k, mask)
    return all_pairs(q, k, None, temperature, pairs, log_weight(mask, k))[1].to(q.dtype)


def nearest(
    q: Tensor, k: Tensor, *, mask: Tensor | None = None, causal: bool = False, exclude: Exclude = None
) -> Nearest:
    """Return the key with the smallest Euclidean distance to each query, over all keys that are not excluded.

    The arguments are those of `softmax_mean`. Time is O(nmd), memory linear. The search has no gradient; the distance
    has one, for the two rows of each pair that was found.

    Returns:
        distance (..., n), in float32 or float64, and key (..., n), an index; inf and −1, with a gradient of zero, where
        no key is left. The first of several nearest keys is taken. The gradient is zero where the distance is.

    >>> nearest(torch.tensor([[0.0], [2.0], [3.0]]), torch.tensor([[1.0], [5.0]]))
    Nearest(distance=tensor([1., 1., 2.]), key=tensor([0, 0, 0]))
    """
    pairs = _pairs(q, k, causal, exclude)
    _check_key_mask(mask, q, k, k)
    same, k = k is q, _zero_masked(k, mask)
    bias = log_weight(mask, k)
    dtype = torch.float64 if torch.float64 in (q.dtype, k.dtype) else torch.float32
    (q3, k3, b2), _, batch = _prepare(q, q if same and mask is None else k, None, 1.0, bias, dtype)
    k3 = q3 if k3 is None else k3
    with torch.no_grad():
        shift = k3.mean(1, keepdim=True) if k3.shape[1] else k3.sum(1, keepdim=True)  # smaller terms, more digits
        index = nearest_operator(q3 - shift, k3 - shift, b2, pairs.offset, pairs.no_self, pairs.excluded)
    with torch.autocast(q.device.type, enabled=False):
        found = nearest_distances(q3, k3, index)
    return Nearest(found.reshape(*batch, q.shape[-2]), index.reshape(*batch, q.shape[-2]))


def column_mean(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    temperature: float | Tensor,
    pairs: Pairs,
    mask: Tensor | None = None,
    query_mask: Tensor | None = None,
) -> Tensor:
    """Return `softmax_mean(normalize="columns")` for prepared pairs; `query_mask` excludes queries from the sums Z_j.

    With keys and queries swapped, columns become rows: P'_ji = exp(S_ij)/Z_j and m = P'ᵀv. Each key distributes its
    value to the queries, by weight.
    """
    if mask is not None:
        v = v.masked_fill(~mask.unsqueeze(-1), 0)
    bias = log_weight(query_mask, q)
    if pairs.offset is None:
        return _columns(k, q, v, temperature, pairs.transpose(), bias)
    # a key is seen by its own query and later ones: with both reversed, that is causal again
    n, m = q.shape[-2], k.shape[-2]
    excluded = pairs.excluded
    if excluded is not None:
        excluded = sort_by_query(torch.stack([m - 1 - excluded[1], n - 1 - excluded[0]]))
    pairs = Pairs(offset=0, no_self=pairs.no_self, excluded=excluded, mirrored=False)
    bias = None if bias is None else bias.flip(-1)
    return _columns(k.flip(-2), q.flip(-2), v.flip(-2), temperature, pairs, bias).flip(-2)


def _columns(q: Tensor, k: Tensor, d: Tensor, temperature: float | Tensor, pairs: Pairs, bias: Tensor | None) -> Tensor:
    """Return Pᵀd (..., m, e), the adjoint of the mean, for d (..., n, e)."""
    (q3, k3, b2), tau, batch = _prepare(q, k, d, temperature, bias)
    d3 = _flatten(d.to(q3.dtype), batch)
    out: Tensor = spread_operator(q3, k3, d3, b2, tau, *_fields(pairs))
    return out.reshape(*batch, *out.shape[1:]).to(d.dtype)


def row_mean(
    q: Tensor, k: Tensor, v: Tensor, temperature: float | Tensor, pairs: Pairs, bias: Tensor | None = None
) -> Tensor:
    """Return the means of `all_pairs` alone, which torch's fused attention can give on a GPU without Triton."""
    triangle = pairs.offset is None or (pairs.offset == 0 and q.shape[-2] == k.shape[-2])
    whole = triangle and bias is None and not pairs.no_self and pairs.excluded is None and pairs.row_group is None
    if not isinstance(temperature, Tensor) and backends.uses_attention(q, k, v, whole):
        _check_shapes(q, k, v, None)
        batch = _batch_shape(q, k, v)
        sets = _flatten(q, batch), _flatten(k, batch), _flatten(v, batch)
        mean = backends.attention(*sets, float(temperature), causal=pairs.offset is not None)
        if mean is not None:
            return mean.reshape(*batch, *mean.shape[1:])
    return all_pairs(q, k, v, temperature, pairs, bias)[0]


def all_pairs(
    q: Tensor, k: Tensor, v: Tensor | None, temperature: float | Tensor, pairs: Pairs, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return means (..., n, e) and log-sum-exps (..., n) of logits q·k/τ + bias_j, in float32 or float64.

    The rest of the library builds on this; `softmax_mean` and `logsumexp` are its two halves. bias (..., m) is the
    log-weight of each key; −inf excludes the key, whose entries must still be finite.
    """
    if v is not None and v.shape[-2] != k.shape[-2]:
        raise ValueError(f"v must have one row per key, that is {k.shape[-2]}, got shape {tuple(v.shape)}.")
    (q3, k3, b2), tau, batch = _prepare(q, k, v, temperature, bias)
    v3 = q3.new_empty(q3.shape[0], k.shape[-2], 0) if v is None else _flatten(v.to(q3.dtype), batch)
    if torch.compiler.is_compiling():  # sizes may be dynamic: no decision may depend on them
        mean, log_sum, _, _ = all_pairs_operator(q3, k3, v3, b2, tau, False, *_fields(pairs))
    elif _records_gradients(q3, k3, v3, b2):
        fits = keeps_weights(pairs, q3.shape[1], v3.shape[1], v3.shape[2], q3.device)
        keep = fits and not backends.uses_triton(q3)
        mean, log_sum, _, _ = all_pairs_operator(q3, k3, v3, b2, tau, keep, *_fields(pairs))
    else:  # the same without the operator's overhead, which is noticeable below a thousand rows
        mean, log_sum, _, _ = all_pairs_eagerly(q3, k3, v3, b2, tau, pairs)
    return mean.reshape(*batch, *mean.shape[1:]), log_sum.reshape(*batch, log_sum.shape[1])


def log_sums(q: Tensor, k: Tensor, temperature: float | Tensor, exclude_self: bool) -> tuple[Tensor, Tensor]:
    """Return `logsumexp` of q over k (..., n) and of k over q (..., m), from one pass over the pairs.

    Both are in float32 or float64.
    """
    if exclude_self and q.shape[-2] != k.shape[-2]:
        raise ValueError(f"exclude_self needs as many q as k, got {q.shape[-2]} and {k.shape[-2]} rows.")
    (q3, k3, _), tau, batch = _prepare(q, k, None, temperature, None)
    rows, columns = log_sums_operator(q3, q3 if k3 is None else k3, tau, exclude_self)
    return rows.reshape(*batch, rows.shape[1]), columns.reshape(*batch, columns.shape[1])


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    temperature: float | Tensor,
    bias: Tensor | None,
    dtype: torch.dtype | None = None,
) -> tuple[tuple[Tensor, Tensor | None, Tensor | None], float, torch.Size]:
    """Return q, k (None: the same as q) and bias with one batch dimension; τ; batch shape.

    q and k have the dtype that they are multiplied in, bias that of the sums.
    """
    _check_shapes(q, k, v, bias)
    dtype = backends.product_dtype(q, k, *([] if v is None else [v])) if dtype is None else dtype
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    same = k is q
    q, k, tau = apply_temperature(q.to(sums), k.to(sums), temperature)
    batch = _batch_shape(q, k, v, None if bias is None else bias.unsqueeze(-1))
    b2 = None if bias is None else _flatten(bias.to(sums).unsqueeze(-1), batch).squeeze(-1)
    return (_flatten(q.to(dtype), batch), None if same else _flatten(k.to(dtype), batch), b2), tau, batch


def apply_temperature(q: Tensor, k: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor, float]:
    """Return q, k and τ as a number. For a tensor, which can be learned, each side is scaled by 1/√τ, and τ is 1."""
    numerics.check_temperature(temperature)
    if not isinstance(temperature, Tensor):
        return q, k, float(temperature)
    root = temperature.to(q.dtype).rsqrt()
    return q * root, k * root, 1.0


def _records_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _fields(pairs: Pairs) -> tuple[Any, ...]:
    return pairs.offset, pairs.no_self, pairs.excluded, pairs.mirrored, pairs.row_group, pairs.key_group


def log_weight(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Return a mask (True = real) as log-weights 0 and −inf, in the dtype of sums with `like`."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=numerics.full_dtype(like), device=mask.device).masked_fill_(~mask, -torch.inf)


def _zero_masked(k: Tensor, mask: Tensor | None) -> Tensor:
    """Return keys with zeros in masked rows, whatever those hold."""
    return k if mask is None else k.masked_fill(~mask.unsqueeze(-1), 0)


def _check_key_mask(mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> None:
    if mask is not None:
        numerics.check_mask(mask, torch.Size((*_batch_shape(q, k, v), k.shape[-2])))


def _batch_shape(*tensors: Tensor | None) -> torch.Size:
    shapes = [t.shape[:-2] for t in tensors if t is not None]
    if all(s == shapes[0] for s in shapes):
        return shapes[0]
    shape: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return shape


def _pairs(q: Tensor, k: Tensor, causal: bool, exclude: Exclude) -> Pairs:
    _check_shapes(q, k, None, None)
    n, m = q.shape[-2], k.shape[-2]
    offset = m - n if causal else None
    if exclude is None:
        return Pairs(offset)
    if isinstance(exclude, str):
        if exclude != "self":
            raise ValueError(f"exclude must be 'self', a (2, E) tensor of pairs or None, got {exclude!r}.")
        if n != m:
            raise ValueError(f"exclude='self' needs as many keys as queries, got {m} keys and {n} queries.")
        return Pairs(offset, no_self=True)
    exclude = check_pairs(exclude, n, m)
    return Pairs(offset, excluded=sort_by_query(exclude), mirrored=k is q and is_mirrored(exclude, n))


def check_pairs(pairs: Tensor, n: int, m: int, name: str = "exclude") -> Tensor:
    """Return `pairs` as int64; raise unless it is an integer tensor (2, E) of indices below n and m.

    Args:
        pairs: the tensor to check.
        n: number of indices in the first row.
        m: number of indices in the second row.
        name: how error messages call the argument.
    """
    integers = not (pairs.is_floating_point() or pairs.is_complex() or pairs.dtype == torch.bool)
    if pairs.dim() != 2 or pairs.shape[0] != 2 or not integers:
        shape = tuple(pairs.shape)
        raise ValueError(f"{name} must be an integer tensor of shape (2, E), got {pairs.dtype} of shape {shape}.")
    if pairs.shape[1] and not torch.compiler.is_compiling():
        low, high = int(pairs.min()), pairs.amax(1).tolist()
        if low < 0 or high[0] >= n or high[1] >= m:
            raise ValueError(
                f"{name} must hold indices from 0 to {n - 1} in its first row and from 0 to {m - 1} in its second, "
                f"got a minimum of {low} and maxima of {high[0]} and {high[1]}."
            )
    return pairs.long()


def is_mirrored(pairs: Tensor, n: int) -> bool:
    """Return whether for each pair (i, j) the pair (j, i) is present too."""
    if torch.compiler.is_compiling():
        return False
    return torch.equal(torch.unique(pairs[0] * n + pairs[1]), torch.unique(pairs[1] * n + pairs[0]))


def _check_shapes(q: Tensor, k: Tensor, v: Tensor | None, bias: Tensor | None) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor is not None and (tensor.dim() < 2 or not tensor.is_floating_point()):
            raise ValueError(f"{name} must be a float tensor (..., rows, d), got {tensor.dtype} {tuple(tensor.shape)}.")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must have the same number of features, got {q.shape[-1]} and {k.shape[-1]}.")
    if bias is not None and bias.shape[-1] != k.shape[-2]:
        raise ValueError(f"mask must have one entry per key, that is {k.shape[-2]}, got shape {tuple(bias.shape)}.")


def _flatten(x: Tensor, batch: torch.Size) -> Tensor:
    """Return x (..., n, d) as (b, n, d)."""
    wide = x if x.shape[:-2] == batch else x.expand(*batch, *x.shape[-2:])
    return wide.reshape(math.prod(batch), *x.shape[-2:])
