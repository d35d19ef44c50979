"""Triton kernels over all pairs of rows: the formulas of `walk`, tile by tile in registers.

`softmax_rows` is the forward pass, `pull` the backward pass and the adjoint, `both_sums` gives the log-sum-exps of rows
and of columns. Each program owns some rows and visits the others tile by tile, so that no two programs add to the same
entry: there are no atomics, and results are deterministic. Matrices are contiguous; logarithms are to the base 2. What
does not apply is None and is not compiled.

Widths up to one block of features are summed in registers. Wider sums are kept in memory, one block of features after
another, by the one program that owns the rows. Loops over these blocks end at a number that the compiler does not know:
it would unroll them, and run out of registers.
"""

import os

import triton
import triton.language as tl

from uncollapse.pairwise.grid import ABSENT as LOWEST
from uncollapse.pairwise.grid import DOMINANCE as RATIO

ABSENT = tl.constexpr(LOWEST)  # the logit of an excluded pair
DOMINANCE = tl.constexpr(RATIO)
CHUNK = tl.constexpr(32)  # excluded pairs that are read at once
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # products of bfloat16 are not implemented there


@triton.jit(do_not_specialize=["n", "m", "d", "e"])
def softmax_rows(
    q, k, v, bias, first, behind, start, pair_row, pair_key, mean, log2sum, dominated, n, m, d, e, scale,
    D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, LIFT: tl.constexpr, NO_SELF: tl.constexpr,
):  # fmt: skip
    """Write o_i = Σ_j P_ij v_j, log₂ Σ_j exp2 S_ij and whether one key dominates, for S_ij = scale·q_i·k_j + bias_j.

    A running maximum keeps exponents at or below LIFT, which lets float16 weights use the range of that type. Means are
    divided by the sum of the weights as they were rounded: values that are all alike then have exactly that mean.
    """
    batch, block = _program(n, ROWS)
    base = block * ROWS
    rows = base + tl.arange(0, ROWS)
    q, k, v, mean = q + batch * n * D, k + batch * m * D, v + batch * m * E, mean + batch * n * E
    peak, total = tl.full((ROWS,), ABSENT, tl.float32), tl.zeros((ROWS,), tl.float32)
    sums, share = tl.zeros((ROWS, BLOCK_E), tl.float32), tl.zeros((ROWS,), tl.float32)
    low, high, cursor, end = _visits(first, behind, start, block, n, m, ROWS)
    for lo in range(low, high, KEYS):
        keys = lo + tl.arange(0, KEYS)
        logits = _products(q, base, n, k, lo, m, d, ROWS, KEYS, D, BLOCK_D) * scale
        if bias is not None:
            logits += tl.load(bias + batch * m + keys, mask=keys < m, other=0.0)[None, :]
        counts, cursor = _counts(rows, keys, n, m, first, behind, pair_row, pair_key, cursor, end, NO_SELF)
        logits = tl.where(counts, logits, ABSENT)
        top = tl.maximum(peak, tl.max(logits, 1))
        fade = tl.exp2(peak - top)
        weight = tl.exp2(logits - top[:, None] + LIFT)
        total = total * fade + tl.sum(weight, 1)
        rounded = weight.to(v.dtype.element_ty)
        share = share * fade + tl.sum(rounded.to(tl.float32), 1)
        if E > BLOCK_E:
            _add_in_memory(mean, base, n, rounded, v, lo, m, fade, e, ROWS, KEYS, E, BLOCK_E)
        elif E > 0:
            value = _load(v, lo, 0, m, KEYS, E, BLOCK_E)
            sums = _dot(rounded, value, sums * fade[:, None])
        peak = top
    nothing, inside = (peak < ABSENT / 2) & (total == total), rows < n  # a sum of NaN stays NaN
    total, share = tl.where(nothing, float("inf"), total), tl.where(nothing, float("inf"), share)
    level = tl.where(nothing, float("-inf"), peak + tl.log2(total) - LIFT)
    tl.store(log2sum + batch * n + rows, level, mask=inside)
    tl.store(dominated + batch * n + rows, (total < DOMINANCE * 2**LIFT).to(tl.uint8), mask=inside)
    for at in range(0, E if E <= BLOCK_E else e, BLOCK_E):
        if E > BLOCK_E:
            sums = _load(mean, base, at, n, ROWS, E, BLOCK_E)
        _store(mean, base, at, n, sums / share[:, None], ROWS, E, BLOCK_E)


