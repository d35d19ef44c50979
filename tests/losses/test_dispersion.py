import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from uncollapse.losses import dispersion_loss, uniform_loss
from uncollapse.losses.dispersion import FORMS
from uncollapse.metrics import mean_cosine
from uncollapse.pairwise import pair_means

TAU, NORM = 0.4, 0.3


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive(x: Tensor, form: str, tau: float = TAU) -> float:
    """The paper's table, by loops over the pairs i ≠ j; means in place of sums."""
    rows = x.tolist()
    n, terms = len(rows), []
    for i in range(n):
        for j in range(n):
            if i == j:
                continue
            a, b = rows[i], rows[j]
            if form == "decorrelation":
                a, b = ([v - math.fsum(r) / len(r) for v in r] for r in (a, b))
            dot = math.fsum(p * q for p, q in zip(a, b, strict=True))
            cosine = dot / (math.hypot(*a) * math.hypot(*b))
            angle = math.acos(max(-1.0, min(1.0, cosine))) / math.pi
            terms.append(
                {
                    "angular_spread": math.exp(-angle / tau),
                    "decorrelation": cosine**2,
                    "l2_repel": math.exp(-(math.dist(a, b) ** 2) / tau),
                    "orthogonalization": max(0.0, 0.5 - angle) ** 2,
                }[form]
            )
    mean = math.fsum(terms) / len(terms)
    if form == "l2_repel":
        return math.log(mean) + NORM * float(x.square().mean())
    return math.log(mean) if form == "angular_spread" else mean


def ours(x: Tensor, form: str, **options: object) -> Tensor:
    return dispersion_loss(x, form, temperature=TAU, norm_weight=NORM, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(9, 5), (4, 12)])
def test_is_the_papers_table(form: str, shape: tuple[int, int]) -> None:
    x = 0.7 * tokens(*shape)
    assert ours(x, form).item() == pytest.approx(naive(x, form), rel=1e-11)


@pytest.mark.parametrize("form", FORMS)
def test_batches_are_looped_and_averaged(form: str) -> None:
    x = 0.7 * tokens(2, 3, 7, 4)
    expected = sum(naive(one, form) for one in x.flatten(0, 1)) / 6
    assert ours(x, form).item() == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("form", FORMS)
def test_masks_delete_tokens_and_short_sequences_do_not_count(form: str) -> None:
    x = 0.7 * tokens(4, 8, 5)
    mask = torch.tensor([[True] * 8, [True] * 5 + [False] * 3, [False, True] + [False] * 6, [False] * 8])
    x[~mask] = torch.nan  # padding may hold anything
    x.requires_grad_()
    value = ours(x, form, mask=mask)
    expected = (naive(x.detach()[0], form) + naive(x.detach()[1, :5], form)) / 2
    assert value.item() == pytest.approx(expected, rel=1e-11)
    value.backward()
    assert x.grad.isfinite().all()
    assert x.grad[~mask].abs().max() == 0
    assert x.grad[2].abs().max() == 0


@pytest.mark.parametrize("form", FORMS)
def test_tiles_change_nothing(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, mask = tokens(2, 50, 6).requires_grad_(), tokens(2, 50, seed=1) > -1
    whole = ours(x, form, mask=mask)
    monkeypatch.setattr(pair_means, "TILE", 700)  # seven rows at a time
    tiled = ours(x, form, mask=mask)
    torch.testing.assert_close(tiled, whole, rtol=1e-12, atol=0)
    slopes = [torch.autograd.grad(value, x)[0] for value in (whole, tiled)]
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form: str) -> None:
    x, mask = tokens(2, 5, 4).requires_grad_(), torch.tensor([[True] * 5, [True, False, True, True, False]])
    assert torch.autograd.gradcheck(lambda x: ours(x, form, mask=mask, clamp=1e-9), (x,))


