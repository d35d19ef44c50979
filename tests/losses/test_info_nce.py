import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from uncollapse.losses import info_nce


def rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def unit(x: Tensor) -> list[list[float]]:
    return [[float(v) / max(math.hypot(*r), 1e-300) for v in r] for r in x.double().tolist()]


def dot(a: list[float], b: list[float]) -> float:
    return math.fsum(p * q for p, q in zip(a, b, strict=True))


def from_paper(anchor: list[float], partner: list[float], negatives: list[list[float]], tau: float) -> float:
    """−log[e^{p/τ} / (e^{p/τ} + Σ e^{n/τ})], one row, shifted by the largest logit."""
    logits = [dot(anchor, partner) / tau, *[dot(anchor, k) / tau for k in negatives]]
    top = max(logits)
    return top + math.log(math.fsum(math.exp(v - top) for v in logits)) - logits[0]


def naive(x: Tensor, y: Tensor, tau: float, negatives: object = "cross", queue: Tensor | None = None) -> float:
    a, b = unit(x), unit(y)
    extra = [] if queue is None else unit(queue)
    n = len(a)
    if isinstance(negatives, str) and negatives == "both":
        z = a + b
        partner = [(i + n) % (2 * n) for i in range(2 * n)]
        others = [[z[j] for j in range(2 * n) if j not in (i, partner[i])] for i in range(2 * n)]
        return math.fsum(from_paper(z[i], z[partner[i]], others[i], tau) for i in range(2 * n)) / (2 * n)
    total = 0.0
    for i in range(n):
        if isinstance(negatives, Tensor):
            keys = unit(negatives if negatives.dim() == 2 else negatives[i])
        else:
            keys = [b[j] for j in range(n) if j != i]
        total += from_paper(a[i], b[i], keys + extra, tau)
    return total / n


