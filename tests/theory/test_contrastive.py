"""Theorem 1 of Wang & Isola (arXiv 2005.10242), and the optima that it speaks of.

    InfoNCE(M) − log M  →  −(1/τ) E[f(x)·f(y)]  +  E_x log E_x⁻ exp(f(x⁻)·f(x)/τ)

Populations are finite, so that the expectations on the right are plain sums.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from uncollapse.losses import align_loss, contra_uniform_loss, info_nce, uniform_loss
from uncollapse.metrics import uniformity_optimum

TAU = 0.5


def random_rows(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Population:
    """24 images with two views each, on the sphere. Both marginals of positive pairs are uniform on the 48 views."""

    def __init__(self) -> None:
        first = random_rows(24, 3, seed=0)
        second = first + 0.4 * random_rows(24, 3, seed=1)
        self.x = normalize(torch.cat([first, second]), dim=-1)
        self.y = self.x.roll(24, 0)
        positive = ((self.x * self.y).sum(-1) / TAU).exp()
        weights = (self.x @ self.x.T / TAU).exp()
        self.mean = weights.mean(1)  # E over negatives of exp(f(x⁻)·f(x)/τ), for each x
        self.limit = float((self.mean.log() - positive.log()).mean())
        # second-order expansion of log(mean of M draws + e^p/M): what M·bias tends to
        self.scaled_bias = float((positive / self.mean - weights.var(1, correction=0) / (2 * self.mean**2)).mean())

    def draws(self, count: int, seed: int) -> Tensor:
        index = torch.randint(48, (count,), generator=torch.Generator().manual_seed(seed))
        return self.x[index]

    def bias(self, m: int, repeats: int) -> float:
        """E InfoNCE(M) − log M − limit. The linear part of each draw has mean 0; without it little noise is left."""
        total = 0.0
        for r in range(repeats):
            negatives = self.draws(48 * m, seed=1000 * m + r).view(48, m, 3)
            value = info_nce(self.x, self.y, temperature=TAU, negatives=negatives)
            drawn = ((negatives @ self.x.unsqueeze(-1)).squeeze(-1) / TAU).exp().mean(1)
            total += float(value) - math.log(m) - self.limit - float((drawn / self.mean - 1).mean())
        return total / repeats


def slope(sizes: list[int], values: list[float]) -> float:
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def test_bias_falls_as_one_over_m_to_the_limit() -> None:
    population, sizes = Population(), [16, 32, 64, 128, 256, 512, 1024]
    biases = [population.bias(m, repeats=20) for m in sizes]
    assert min(biases) > 0
    assert slope(sizes, biases) == pytest.approx(-1, abs=0.15)
    assert biases[-1] * 1024 == pytest.approx(population.scaled_bias, rel=0.05)
    assert biases[-1] < 0.01


def exact_two_point_bias(m: int) -> float:
    """f(x) = ±1 with equal chance and f(y) = f(x): the number of equal negatives is binomial, so nothing is drawn."""
    same = torch.ones(1, 1, dtype=torch.float64)
    log_choose = [math.lgamma(m + 1) - math.lgamma(k + 1) - math.lgamma(m - k + 1) for k in range(m + 1)]
    expected = 0.0
    for k in range(m + 1):
        negatives = torch.cat([same.expand(k, 1), -same.expand(m - k, 1)])
        chance = math.exp(log_choose[k] - m * math.log(2))
        expected += chance * float(info_nce(same, same, temperature=TAU, negatives=negatives))
    limit = -1 / TAU + math.log(math.cosh(1 / TAU))
    return expected - math.log(m) - limit


def test_bias_falls_as_one_over_m_exactly() -> None:
    sizes = [16, 32, 64, 128, 256, 512, 1024]
    biases = [exact_two_point_bias(m) for m in sizes]
    assert slope(sizes, biases) == pytest.approx(-1, abs=0.01)
    mean, variance = math.cosh(1 / TAU), math.sinh(1 / TAU) ** 2
    constant = math.exp(1 / TAU) / mean - variance / (2 * mean**2)
    assert biases[-1] * 1024 == pytest.approx(constant, rel=2e-3)


def test_fluctuation_of_a_draw_falls_as_the_root_of_m() -> None:
    population, sizes = Population(), [64, 256, 1024, 4096]
    spreads = []
    for m in sizes:
        draws = [population.draws(m, seed=1000 * m + r) for r in range(200)]
        values = [info_nce(population.x[:1], population.y[:1], temperature=TAU, negatives=k).item() for k in draws]
        spreads.append(float(np.std(values)))
    assert slope(sizes, spreads) == pytest.approx(-0.5, abs=0.1)


def test_alignment_minimizes_the_first_term() -> None:
    for seed in range(5):
        x, y = random_rows(50, 4, seed=seed), random_rows(50, 4, seed=seed + 100)
        first_term = float(-(normalize(x, dim=-1) * normalize(y, dim=-1)).sum(-1).mean() / TAU)
        assert first_term == pytest.approx((float(align_loss(x, y)) / 2 - 1) / TAU, rel=1e-12)
        assert first_term > -1 / TAU
    assert align_loss(x, 3 * x).item() == pytest.approx(0, abs=1e-30)  # the minimum, −1/τ, is perfect alignment


def optimised(x: Tensor, objective: Callable[[Tensor], Tensor]) -> Tensor:
    x = x.clone().requires_grad_()
    descent = torch.optim.LBFGS([x], max_iter=300, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        descent.zero_grad()
        value = objective(x)
        value.backward()
        return value

    descent.step(closure)
    return x.detach()


def second_term(x: Tensor) -> Tensor:
    """E_x log E_x⁻ exp(f(x⁻)·f(x)/τ) over the rows of x: ContraNorm's loss but for log n."""
    return contra_uniform_loss(x, temperature=TAU) - math.log(x.shape[-2])


@pytest.mark.parametrize(("d", "n"), [(2, 16), (3, 60)])
@pytest.mark.parametrize("loss", ["second_term", "uniform_loss"])
def test_uniform_points_minimize_the_second_term(d: int, n: int, loss: str) -> None:
    """From a random start, descent reaches the uniform distribution's value: t = 1/(2τ) is the same optimum."""
    best = uniformity_optimum(d, 1 / (2 * TAU))
    if loss == "second_term":
        best, objective = best + 1 / TAU, second_term
    else:
        objective = lambda x: uniform_loss(x, 1 / (2 * TAU), exclude_self=False)  # noqa: E731
    reached = float(objective(optimised(random_rows(n, d, seed=3), objective)))
    assert reached == pytest.approx(best, abs=1e-6)
    assert reached >= best - 1e-12  # self pairs included: never below
    clustered = random_rows(n, d, seed=4) + 3 * torch.ones(d, dtype=torch.float64)
    others = [random_rows(n, d, seed=s) for s in range(100, 150)] + [clustered, torch.ones(n, d, dtype=torch.float64)]
    assert reached < min(float(objective(x)) for x in others) - 1e-3


def test_optimised_circle_is_the_regular_polygon() -> None:
    x = optimised(random_rows(12, 2, seed=5), lambda x: uniform_loss(x, 2.0))
    angle = torch.atan2(x[:, 1], x[:, 0]).sort().values
    gaps = torch.cat([angle.diff(), angle[:1] - angle[-1:] + 2 * math.pi])
    torch.testing.assert_close(gaps, torch.full_like(gaps, 2 * math.pi / 12), rtol=1e-4, atol=0)