@triton.jit(do_not_specialize=["n", "m", "d", "e"])
def pull(
    x, y, u, w, own_shift, other_shift, own_level, other_level, own_limit, other_limit, goal, rest, first, behind,
    start, pair_own, pair_other, dx, du, sums, n, m, d, e, scale, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
    OTHERS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, LIFT: tl.constexpr, NO_SELF: tl.constexpr,
    BOTH_WAYS: tl.constexpr,
):  # fmt: skip
    """Write what all others j pull at each own row i, for known sums (a, f: own shift and level; b, g: of the others).

        S_ij = scale·x_i·y_j   P_ij = exp2(S_ij + a_i + b_j)   G_ij = P_ij (u_i·w_j + f_i + g_j)
        dx_i = Σ_j G_ij y_j    du_i = Σ_j P_ij w_j             sums_i = Σ_j G_ij

    BOTH_WAYS: G_ij = exp2(S_ij + a_i) f_i + exp2(S_ij + b_j) g_j. Where a weight exceeds the limit of its query, the
    key dominates, and its entry of G is what the others leave of the goal Σ_j G_ij. For own queries, it is computed
    here and written instead of the sums; for other queries it is read from `rest`.
    """
    batch, block = _program(n, ROWS)
    base = block * ROWS
    rows = base + tl.arange(0, ROWS)
    inside = rows < n
    own, other = batch * n + rows, batch * m
    x, y = x + batch * n * D, y + batch * m * D
    if u is not None:
        u, w = u + batch * n * E, w + batch * m * E
    elif w is not None:
        w = w + batch * m * E
    x_sums, u_sums = tl.zeros((ROWS, BLOCK_D), tl.float32), tl.zeros((ROWS, BLOCK_E), tl.float32)
    g_sums, found = tl.zeros((ROWS,), tl.float32), tl.full((ROWS,), -1, tl.int32)
    low, high, cursor, end = _visits(first, behind, start, block, n, m, ROWS)
    for lo in range(low, high, OTHERS):
        others = lo + tl.arange(0, OTHERS)
        logits = _products(x, base, n, y, lo, m, d, ROWS, OTHERS, D, BLOCK_D) * scale
        counts, cursor = _counts(rows, others, n, m, first, behind, pair_own, pair_other, cursor, end, NO_SELF)
        if BOTH_WAYS:
            push = _push_both_ways(
                logits, counts, own_shift, other_shift, own_level, other_level, own, other, inside, others, m
            )
        else:
            weight = _weights(logits, counts, own_shift, other_shift, own, other, inside, others, m)
            if du is not None:
                lifted = (weight * 2**LIFT).to(w.dtype.element_ty)
                u_sums = _add(u_sums, du + batch * n * E, base, n, lifted, w, lo, m, e, ROWS, OTHERS, E, BLOCK_E)
            if dx is not None:
                push = tl.zeros((ROWS, OTHERS), tl.float32)
                if u is not None:
                    push = _products(u, base, n, w, lo, m, e, ROWS, OTHERS, E, BLOCK_E)
                push = _levels(push, own_level, other_level, own, other, inside, others, m) * weight
                push, found = _dominate(
                    push, found, weight, own_limit, other_limit, rest, own, other, inside, others, m
                )
        if dx is not None:
            g_sums += tl.sum(push, 1)
            half = push.to(y.dtype.element_ty)
            x_sums = _add(x_sums, dx + batch * n * D, base, n, half, y, lo, m, d, ROWS, OTHERS, D, BLOCK_D)
    if goal is not None:
        g_sums = tl.load(goal + own, mask=inside, other=0.0) - g_sums
    if sums is not None:
        tl.store(sums + own, g_sums, mask=inside)
    if dx is not None:
        _write_rows(dx + batch * n * D, base, n, x_sums, y, own_limit, found, g_sums, d, ROWS, D, BLOCK_D)
    if du is not None and E <= BLOCK_E:
        _store(du + batch * n * E, base, 0, n, u_sums, ROWS, E, BLOCK_E)