@pytest.mark.parametrize("form", ["angular_spread", "orthogonalization"])
def test_the_slope_of_the_angle_is_bounded(form: str) -> None:
    """As in the released code: the gradient of clamped arccos passed on to the cosine."""
    x = normalize(torch.tensor([[1.0, 0, 0.3], [1.0, 0.02, 0.3], [0, 1, 0.2]], dtype=torch.float64), dim=-1)
    x.requires_grad_()
    cosine = x @ x.T
    inner = cosine + (cosine.clamp(-0.75, 0.75) - cosine).detach()
    angle = inner.arccos() / math.pi
    exact = (cosine.detach().clamp(-1, 1).arccos() / math.pi - angle).detach() + angle  # its slope, the true value
    off = ~torch.eye(3, dtype=torch.bool)
    if form == "angular_spread":
        expected = (-exact[off] / TAU).exp().mean().log()
    else:
        expected = (0.5 - exact[off]).relu().square().mean()
    value = dispersion_loss(x, form, temperature=TAU)
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=0)
    tangent = torch.eye(3, dtype=torch.float64) - x.detach()[:, :, None] * x.detach()[:, None]  # rows are unit rows
    (slope,) = torch.autograd.grad(expected, x)
    (got,) = torch.autograd.grad(value, x)
    torch.testing.assert_close(got, (tangent @ slope[..., None]).squeeze(-1), rtol=1e-9, atol=1e-12)


def test_sharp_temperatures_do_not_underflow() -> None:
    x = torch.eye(4)  # all angles are ½: exp(−500) is 0 in float32
    assert dispersion_loss(x, temperature=1e-3).item() == pytest.approx(-500, rel=1e-6)


def test_l2_repel_is_uniform_loss_and_norms() -> None:
    x = tokens(2, 9, 4)
    expected = uniform_loss(x, 1 / TAU, normalize=False) + NORM * x.square().mean()
    torch.testing.assert_close(ours(x, "l2_repel"), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("form", "identical"), [*zip(FORMS, (0.0, 1.0, NORM * 4, 0.25), strict=True)])
def test_degenerate_rows(form: str, identical: float) -> None:
    same = torch.tensor([[2.0, -2.0, 2.0, 2.0]], dtype=torch.float64).repeat(6, 1).requires_grad_()
    value = ours(same, form)
    assert value.item() == pytest.approx(identical, abs=1e-6)
    (slope,) = torch.autograd.grad(value, same)
    assert slope.isfinite().all()
    assert (slope.abs().max() < 1e-6) == (form != "l2_repel")
    one = torch.ones(1, 4, requires_grad=True)
    assert ours(one, form).item() == 0
    zeros = torch.zeros(3, 4, requires_grad=True)
    value = ours(zeros, form)
    value.backward()
    right = {"angular_spread": -0.5 / TAU, "decorrelation": 0.0, "l2_repel": 0.0, "orthogonalization": 0.0}
    assert value.item() == pytest.approx(right[form], abs=1e-6)  # orthogonal to all
    assert zeros.grad.abs().max() == 0


@pytest.mark.parametrize("size", [6, 7, 9, 10, 12, 31, 33])
def test_constant_rows_have_no_correlation_although_their_mean_is_rounded(size: int) -> None:
    for value in (0.1, 0.3, 0.7, 1.1):
        x = torch.full((3, size), value, requires_grad=True)
        loss = dispersion_loss(x, "decorrelation")
        loss.backward()
        assert (loss.item(), x.grad.abs().max().item()) == (0.0, 0.0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(form: str, dtype: torch.dtype) -> None:
    x = tokens(2, 20, 8).to(dtype).requires_grad_()
    value = ours(x, form)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(ours(x.detach().double(), form).item(), rel=1e-5)
    value.backward()
    assert x.grad.isfinite().all()


def test_disperses_condensed_tokens() -> None:
    x = (tokens(1, 12, 6) * 0.2 + 1).requires_grad_()
    optimizer = torch.optim.Adam([x], lr=0.1)
    for _ in range(40):
        optimizer.zero_grad()
        dispersion_loss(x).backward()
        optimizer.step()
    assert float(mean_cosine(x.detach())) < 0.1  # 0.96 before


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="form"):
        dispersion_loss(tokens(3, 2), "spread")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="clamp"):
        dispersion_loss(tokens(3, 2), clamp=0.0)
    with pytest.raises(ValueError, match="temperature"):
        dispersion_loss(tokens(3, 2), temperature=-1.0)
    with pytest.raises(TypeError, match="floating"):
        dispersion_loss(torch.ones(3, 2, dtype=torch.int))
