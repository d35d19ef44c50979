"""What every backend of the pairs promises, against the dense formula in float64: `test_backends.py` runs it for each.

Small shapes, because Triton's interpreter is slow; several tiles in each direction all the same.
"""

import os

import pytest
import torch
from torch import Tensor

import uncollapse as uc
from uncollapse.pairwise import Pairs, all_pairs, backends, grid, log_sums, logsumexp, softmax_mean
from uncollapse.pairwise.numerics import unit_rows

EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float16, torch.bfloat16)}
TRITON = os.environ.get(backends.VARIABLE) == "triton"
if TRITON:
    from uncollapse.pairwise import fused
N, M = 45, 40


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(grid.TILE, "cpu", (32, 1 << 10))
    if TRITON:
        monkeypatch.setattr(fused, "blocks", lambda *_: fused.Blocks(32, 32, 32, 4, 1))
        monkeypatch.setattr(fused, "SHARES", 1)  # two blocks of rows in each program that sums columns


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dense(q, k, v, *, temperature=1.0, mask=None, causal=False, exclude=None, normalize="rows", group=None):
    """The definition, with all pairs in a matrix: means, and log-sum-exps of rows or columns."""
    keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    keep = keep.tril(k.shape[-2] - q.shape[-2]) if causal else keep
    if isinstance(exclude, str):
        keep = keep & ~torch.eye(len(keep), dtype=torch.bool)
    elif exclude is not None:
        keep[exclude[0], exclude[1]] = False
    if group is not None:
        keep = keep & (group[:, None] == group)
    kept = keep if mask is None else keep & mask[..., None, :]
    summed, dim = (kept, -1) if normalize == "rows" else (keep, -2)
    logits = (q @ k.mT / temperature).masked_fill(~summed, -torch.inf)
    some = summed.any(dim, keepdim=True)
    weight = logits.masked_fill(~some, 0).softmax(dim) * (kept & some)
    level = logits.masked_fill(~some, 0).logsumexp(dim).masked_fill(~some.squeeze(dim), -torch.inf)
    return weight @ v, level