@triton.jit(do_not_specialize=["n", "m", "d", "span"])
def both_sums(
    q, k, row_peak, row_total, key_peak, key_total, n, m, d, scale, span, D: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, BLOCK_D: tl.constexpr, NO_SELF: tl.constexpr,
):  # fmt: skip
    """Write Σ_j exp2(S_ij − peak_i) of each row, and Σ_i exp2(S_ij − peak_j) of each key over the rows of a program.

    A program owns `span` rows, whose sums stay in memory, and visits each key once: S is computed once for both.
    """
    batch, block = _program(n, span)
    share = (batch * tl.cdiv(n, span) + block) * m
    q, k, row_peak, row_total = q + batch * n * D, k + batch * m * D, row_peak + batch * n, row_total + batch * n
    for lo in range(0, m, KEYS):
        keys = lo + tl.arange(0, KEYS)
        peak, total = tl.full((KEYS,), ABSENT, tl.float32), tl.zeros((KEYS,), tl.float32)
        for at in range(block * span, tl.minimum(block * span + span, n), ROWS):
            rows = at + tl.arange(0, ROWS)
            counts = (rows < n)[:, None] & (keys < m)[None, :]
            if NO_SELF:
                counts = counts & (rows[:, None] != keys[None, :])
            logits = tl.where(counts, _products(q, at, n, k, lo, m, d, ROWS, KEYS, D, BLOCK_D) * scale, ABSENT)
            top = tl.maximum(peak, tl.max(logits, 0))
            total = total * tl.exp2(peak - top) + tl.sum(tl.exp2(logits - top[None, :]), 0)
            peak = top
            before = tl.load(row_peak + rows, mask=rows < n, other=ABSENT)
            here = tl.maximum(before, tl.max(logits, 1))
            summed = tl.load(row_total + rows, mask=rows < n, other=0.0) * tl.exp2(before - here)
            summed += tl.sum(tl.exp2(logits - here[:, None]), 1)
            tl.store(row_peak + rows, here, mask=rows < n)
            tl.store(row_total + rows, summed, mask=rows < n)
        tl.store(key_peak + share + keys, peak, mask=keys < m)
        tl.store(key_total + share + keys, total, mask=keys < m)
        tl.debug_barrier()  # the sums of the rows are read again