@pytest.mark.parametrize("tau", [0.02, 0.07, 0.5, 10.0])
@pytest.mark.parametrize("kind", ["cross", "both", "shared", "own", "queue"])
def test_is_the_papers_formula(kind: str, tau: float) -> None:
    x, y = rows(7, 5), rows(7, 5, seed=1) + rows(7, 5)
    extra = rows(7, 4, 5, seed=2) if kind == "own" else rows(9, 5, seed=2)
    queue = extra if kind == "queue" else None
    negatives = kind if kind in ("cross", "both") else "cross" if queue is not None else extra
    got = info_nce(x, y, temperature=tau, negatives=negatives, queue=queue)
    assert got.item() == pytest.approx(naive(x, y, tau, negatives, queue), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("kind", ["cross", "shared", "own"])
def test_symmetric_is_the_mean_of_both_directions(kind: str) -> None:
    x, y = rows(7, 5), rows(7, 5, seed=1)
    negatives = {"cross": "cross", "shared": rows(6, 5, seed=3), "own": rows(7, 3, 5, seed=3)}[kind]
    expected = (naive(x, y, 0.2, negatives) + naive(y, x, 0.2, negatives)) / 2
    got = info_nce(x, y, temperature=0.2, negatives=negatives, symmetric=True)
    assert got.item() == pytest.approx(expected, rel=1e-12)
    assert got.item() == pytest.approx(info_nce(y, x, temperature=0.2, negatives=negatives, symmetric=True).item())
    assert got.item() != pytest.approx(naive(x, y, 0.2, negatives), rel=1e-4)  # one direction is another number


def test_both_is_symmetric_already() -> None:
    x, y = rows(7, 5), rows(7, 5, seed=1)
    one_way = info_nce(x, y, negatives="both")
    with pytest.raises(ValueError, match="symmetric"):
        info_nce(x, y, negatives="both", symmetric=True)
    assert one_way.item() == pytest.approx(info_nce(y, x, negatives="both").item(), rel=1e-14)


def test_cross_is_a_cross_entropy_and_both_is_simclr() -> None:
    x, y, tau = rows(40, 8), rows(40, 8, seed=1), 0.1
    a, b = normalize(x, dim=-1), normalize(y, dim=-1)
    dense = cross_entropy(a @ b.T / tau, torch.arange(40))
    torch.testing.assert_close(info_nce(x, y, temperature=tau), dense, rtol=1e-12, atol=0)
    z = torch.cat([a, b])
    logits = (z @ z.T / tau).fill_diagonal_(-torch.inf)
    dense = cross_entropy(logits, torch.arange(80).roll(40))
    torch.testing.assert_close(info_nce(x, y, temperature=tau, negatives="both"), dense, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["cross", "symmetric", "both"])
def test_beyond_one_tile_value_and_gradient_are_the_dense_ones(kind: str) -> None:
    n = 1500
    x, y = rows(n, 4).requires_grad_(), (rows(n, 4) + rows(n, 4, seed=1)).requires_grad_()
    a, b = normalize(x, dim=-1), normalize(y, dim=-1)
    options = {"cross": {}, "symmetric": {"symmetric": True}, "both": {"negatives": "both"}}[kind]
    if kind == "cross":
        dense = cross_entropy(a @ b.T / 0.1, torch.arange(n))
    elif kind == "symmetric":
        dense = sum(cross_entropy(logits, torch.arange(n)) / 2 for logits in (a @ b.T / 0.1, b @ a.T / 0.1))
    else:
        z = torch.cat([a, b])
        alone = torch.eye(2 * n, dtype=torch.bool)
        dense = cross_entropy((z @ z.T / 0.1).masked_fill(alone, -torch.inf), torch.arange(2 * n).roll(n))
    expected = torch.autograd.grad(dense, (x, y))
    got = info_nce(x, y, temperature=0.1, **options)
    torch.testing.assert_close(got, dense, rtol=1e-12, atol=0)
    for g, e in zip(torch.autograd.grad(got, (x, y)), expected, strict=True):
        assert (g - e).norm() <= 1e-11 * e.norm()


def test_negatives_alone_and_the_whole_of_y_differ_only_by_the_partner() -> None:
    x, y = rows(6, 5), rows(6, 5, seed=1)
    own = torch.stack([torch.cat([y[:i], y[i + 1 :]]) for i in range(6)])  # (6, 5, 5)
    torch.testing.assert_close(info_nce(x, y), info_nce(x, y, negatives=own), rtol=1e-13, atol=0)
    assert info_nce(x, y, negatives=y) > info_nce(x, y)  # the partner counts among its own negatives


def test_queue_is_more_negatives() -> None:
    x, y, queue = rows(6, 5), rows(6, 5, seed=1), rows(11, 5, seed=2)
    own = torch.stack([torch.cat([y[:i], y[i + 1 :], queue]) for i in range(6)])
    torch.testing.assert_close(info_nce(x, y, queue=queue), info_nce(x, y, negatives=own), rtol=1e-13, atol=0)


@pytest.mark.parametrize("kind", ["cross", "both", "shared", "own", "queue", "symmetric", "raw"])
def test_gradcheck(kind: str) -> None:
    x, y = rows(4, 3).requires_grad_(), rows(4, 3, seed=1).requires_grad_()
    extra = (rows(4, 2, 3, seed=2) if kind == "own" else rows(5, 3, seed=2)).requires_grad_()
    tau = torch.tensor([0.4], dtype=torch.float64, requires_grad=True)

    def value(x: Tensor, y: Tensor, extra: Tensor, tau: Tensor) -> Tensor:
        more = {"shared": {"negatives": extra}, "own": {"negatives": extra}, "queue": {"queue": extra}}
        more |= {"both": {"negatives": "both"}, "symmetric": {"symmetric": True}, "raw": {"normalize": False}}
        return info_nce(x, y, temperature=tau, **more.get(kind, {}))

    assert torch.autograd.gradcheck(value, (x, y, extra, tau))


def test_learnable_temperature_has_the_value_and_the_gradient_of_a_number() -> None:
    x, y = rows(6, 5), rows(6, 5, seed=1)
    tau = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    got = info_nce(x, y, temperature=tau)
    assert got.item() == pytest.approx(info_nce(x, y, temperature=0.3).item(), rel=1e-13)
    got.backward()
    step = 1e-6
    slope = (info_nce(x, y, temperature=0.3 + step) - info_nce(x, y, temperature=0.3 - step)) / (2 * step)
    assert tau.grad is not None
    assert tau.grad.item() == pytest.approx(slope.item(), rel=1e-7)


@pytest.mark.parametrize("options", [{}, {"symmetric": True}, {"negatives": "both"}], ids=str)
def test_one_pair_has_no_negatives(options: dict[str, object]) -> None:
    x, y = rows(1, 5).requires_grad_(), rows(1, 5, seed=1).requires_grad_()
    got = info_nce(x, y, **options)
    got.backward()
    assert got.item() == 0
    assert torch.equal(x.grad, torch.zeros(1, 5, dtype=torch.float64))
    assert torch.equal(y.grad, torch.zeros(1, 5, dtype=torch.float64))


def test_one_pair_with_a_queue() -> None:
    x, y, queue = rows(1, 5).requires_grad_(), rows(1, 5, seed=1), rows(4, 5, seed=2)
    got = info_nce(x, y, queue=queue)
    torch.testing.assert_close(got, info_nce(x, y, negatives=queue), rtol=1e-14, atol=0)
    got.backward()
    assert x.grad.abs().max() > 1e-3
    assert x.grad.isfinite().all()


def test_pinned_values() -> None:
    x = torch.eye(4)
    assert info_nce(x, x, temperature=1.0).item() == pytest.approx(0.7436684, abs=1e-6)  # log(1 + 3/e)
    both = info_nce(x, x, temperature=1.0, negatives="both")
    assert both.item() == pytest.approx(1.1654223, abs=1e-6)  # log(1 + 6/e)
    assert info_nce(x, x, temperature=0.02).item() == pytest.approx(3 * math.exp(-50), rel=1e-5)  # keeps its digits
    same = torch.ones(5, 3)
    assert info_nce(same, same).item() == pytest.approx(math.log(5), abs=1e-6)
    assert info_nce(same, same, negatives="both").item() == pytest.approx(math.log(9), abs=1e-6)


def test_float32_keeps_the_digits_of_small_losses() -> None:
    x = normalize(rows(64, 256), dim=-1)
    y = x + 0.001 * rows(64, 256, seed=1)
    logits = x @ normalize(y, dim=-1).T / 0.02
    ratio = (logits - logits.diagonal()[:, None]).exp().fill_diagonal_(0)
    exact = ratio.sum(1).log1p().mean().item()
    assert 0 < exact < 1e-12
    assert info_nce(x.float(), y.float(), temperature=0.02).item() == pytest.approx(exact, rel=1e-4)
    back = (logits - logits.diagonal()).exp().fill_diagonal_(0).sum(0).log1p().mean().item()
    both_ways = info_nce(x.float(), y.float(), temperature=0.02, symmetric=True)
    assert both_ways.item() == pytest.approx((exact + back) / 2, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("negatives", ["cross", "both"])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype, negatives: str) -> None:
    x, y = rows(30, 8, dtype=dtype).requires_grad_(), rows(30, 8, seed=1, dtype=dtype)
    got = info_nce(x, y, negatives=negatives, temperature=0.05)
    assert got.dtype == torch.float32
    exact = info_nce(x.detach().double(), y.double(), negatives=negatives, temperature=0.05)
    assert got.item() == pytest.approx(exact.item(), rel=1e-5)
    got.backward()
    assert x.grad.dtype == dtype
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("options", [{}, {"symmetric": True}, {"negatives": "both"}], ids=str)
def test_zero_rows_and_identical_rows_are_finite(options: dict[str, object]) -> None:
    x, y = rows(5, 4), rows(5, 4, seed=1)
    x[2] = 0
    y[3] = y[4]
    x.requires_grad_()
    got = info_nce(x, y, temperature=0.02, **options)
    got.backward()
    assert got.isfinite()
    assert x.grad.isfinite().all()
    assert x.grad[2].abs().max() == 0


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    n=st.integers(1, 9),
    d=st.integers(1, 6),
    tau=st.sampled_from([0.02, 0.3, 1.0, 5.0]),
    negatives=st.sampled_from(["cross", "both"]),
    seed=st.integers(0, 1000),
)
def test_any_shape(n: int, d: int, tau: float, negatives: str, seed: int) -> None:
    x, y = rows(n, d, seed=seed), rows(n, d, seed=seed + 1)
    got = info_nce(x, y, temperature=tau, negatives=negatives)
    assert got.item() == pytest.approx(naive(x, y, tau, negatives), rel=1e-11, abs=1e-13)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    permuted = info_nce(x[order], y[order], temperature=tau, negatives=negatives)
    assert permuted.item() == pytest.approx(got.item(), rel=1e-11, abs=1e-13)