def compare(ours, theirs, *inputs: Tensor, value: float, gradient: float) -> None:
    """Compare values and gradients of two functions of the inputs, the second of them in float64, by norms."""
    given = [x.detach().clone().requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    got, want = ours(*given), theirs(*exact)
    finite = torch.isfinite(want)
    assert torch.equal(finite, torch.isfinite(got))
    incoming = rows(*want[finite].shape, seed=99).to(got.dtype)
    got[finite].backward(incoming)
    want[finite].backward(incoming.double())
    pairs = [(got[finite].detach(), want[finite].detach(), value)]
    pairs += [(a.grad, b.grad, gradient) for a, b in zip(given, exact, strict=True)]
    for i, (a, b, bound) in enumerate(pairs):
        assert torch.isfinite(a).all()
        error = (a.double() - b).norm() / b.norm().clamp(min=1e-30)
        assert error <= bound, f"{'gradient ' + str(i - 1) if i else 'value'}: {error:.2g}, allowed {bound:.2g}"


def exact(logit: float) -> dict[str, float]:
    """Return the bounds for float32 inputs with logits up to this size."""
    return {"value": 16 * EPS[torch.float32] * max(1, logit), "gradient": 16 * EPS[torch.float32] * max(1, logit)}


def rounded(dtype: torch.dtype, logit: float) -> dict[str, float]:
    """Return the bounds for half inputs: weights and entries of G are rounded to their dtype."""
    return {"value": EPS[dtype] + exact(logit)["value"], "gradient": 2 * EPS[dtype] + exact(logit)["gradient"]}


PAIRS = torch.stack([torch.arange(90) * 7 % M, torch.arange(90) * 11 % M])
OPTIONS = {
    "all": {},
    "mask": {"mask": torch.arange(M) % 3 > 0},
    "causal": {"causal": True},
    "self": {"exclude": "self"},
    "pairs": {"exclude": PAIRS},
    "all of it": {"mask": torch.arange(M) % 3 > 0, "causal": True, "exclude": PAIRS},
}


@pytest.mark.parametrize("width", [20, 70], ids=["narrow", "wide"])
@pytest.mark.parametrize("case", OPTIONS)
def test_options(case: str, width: int) -> None:
    """Query counts that differ from key counts, a zero row, several tiles, features in registers and in memory."""
    n = M if case == "self" else N
    q, k, v = rows(n, width), rows(M, width, seed=1), rows(M, width - 5, seed=2)
    q[3], k[4] = 0, 0
    options = {**OPTIONS[case], "temperature": width / 4}
    logit = float((q @ k.T).abs().max()) / options["temperature"]
    for normalize in ("rows", "columns") if width == 20 else ("rows",):
        both = {**options, "normalize": normalize}
        compare(lambda *a: softmax_mean(*a, **both), lambda *a: dense(*a, **both)[0], q, k, v, **exact(logit))  # noqa: B023
    compare(lambda *a: logsumexp(*a, **options), lambda q, k: dense(q, k, k, **options)[1], q, k, **exact(logit))


@pytest.mark.parametrize("temperature", [0.02, 0.3, 10.0])
def test_float32_is_exact_at_any_temperature(temperature: float) -> None:
    """With q = k, the row itself outweighs all others at low temperatures, and its gradient is small."""
    x, v = unit_rows(rows(M, 24)), 1e3 * rows(M, 8, seed=1)
    run = lambda f: lambda x, v: f(x, x, v)  # noqa: E731
    ours, theirs = (
        (lambda *a: softmax_mean(*a, temperature=temperature)),
        (lambda *a: dense(*a, temperature=temperature)[0]),
    )
    compare(run(ours), run(theirs), x, v, **exact(1 / temperature))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_half_precision(dtype: torch.dtype, temperature: float) -> None:
    q, k, v = unit_rows(rows(N, 24)).to(dtype), unit_rows(rows(M, 24, seed=1)).to(dtype), rows(M, 40, seed=2).to(dtype)
    for normalize in ("rows", "columns"):
        options = {"temperature": temperature, "normalize": normalize}
        ours, theirs = (lambda *a: softmax_mean(*a, **options)), (lambda *a: dense(*a, **options)[0])  # noqa: B023
        compare(ours, theirs, q, k, v, **rounded(dtype, 1 / temperature))
    assert softmax_mean(q, k, v).dtype == dtype
    ours, theirs = (
        (lambda *a: log_sums(*a, temperature, False)[0]),
        (lambda q, k: dense(q, k, k, temperature=temperature)[1]),
    )
    compare(ours, theirs, q, k, **(rounded(dtype, 1 / temperature) | {"value": exact(1 / temperature)["value"]}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tiny_and_huge_gradients_survive_half_precision(dtype: torch.dtype) -> None:
    """The entries of G are below the smallest number of float16, or beyond the largest."""
    q, v = unit_rows(rows(M, 16)).to(dtype), rows(M, 16, seed=1)
    tiniest = 1e-37 if dtype == torch.float16 else 1e-9  # which bfloat16 holds with few digits
    for scale, size in ((1e-9, 1.0), (1.0, 3e3), (tiniest, 1.0)):
        w = (v * size).to(dtype)
        grads = []
        for x, values in ((q, w), (q.double(), w.double())):
            leaf = x.detach().clone().requires_grad_()
            mean, level = all_pairs(leaf, leaf, values, 0.5, Pairs())
            (scale * (mean.square().sum() / size**2 + level.sum())).backward()
            grads.append(leaf.grad.double())
        tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # what the gradient itself cannot hold
        assert (grads[0] - grads[1]).norm() <= 4 * EPS[dtype] * grads[1].norm() + tiny * grads[1].numel() ** 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_that_are_all_alike_keep_their_digits(dtype: torch.dtype) -> None:
    """Collapsed tokens: rounded weights must not scale their mean, nor leave a gradient where no weight matters."""
    k, v = unit_rows(rows(M, 24, seed=1)).to(dtype), rows(1, 24, seed=2).to(dtype).expand(M, -1)
    q = unit_rows(rows(N, 24)).to(dtype).requires_grad_()
    mean, _ = all_pairs(q, k, v, 0.5, Pairs())
    assert (mean - v[:1]).norm() <= exact(2)["value"] * mean.norm()
    incoming = rows(*mean.shape, seed=3)
    mean.backward(incoming)
    assert q.grad.norm() <= exact(2)["gradient"] * (incoming.norm() * v[0].norm() / 0.5)


@pytest.mark.skipif(not TRITON, reason="compares the two")
@pytest.mark.parametrize("kind", ["means", "columns", "both ways"])
def test_comparison_at_the_first_use(kind: str) -> None:
    """Also with a default device, on which random numbers of a CPU's generator cannot be made."""
    for dtype in (torch.float32, torch.bfloat16):
        x = rows(3, 24).to(dtype)
        with torch.device("meta"):
            error = backends.difference(x, kind)
        assert error <= backends.MOST_DIFFERENT[dtype] / 2


@pytest.mark.parametrize("exclude_self", [True, False])
@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["moderate", "large logits"])
def test_log_sums_of_both_directions(exclude_self: bool, scale: float) -> None:
    q, k = (scale * rows(2, M if exclude_self else n, 12, seed=s) for s, n in ((0, N), (1, M)))
    theirs = lambda q, k: torch.cat([dense(*x, x[1], **options)[1] for x in ((q, k), (k, q))], -1)  # noqa: E731
    options = {"exclude": "self" if exclude_self else None, "temperature": 2.0}
    logit = float((q @ k.mT).abs().max()) / 2
    compare(lambda q, k: torch.cat(log_sums(q, k, 2.0, exclude_self), -1), theirs, q, k, **exact(logit))


def test_graphs_and_edges() -> None:
    """No pair across graphs, none along an edge, none with itself."""
    x, graph = rows(M, 12), torch.arange(M) * 5 // M
    edges = torch.stack([torch.arange(60) % M, torch.arange(60) * 7 % M])
    both = torch.cat([edges, edges.flip(0), torch.arange(M).expand(2, -1)], 1)
    mean = lambda x: dense(*([torch.nn.functional.normalize(x, dim=-1)] * 2), x, exclude=both, group=graph)[0]  # noqa: E731
    compare(lambda x: uc.contra_norm(x, 0.5, edge_index=edges, batch=graph), lambda x: x - 0.5 * mean(x), x, **exact(1))
    assert uc.contra_norm(x.bfloat16(), 0.5, edge_index=edges, batch=graph).dtype == torch.bfloat16


def test_rows_without_a_key() -> None:
    q, k, v = (rows(2, n, 6, seed=s).requires_grad_() for s, n in ((0, N), (1, M), (2, M)))
    mask = torch.ones(2, M, dtype=torch.bool)
    mask[1] = False
    mean, level = softmax_mean(q, k, v, mask=mask, causal=True), logsumexp(q, k, mask=mask, causal=True)
    assert mean[1].abs().max() == mean[0, : N - M].abs().max() == 0
    assert torch.isneginf(level[1]).all()
    assert int(torch.isneginf(level[0]).sum()) == N - M
    (mean.sum() + level[torch.isfinite(level)].sum()).backward()
    for x in (q, k, v):
        assert torch.isfinite(x.grad).all()
        assert x.grad[1].abs().max() == 0


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 33), (33, 1)])
def test_one_row(n: int, m: int) -> None:
    q, k, v = rows(n, 5), rows(m, 5, seed=1), rows(m, 3, seed=2)
    compare(softmax_mean, lambda *a: dense(*a)[0], q, k, v, **exact(8) | {"gradient": 1e-4 if m > 1 else 1.0})
    q.requires_grad_(), k.requires_grad_()
    softmax_mean(q, k, v).sum().backward()
    if m == 1:  # no weight can move
        assert q.grad.abs().max() == k.grad.abs().max() == 0