@triton.jit
def _program(n, ROWS):
    """Return the batch element and the block of rows of this program."""
    blocks = tl.cdiv(n, ROWS)
    return (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks


@triton.jit
def _visits(first, behind, start, block, n, m, ROWS: tl.constexpr):
    """Return which others a block of rows visits, [low, high), and where its excluded pairs are, [cursor, end)."""
    low, high, cursor, end = 0, m, 0, 0
    if first is not None:  # both ascend
        low, high = tl.load(first + block * ROWS), tl.load(behind + tl.minimum(block * ROWS + ROWS, n) - 1)
    if start is not None:
        cursor, end = tl.load(start + block), tl.load(start + block + 1)
    return low, high, cursor, end


@triton.jit
def _counts(rows, others, n, m, first, behind, pair_own, pair_other, cursor, end, NO_SELF: tl.constexpr):
    """Return which pairs of a tile count, and where the excluded pairs of the next tile begin.

    Excluded pairs of a block ascend by the other row. Some at a time, they are counted as a product of zeros and ones.
    """
    counts = (rows < n)[:, None] & (others < m)[None, :]
    if first is not None:
        counts = counts & (others[None, :] >= tl.load(first + rows, mask=rows < n, other=0)[:, None])
        counts = counts & (others[None, :] < tl.load(behind + rows, mask=rows < n, other=0)[:, None])
    if NO_SELF:
        counts = counts & (rows[:, None] != others[None, :])
    if pair_own is not None:
        last = tl.max(others)
        excluded = tl.zeros(counts.shape, tl.float32)
        following = tl.load(pair_other + cursor, mask=cursor < end, other=m)
        while following <= tl.minimum(last, m - 1):
            at = cursor + tl.arange(0, CHUNK)
            i = tl.load(pair_own + at, mask=at < end, other=n)
            j = tl.load(pair_other + at, mask=at < end, other=m)
            left = (rows[:, None] == i[None, :]).to(tl.float16)
            excluded = tl.dot(left, (j[:, None] == others[None, :]).to(tl.float16), excluded)
            cursor += tl.sum((j <= last).to(tl.int32) * (at < end).to(tl.int32))
            following = tl.load(pair_other + cursor, mask=cursor < end, other=m)
        counts = counts & (excluded == 0)
    return counts, cursor


@triton.jit
def _weights(logits, counts, own_shift, other_shift, own, other, inside, others, m):
    """Return P_ij = exp2(S_ij + a_i + b_j) of a tile, 0 for pairs that do not count."""
    if own_shift is not None:
        logits += _own(own_shift, own, inside)
    if other_shift is not None:
        logits += _other(other_shift + other, others, m)
    return tl.where(counts, tl.exp2(logits), 0.0)


@triton.jit
def _levels(push, own_level, other_level, own, other, inside, others, m):
    """Return push + f_i + g_j of a tile."""
    if own_level is not None:
        push += _own(own_level, own, inside)
    if other_level is not None:
        push += _other(other_level + other, others, m)
    return push


@triton.jit
def _dominate(push, found, weight, own_limit, other_limit, rest, own, other, inside, others, m):
    """Return the entries of a tile without those of dominant keys, and the dominant keys of own rows found so far.

    An entry of an own query becomes 0, that of another query what `rest` says.
    """
    if own_limit is not None:
        rules = weight > _own(own_limit, own, inside)
        found = tl.maximum(found, tl.max(tl.where(rules, others[None, :], -1), 1))
        push = tl.where(rules, 0.0, push)
    if other_limit is not None:
        rules = weight > _other(other_limit + other, others, m)
        push = tl.where(rules, _other(rest + other, others, m), push)
    return push, found


@triton.jit
def _push_both_ways(logits, counts, own_shift, other_shift, own_level, other_level, own, other, inside, others, m):
    """Return G_ij = exp2(S_ij + a_i) f_i + exp2(S_ij + b_j) g_j of a tile, 0 for pairs that do not count."""
    push = tl.exp2(logits + _own(own_shift, own, inside)) * _own(own_level, own, inside)
    push += tl.exp2(logits + _other(other_shift + other, others, m)) * _other(other_level + other, others, m)
    return tl.where(counts, push, 0.0)


@triton.jit
def _own(values, at, inside):
    """Load one number per own row, as a column."""
    return tl.load(values + at, mask=inside, other=0.0)[:, None]


@triton.jit
def _other(values, others, m):
    """Load one number per other row, as a row."""
    return tl.load(values + others, mask=others < m, other=0.0)[None, :]


@triton.jit
def _load(x, base, at, n, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load a block of x (n, WIDTH) from row `base` and feature `at`, 0 outside."""
    row, feature = tl.arange(0, ROWS), at + tl.arange(0, BLOCK)
    inside = (row < n - base)[:, None] & (feature < WIDTH)[None, :]
    return tl.load(
        x + tl.cast(base, tl.int64) * WIDTH + (row[:, None] * WIDTH + feature[None, :]), mask=inside, other=0.0
    )


@triton.jit
def _store(x, base, at, n, values, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store a block of x (n, WIDTH) from row `base` and feature `at`."""
    row, feature = tl.arange(0, ROWS), at + tl.arange(0, BLOCK)
    inside = (row < n - base)[:, None] & (feature < WIDTH)[None, :]
    tl.store(x + tl.cast(base, tl.int64) * WIDTH + (row[:, None] * WIDTH + feature[None, :]), values, mask=inside)


@triton.jit
def _gather(x, rows, at, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load features of any rows of x in float32, 0 for the row −1."""
    feature = at + tl.arange(0, BLOCK)
    inside = (rows >= 0)[:, None] & (feature < WIDTH)[None, :]
    return tl.load(x + rows.to(tl.int64)[:, None] * WIDTH + feature[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _dot(a, b, sums):
    """Return sums + a·b: float32 without TF32, half precision on tensor cores, both summed in float32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def _products(
    x, base, n, y, lo, m, width, ROWS: tl.constexpr, OTHERS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return x_i·y_j of a tile, BLOCK features at a time."""
    sums = tl.zeros((ROWS, OTHERS), tl.float32)
    for at in range(0, WIDTH if WIDTH <= BLOCK else width, BLOCK):
        own, other = _load(x, base, at, n, ROWS, WIDTH, BLOCK), _load(y, lo, at, m, OTHERS, WIDTH, BLOCK)
        sums = _dot(own, tl.trans(other), sums)
    return sums


@triton.jit
def _add(
    sums, out, base, n, weight, y, lo, m, width, ROWS: tl.constexpr, OTHERS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return sums + weight·y if they fit into one block of features; otherwise add it to rows of out."""
    if WIDTH > BLOCK:
        _add_in_memory(out, base, n, weight, y, lo, m, None, width, ROWS, OTHERS, WIDTH, BLOCK)
    else:
        sums = _dot(weight, _load(y, lo, 0, m, OTHERS, WIDTH, BLOCK), sums)
    return sums


@triton.jit
def _write_rows(
    out, base, n, sums, y, own_limit, found, entry, width, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the sums of own rows, which may be in memory already, with the entries of the dominant keys `found`."""
    for at in range(0, WIDTH if WIDTH <= BLOCK else width, BLOCK):
        if WIDTH > BLOCK:
            sums = _load(out, base, at, n, ROWS, WIDTH, BLOCK)
        if own_limit is not None:
            sums += entry[:, None] * _gather(y, found, at, WIDTH, BLOCK)
        _store(out, base, at, n, sums, ROWS, WIDTH, BLOCK)


@triton.jit
def _add_in_memory(
    out, base, n, weight, y, lo, m, fade, width, ROWS: tl.constexpr, OTHERS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace rows of out (n, WIDTH) by fade·out + weight·y, one block of features after another."""
    for at in range(0, width, BLOCK):
        sums = _load(out, base, at, n, ROWS, WIDTH, BLOCK)
        if fade is not None:
            sums *= fade[:, None]
        sums = _dot(weight, _load(y, lo, at, m, OTHERS, WIDTH, BLOCK), sums)
        _store(out, base, at, n, sums, ROWS, WIDTH, BLOCK)
    tl.debug_barrier()  # the next tile reads what this one wrote
