"""Log-sum-exps of rows and columns from one walk, against the dense formula in float64."""

import pytest
import torch
from torch import Tensor

from uncollapse import pairwise
from uncollapse.pairwise import both_ways, grid, log_sums, walk
from uncollapse.pairwise.numerics import unit_rows

EPS = torch.finfo(torch.float32).eps
BEYOND = 0.01  # a temperature at which exp of a logit leaves float32: no walk without a shift


@pytest.fixture(params=["one tile", "many tiles"])
def _tiles(request, monkeypatch):
    if request.param == "many tiles":
        monkeypatch.setitem(grid.TILE, "cpu", (64, 1 << 13))


def dense(q: Tensor, k: Tensor, temperature: float, exclude_self: bool) -> tuple[Tensor, Tensor]:
    logits = q @ k.mT / temperature
    if exclude_self:
        logits = logits.masked_fill(torch.eye(q.shape[-2], dtype=torch.bool), -torch.inf)
    return logits.logsumexp(-1), logits.logsumexp(-2)


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("temperature", [BEYOND, 0.02, 0.3, 1.0, 10.0])
@pytest.mark.parametrize("exclude_self", [True, False])
def test_exact(exclude_self, temperature):
    n, m = 300, 300 if exclude_self else 217
    inputs = [unit_rows(rows(n, 32)).requires_grad_(), unit_rows(rows(m, 32, seed=1)).requires_grad_()]
    references = [x.detach().double().requires_grad_() for x in inputs]
    gradients = rows(n, seed=2), rows(m, seed=3)
    ours, theirs = log_sums(*inputs, temperature, exclude_self), dense(*references, temperature, exclude_self)
    torch.autograd.backward(ours, gradients)
    torch.autograd.backward(theirs, [g.double() for g in gradients])
    found = [*ours, *(x.grad for x in inputs)]
    for got, want in zip(found, [*theirs, *(x.grad for x in references)], strict=True):
        assert (got - want).norm() <= 16 * EPS * max(1, 1 / temperature) * want.norm()


@pytest.mark.parametrize("temperature", [1.0, 0.001])
def test_large_logits_go_through_the_other_walk(monkeypatch, temperature):
    calls = []
    forward = walk.forward
    monkeypatch.setattr(walk, "forward", lambda *args: calls.append(args[0]) or forward(*args))
    log_sums(unit_rows(rows(40, 8)), unit_rows(rows(40, 8, seed=1)), temperature, exclude_self=True)
    assert len(calls) == (0 if temperature == 1.0 else 2)


@pytest.mark.parametrize("scale", [1.0, 20.0], ids=["one walk", "large logits"])
@pytest.mark.parametrize("exclude_self", [True, False])
def test_gradcheck(monkeypatch, exclude_self, scale):
    monkeypatch.setitem(grid.TILE, "cpu", (4, 16))
    q, k = ((scale * rows(2, 9, 3, seed=s).double()).requires_grad_() for s in (0, 1))
    tau = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda q, k, t: log_sums(q, k, t, exclude_self), (q, k, tau))


def test_each_output_alone_has_its_own_gradient():
    q, k = (rows(6, 3, seed=s).requires_grad_() for s in (0, 1))
    together = torch.autograd.grad(torch.cat(log_sums(q, k, 0.5, False)).sum(), (q, k))
    parts = [torch.autograd.grad(log_sums(q, k, 0.5, False)[i].sum(), (q, k)) for i in (0, 1)]
    for whole, first, second in zip(together, *parts, strict=True):
        torch.testing.assert_close(whole, first + second)


@pytest.mark.parametrize("temperature", [0.5, 0.001])
def test_the_same_tensor_twice_and_a_batch_are_as_each_alone(temperature):
    q = unit_rows(rows(3, 20, 4))
    whole = log_sums(q, q, temperature, exclude_self=True)
    for i in range(3):
        one = log_sums(q[i], q[i], temperature, exclude_self=True)
        for got, want in zip(whole, one, strict=True):
            torch.testing.assert_close(got[i], want)
            torch.testing.assert_close(want, pairwise.logsumexp(q[i], q[i], temperature=temperature, exclude="self"))


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_nothing_left_is_minus_infinity_without_a_gradient(scale):
    q, k = ((scale * rows(1, 3, seed=s)).requires_grad_() for s in (0, 1))
    sums = log_sums(q, k, 1.0, exclude_self=True)
    torch.cat(sums).sum().backward()
    assert [x.item() for x in sums] == [-torch.inf, -torch.inf]
    assert q.grad.abs().max() == k.grad.abs().max() == 0


def test_half_precision_is_summed_in_float32():
    q, k = (unit_rows(rows(30, 8, seed=s)).bfloat16() for s in (0, 1))
    for got, want in zip(log_sums(q, k, 0.1, True), dense(q.double(), k.double(), 0.1, True), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want.float())


def test_is_an_operator():
    q, k = (rows(2, 12, 4, seed=s).requires_grad_() for s in (0, 1))
    torch.library.opcheck(both_ways.log_sums_operator, (q, k, 0.5, True))
    run = lambda q, k: torch.cat(log_sums(q, k, 0.5, True)).sum()  # noqa: E731
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for got, want in zip(
        torch.autograd.grad(compiled(q[0], k[0]), (q, k)), torch.autograd.grad(run(q[0], k[0]), (q, k)), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_without_self_there_are_as_many_of_both():
    with pytest.raises(ValueError, match="3 and 4"):
        log_sums(rows(3, 2), rows(4, 2), 1.0, exclude_self=True)