def test_no_rows() -> None:
    for n, m in ((0, 3), (3, 0), (0, 0)):
        q, k = torch.zeros(2, n, 4, requires_grad=True), torch.zeros(2, m, 4, requires_grad=True)
        mean, sums = softmax_mean(q, k, k), log_sums(q, k, 1.0, False)
        (mean.sum() + sum(x[torch.isfinite(x)].sum() for x in sums)).backward()
        assert mean.shape == (2, n, 4)
        assert [x.shape for x in sums] == [(2, n), (2, m)]


def test_masked_keys_may_hold_anything_and_nan_is_not_hidden() -> None:
    x, v, mask = rows(M, 6), rows(M, 6, seed=1), torch.arange(M) % 2 == 0
    bad = x.clone()
    bad[~mask] = torch.nan
    torch.testing.assert_close(softmax_mean(x, bad, bad, mask=mask), softmax_mean(x, x[mask], x[mask]))
    mean, level = all_pairs(bad, x, v, 1.0, Pairs())
    assert torch.equal(torch.isnan(level), ~mask)
    assert torch.equal(torch.isnan(mean).all(-1), ~mask)


def test_batch_is_a_loop_and_broadcasts() -> None:
    q, k, v = rows(2, 3, N, 6), rows(3, M, 6, seed=1), rows(2, 1, M, 4, seed=2)
    mask = rows(2, 1, M, seed=3) > -0.5
    out = softmax_mean(q, k, v, mask=mask)
    for i, j in ((0, 0), (1, 2)):
        torch.testing.assert_close(out[i, j], softmax_mean(q[i, j], k[j], v[i, 0], mask=mask[i, 0]))