def test_no_square_matrix_outside_of_the_kernel() -> None:
    n = 3000
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max([largest, *(t.untyped_storage().nbytes() for t in [out] if isinstance(t, Tensor))])
            return out

    x, y = rows(n, 4, dtype=torch.float32).requires_grad_(), rows(n, 4, seed=1, dtype=torch.float32)
    with Sizes():
        for negatives in ("cross", "both"):
            info_nce(x, y, negatives=negatives).backward()
        info_nce(x, y, symmetric=True).backward()
    assert largest < n * n * 4


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"y": rows(6, 5)}, ValueError, "same shape"),
        ({"x": rows(2, 7, 5), "y": rows(2, 7, 5)}, ValueError, "without batch dimensions"),
        ({"x": torch.ones(7, 5, dtype=torch.long)}, TypeError, "floating-point"),
        ({"x": rows(0, 5), "y": rows(0, 5)}, ValueError, "at least one row"),
        ({"negatives": "all"}, ValueError, "'cross', 'both' or a tensor"),
        ({"negatives": rows(6, 4)}, ValueError, r"\(M, 5\) or \(7, M, 5\)"),
        ({"negatives": rows(6, 2, 5)}, ValueError, r"\(M, 5\) or \(7, M, 5\)"),
        ({"negatives": rows(0, 5)}, ValueError, "at least one row"),
        ({"queue": rows(7, 2, 5)}, ValueError, "queue must be"),
        ({"queue": rows(3, 5), "negatives": "both"}, ValueError, "negatives='cross'"),
        ({"queue": rows(3, 5), "negatives": rows(3, 5)}, ValueError, "negatives='cross'"),
        ({"queue": rows(3, 5), "symmetric": True}, ValueError, "its own queue"),
        ({"temperature": torch.ones(2)}, ValueError, "one element"),
        ({"temperature": 0.0}, ValueError, "temperature must be positive"),
        ({"temperature": -1.0}, ValueError, "temperature must be positive"),
    ],
)
def test_bad_input(change: dict[str, object], error: type[Exception], message: str) -> None:
    arguments: dict[str, object] = {"x": rows(7, 5), "y": rows(7, 5, seed=1)} | change
    with pytest.raises(error, match=message):
        info_nce(**arguments)  # type: ignore[arg-type]
