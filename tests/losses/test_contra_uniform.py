import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from uncollapse.losses import contra_uniform_loss


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sum_of_eq3(h: Tensor, tau: float) -> float:
    """Σ_i log Σ_j exp(h_i·h_j/τ) of unit rows, by loops."""
    rows = normalize(h.double(), dim=-1).tolist()
    total = 0.0
    for a in rows:
        total += math.log(math.fsum(math.exp(math.fsum(p * q for p, q in zip(a, b, strict=True)) / tau) for b in rows))
    return total


@pytest.mark.parametrize("tau", [0.02, 0.5, 1.0, 1.5])
def test_published_is_eq_3(tau: float) -> None:
    h = tokens(9, 5)
    got = contra_uniform_loss(h, temperature=tau, form="published")
    assert got.item() == pytest.approx(sum_of_eq3(h, tau), rel=1e-12)


@pytest.mark.parametrize("tau", [0.02, 0.5, 1.0, 1.5])
def test_mean_is_over_tokens_and_then_over_sequences(tau: float) -> None:
    x = tokens(2, 3, 9, 5)
    expected = sum(sum_of_eq3(h, tau) / 9 for h in x.reshape(6, 9, 5)) / 6
    assert contra_uniform_loss(x, temperature=tau).item() == pytest.approx(expected, rel=1e-12)


def test_mask_deletes_tokens() -> None:
    x = tokens(3, 8, 5)
    mask = torch.tensor([[True] * 8, [True] * 5 + [False] * 3, [False, True] + [False] * 6])
    x[~mask] = torch.nan  # padding may hold anything
    x.requires_grad_()
    got = contra_uniform_loss(x, mask=mask)
    parts = [x.detach()[i][mask[i]] for i in range(3)]
    expected = sum(sum_of_eq3(h, 1.0) / len(h) for h in parts) / 3
    assert got.item() == pytest.approx(expected, rel=1e-12)
    got.backward()
    assert x.grad[~mask].abs().max() == 0
    assert x.grad.isfinite().all()


def test_published_with_a_mask_sums_the_real_rows() -> None:
    x, mask = tokens(6, 5), torch.tensor([True, False, True, True, False, True])
    got = contra_uniform_loss(x, mask=mask, form="published")
    assert got.item() == pytest.approx(sum_of_eq3(x[mask], 1.0), rel=1e-12)


def test_padded_sequences_contribute_nothing() -> None:
    x = tokens(3, 6, 5).requires_grad_()
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[1] = False
    got = contra_uniform_loss(x, mask=mask)
    torch.testing.assert_close(got, contra_uniform_loss(x[[0, 2]]), rtol=1e-13, atol=0)
    nothing = contra_uniform_loss(x, mask=torch.zeros(3, 6, dtype=torch.bool))
    nothing.backward()
    assert nothing.item() == 0
    assert x.grad.abs().max() == 0


def test_the_mask_broadcasts() -> None:
    x, mask = tokens(3, 6, 5), torch.tensor([True, True, False, True, False, False])
    torch.testing.assert_close(contra_uniform_loss(x, mask=mask), contra_uniform_loss(x[:, mask]), rtol=1e-13, atol=0)


def sum_over_features(f: Tensor, tau: float) -> float:
    """Σ_b Σ_i log Σ_j exp(f_bi·f_bj/τ) of unit rows, by loops."""
    total = 0.0
    for row in normalize(f.double(), dim=-1).tolist():
        total += sum(math.log(math.fsum(math.exp(a * b / tau) for b in row)) for a in row)
    return total


@pytest.mark.parametrize("tau", [0.02, 0.5, 1.0, 1.5])
def test_features_is_the_released_codes_commented_out_call(tau: float) -> None:
    f = tokens(6, 5)
    got = contra_uniform_loss(f, temperature=tau, form="features")
    assert got.item() == pytest.approx(sum_over_features(f, tau), rel=1e-12)
    mask = torch.tensor([True, False, True, True, False, True])
    got = contra_uniform_loss(f.masked_fill(~mask[:, None], torch.nan), temperature=tau, form="features", mask=mask)
    assert got.item() == pytest.approx(sum_over_features(f[mask], tau), rel=1e-12)


def test_the_two_functions_of_the_released_code_differ() -> None:
    f = tokens(6, 10)
    of_rows, of_features = (float(contra_uniform_loss(f, form=form)) for form in ("published", "features"))
    assert of_features > 9 * of_rows