def test_log_weights_and_a_learned_temperature_have_gradients() -> None:
    x, v, bias, tau = rows(M, 6), rows(M, 4, seed=1), rows(M, seed=2), torch.tensor(0.7)
    ours = lambda x, v, b, t: torch.cat([y.flatten() for y in all_pairs(x, x, v, t, Pairs(), b)])  # noqa: E731

    def theirs(x, v, b, t):
        logits = x @ x.T / t + b
        return torch.cat([(logits.softmax(-1) @ v).flatten(), logits.logsumexp(-1)])

    compare(ours, theirs, x, v, bias, tau, **exact(float((x @ x.T).abs().max()) / 0.7))


def test_gradients_are_the_same_to_the_bit_in_each_run() -> None:
    x, y = rows(M, 70).requires_grad_(), rows(M, 70, seed=1).requires_grad_()
    losses = (
        lambda: softmax_mean(x, y, y, temperature=20.0).square().sum(),
        lambda: sum(s.sum() for s in log_sums(x, y, 20.0, True)),
    )
    for loss in losses:
        first, second = (torch.autograd.grad(loss(), (x, y)) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_is_one_operator_under_compile() -> None:
    x, y = rows(M, 8).bfloat16(), rows(M, 8, seed=1).bfloat16()
    run = lambda x, y: softmax_mean(x, x, y, exclude="self").sin() + sum(log_sums(x, y, 1.0, True))[:, None]  # noqa: E731
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    leaves = [[t.clone().requires_grad_() for t in (x, y)] for _ in range(2)]
    for f, inputs in zip((run, compiled), leaves, strict=True):
        f(*inputs).sum().backward()
    for a, b in zip(*leaves, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_autocast() -> None:
    """Triton multiplies in the dtype of autocast, tiles in float32; both return float32."""
    x, y = unit_rows(rows(M, 12)), unit_rows(rows(M, 12, seed=1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = uc.info_nce(x, y, temperature=0.1, symmetric=True)
        mean = all_pairs(x, y, y, 0.1, Pairs())[0]
    halves = (x.bfloat16(), y.bfloat16()) if TRITON else (x, y)
    want = dense(*(t.double() for t in halves), halves[1].double(), temperature=0.1)[0]
    assert loss.dtype == mean.dtype == torch.float32
    assert (mean - want).norm() <= (rounded(torch.bfloat16, 10) if TRITON else exact(10))["value"] * want.norm()