def test_features_of_degenerate_rows() -> None:
    zero = torch.zeros(2, 4, requires_grad=True)
    value = contra_uniform_loss(zero, form="features")
    value.backward()
    assert value.item() == pytest.approx(8 * math.log(4), abs=1e-5)
    assert zero.grad.abs().max() == 0
    one = contra_uniform_loss(torch.ones(3, 1), temperature=0.5, form="features")  # a single feature: log e^{1/τ}
    assert one.item() == pytest.approx(3 / 0.5, abs=1e-5)


def test_without_normalisation() -> None:
    x = tokens(7, 3)
    dense = torch.logsumexp(x @ x.T / 0.7, -1)
    got = contra_uniform_loss(x, temperature=0.7, normalize=False)
    torch.testing.assert_close(got, dense.mean(), rtol=1e-12, atol=0)


def test_gradient_is_eq_5() -> None:
    """∂L/∂H = (D⁻¹A + AD⁻¹)H/τ, without normalisation."""
    h, tau = tokens(8, 4).requires_grad_(), 0.9
    (got,) = torch.autograd.grad(contra_uniform_loss(h, temperature=tau, normalize=False, form="published"), h)
    a = (h @ h.T / tau).exp()
    d = a.sum(1)
    torch.testing.assert_close(got, ((a / d[:, None] + a / d) @ h / tau).detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("form", ["mean", "published", "features"])
def test_gradcheck(form: str) -> None:
    x = tokens(5, 3).requires_grad_()
    tau = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, True, False, True, True])
    assert torch.autograd.gradcheck(lambda x, t: contra_uniform_loss(x, temperature=t, mask=mask, form=form), (x, tau))


def test_pinned_and_degenerate_values() -> None:
    assert contra_uniform_loss(torch.ones(5, 3)).item() == pytest.approx(math.log(5) + 1, abs=1e-6)
    published = contra_uniform_loss(torch.eye(3), form="published")
    assert published.item() == pytest.approx(3 * math.log(math.e + 2), abs=1e-5)
    assert contra_uniform_loss(torch.ones(1, 3), temperature=0.5).item() == pytest.approx(2, abs=1e-6)  # self alone
    x = torch.zeros(4, 3, requires_grad=True)
    value = contra_uniform_loss(x)
    value.backward()
    assert value.item() == pytest.approx(math.log(4), abs=1e-6)
    assert x.grad.abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    x = tokens(2, 30, 8).to(dtype).requires_grad_()
    got = contra_uniform_loss(x, temperature=0.1)
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(contra_uniform_loss(x.detach().double(), temperature=0.1).item(), rel=1e-5)
    half, exact = (
        float(contra_uniform_loss(rows, form="features")) for rows in (x.detach()[0], x.detach()[0].double())
    )
    assert half == pytest.approx(exact, rel=1e-5)
    got.backward()
    assert x.grad.isfinite().all()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(b=st.integers(1, 3), n=st.integers(1, 7), d=st.integers(1, 5), seed=st.integers(0, 1000))
def test_any_shape_and_mask(b: int, n: int, d: int, seed: int) -> None:
    x, mask = tokens(b, n, d, seed=seed), tokens(b, n, seed=seed + 1) > 0
    real = [h[m] for h, m in zip(x, mask, strict=True) if m.any()]
    expected = sum(sum_of_eq3(h, 0.3) / len(h) for h in real) / max(len(real), 1)
    assert contra_uniform_loss(x, temperature=0.3, mask=mask).item() == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": tokens(5)}, ValueError, r"\(\.\.\., n, d\)"),
        ({"x": torch.ones(5, 3, dtype=torch.long)}, TypeError, "floating-point"),
        ({"x": tokens(2, 5, 3), "form": "published"}, ValueError, "without batch dimensions"),
        ({"x": tokens(2, 5, 3), "form": "features"}, ValueError, "without batch dimensions"),
        ({"x": tokens(5, 3), "form": "sum"}, ValueError, "'published' or 'features'"),
        ({"x": tokens(5, 3), "mask": torch.ones(4, dtype=torch.bool)}, ValueError, "per token"),
        ({"x": tokens(5, 3), "mask": torch.ones(5)}, TypeError, "mask must be bool"),
        ({"x": tokens(0, 3)}, ValueError, "at least one row"),
        ({"x": tokens(5, 3), "temperature": torch.ones(3)}, ValueError, "one element"),
        ({"x": tokens(5, 3), "temperature": 0.0}, ValueError, "temperature must be positive"),
    ],
)
def test_bad_input(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        contra_uniform_loss(**arguments)  # type: ignore[arg-type]
