"""The loss with M negatives against all tuples of them, and against closed forms; slopes against known ones."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from uncollapse.errors import NotFiniteError, UsageError
from uncollapse.lab.experiments.sphere.infonce_limit import (
    Pair,
    Population,
    collapsed_terms,
    finite_pair,
    fit_slope,
    measure_curves,
    uniform_pair,
    uniform_terms,
)
from uncollapse.losses import info_nce
from uncollapse.metrics.hypersphere import uniformity_optimum


def views(n: int, dim: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    y = x + 0.5 * torch.randn(n, dim, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(x, dim=-1), torch.nn.functional.normalize(y, dim=-1)


def negatives_of(x: Tensor, y: Tensor, anchor: int) -> Tensor:
    """The views of all other pictures."""
    own = anchor % len(x)
    return torch.stack([view[at] for view in (x, y) for at in range(len(x)) if at != own])


def losses(x: Tensor, y: Tensor, anchor: int, count: int, temperature: float) -> Tensor:
    """The loss of an anchor with every tuple of so many negatives."""
    rows, partners = torch.cat([x, y]), torch.cat([y, x])
    there = negatives_of(x, y, anchor)
    found = [
        info_nce(rows[anchor : anchor + 1], partners[anchor : anchor + 1], temperature=temperature, negatives=chosen)
        for chosen in (there[list(tuple_)] for tuple_ in product(range(len(there)), repeat=count))
    ]
    return torch.stack(found)


@pytest.mark.parametrize("temperature", [0.2, 1.0])
def test_bias_and_fluctuation_are_those_over_all_tuples_of_negatives(temperature: float) -> None:
    x, y = views(3)
    population = Population(x, y, temperature)
    anchors = torch.arange(6)
    curves = measure_curves(population.pairs(anchors), 4, 2000, 0)
    assert curves.counts == (1, 2, 4)
    for at, count in enumerate(curves.counts):
        found = [losses(x, y, anchor, count, temperature) for anchor in range(6)]
        mean = float(torch.stack(found).mean()) - math.log(count)
        assert abs(population.terms().limit + curves.bias[at] - mean) < 4 * curves.error[at]
        deviation = float(torch.stack([each.var(correction=0) for each in found]).mean().sqrt())
        assert curves.fluctuation[at] == pytest.approx(deviation, rel=0.02)
    assert curves.error.max() < 0.01


def test_the_control_variate_leaves_the_mean_as_it_is() -> None:
    """Over all tuples, E log(c/M + r̄) = log(1 + c/M) + E[log(1 + u) − u] to the last digits."""
    values, positive, count = np.array([0.1, 0.4, 2.5]), 1.7, 3
    means = np.array([np.mean(chosen) for chosen in product(values, repeat=count)])
    own = positive / count

    def in_turn(_: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        return means[:, None].repeat(shape[1], 1)  # a mean of three as one negative of own weight

    found = measure_curves([Pair(own, 0.0, in_turn)], 1, len(means), 0)
    assert found.bias[0] == pytest.approx(float(np.log(own + means).mean()), abs=1e-13)
    assert found.variances[0, 0] == pytest.approx(float(np.log(own + means).var(ddof=1)))


def test_terms_against_loops() -> None:
    x, y = views(5)
    rows, partners = torch.cat([x, y]), torch.cat([y, x])
    logs = [float((negatives_of(x, y, at) @ rows[at] / 0.3).exp().mean().log()) for at in range(10)]
    terms = Population(x.float(), y.float(), 0.3).terms()
    assert terms.alignment == pytest.approx(-float((rows * partners).sum(-1).mean()) / 0.3, rel=1e-6)
    assert terms.uniformity == pytest.approx(sum(logs) / 10, rel=1e-6)
    assert terms.limit == terms.alignment + terms.uniformity


def test_pairs_of_a_population() -> None:
    x, y = views(4)
    population = Population(x, y, 0.5)
    (pair,) = population.pairs(torch.tensor([5]))  # the second view of picture 1
    weights = (negatives_of(x, y, 5) @ y[1] / 0.5).exp()
    ratios = weights / weights.mean()
    assert pair.positive == pytest.approx(float((x[1] @ y[1] / 0.5).exp() / weights.mean()))
    assert pair.variance == pytest.approx(float(ratios.var(correction=0)))
    drawn = pair.draw(np.random.default_rng(0), (4, 100))
    assert drawn.shape == (4, 100)
    assert np.unique(drawn.round(10)).tolist() == sorted(ratios.numpy().round(10).tolist())


def test_anchors_are_drawn_once() -> None:
    population = Population(*views(10), 0.5)
    chosen = population.anchors(7, 3)
    assert len(set(chosen.tolist())) == 7
    assert torch.equal(chosen, population.anchors(7, 3))
    assert sorted(population.anchors(100, 0).tolist()) == list(range(20))


@pytest.mark.parametrize("dim", [2, 3, 16])
def test_points_spread_evenly_have_the_closed_form(dim: int) -> None:
    terms = uniform_terms(dim, 0.5)
    assert terms.limit == pytest.approx(uniformity_optimum(dim, 1.0))
    pair = uniform_pair(dim, 0.5)
    drawn = pair.draw(np.random.default_rng(0), (100, 4000))
    assert float(drawn.mean()) == pytest.approx(1, abs=5 * math.sqrt(pair.variance / drawn.size))
    assert float(drawn.var()) == pytest.approx(pair.variance, rel=0.03)
    assert pair.positive == pytest.approx(math.exp(-uniformity_optimum(dim, 1.0)))
    directions = torch.nn.functional.normalize(
        torch.randn(200_000, dim, generator=torch.Generator().manual_seed(0)), dim=-1
    )
    assert float((directions[:, 0] / 0.5).exp().mean().log()) == pytest.approx(terms.uniformity, abs=0.01)


def test_a_large_even_population_has_nearly_the_closed_form() -> None:
    x = torch.nn.functional.normalize(torch.randn(2000, 4, generator=torch.Generator().manual_seed(1)), dim=-1)
    found, expected = Population(x, x, 0.5).terms(), uniform_terms(4, 0.5)
    assert found.alignment == pytest.approx(expected.alignment, rel=1e-6)
    assert found.uniformity == pytest.approx(expected.uniformity, abs=0.005)


def test_a_collapsed_encoder() -> None:
    """All points equal: the loss is log(1 + M), whatever the draw."""
    x = torch.eye(1, 5).expand(4, 5)
    population = Population(x, x, 0.1)
    assert population.terms().alignment == pytest.approx(collapsed_terms(0.1).alignment)
    assert population.terms().limit == pytest.approx(0, abs=1e-9)
    curves = measure_curves(population.pairs(torch.arange(8)), 256, 2, 0)
    np.testing.assert_allclose(curves.bias, np.log1p(1 / np.array(curves.counts)), rtol=1e-9)
    assert curves.fluctuation.max() < 1e-12
    found = curves.bias_slope(16)
    assert found is not None
    assert found.value == pytest.approx(-1, abs=0.03)
    assert fit_slope(curves.counts, np.zeros((8, len(curves.counts))), 16, root=True) is None


def test_both_rates() -> None:
    pair = uniform_pair(3, 0.5)
    curves = measure_curves([pair] * 40, 4096, 8, 0)
    bias, fluctuation = curves.bias_slope(64), curves.fluctuation_slope(64)
    assert bias is not None
    assert fluctuation is not None
    assert bias.value == pytest.approx(-1, abs=0.01)
    assert bias.low < bias.value < bias.high < -0.97
    assert fluctuation.value == pytest.approx(-0.5, abs=0.03)
    assert fluctuation.low < -0.5 < fluctuation.high
    expected = pair.positive - pair.variance / 2
    assert abs(4096 * curves.bias[-1] - expected) < 4 * 4096 * curves.error[-1] + expected**2 / 4096
    assert curves.fluctuation[-1] * 64 == pytest.approx(math.sqrt(pair.variance), rel=0.1)


def test_the_seed_decides() -> None:
    pair = finite_pair(1.0, np.array([0.5, 1.5]))
    one, two, other = (measure_curves([pair], 8, 3, seed).bias for seed in (0, 0, 1))
    assert one.tolist() == two.tolist()
    assert one.tolist() != other.tolist()


def test_slope_of_a_power() -> None:
    counts = (1, 2, 4, 8, 16)
    powers = np.array([[factor / count**1.5 for count in counts] for factor in (1.0, 2.0, 4.0)])
    for values in (powers, -powers):
        found = fit_slope(counts, values, 1)
        assert found is not None
        assert (found.value, found.low, found.high) == pytest.approx((-1.5, -1.5, -1.5))
    halved = fit_slope(counts, powers, 1, root=True)
    assert halved is not None
    assert halved.value == pytest.approx(-0.75)
    bent = powers.copy()
    bent[0, 0] = 100.0
    cut = fit_slope(counts, bent, 2)
    assert cut is not None
    assert cut.value == pytest.approx(-1.5)
    assert fit_slope(counts, powers - powers[:, 2:3], 1) is None  # it changes its sign


def test_the_interval_is_a_jackknifes() -> None:
    counts = (1, 2, 4)
    values = np.random.default_rng(0).uniform(1, 2, (6, 3))

    def fitted(rows: np.ndarray) -> float:
        return float(np.polyfit(np.log(counts), np.log(rows.mean(0)), 1)[0])

    without = np.array([fitted(np.delete(values, at, 0)) for at in range(6)])
    error = math.sqrt(5 / 6 * ((without - without.mean()) ** 2).sum())
    found = fit_slope(counts, values, 1)
    assert found is not None
    assert found.value == pytest.approx(fitted(values))
    assert found.high - found.value == pytest.approx(2 * error)


def test_what_cannot_be() -> None:
    x, y = views(3)
    with pytest.raises(UsageError, match=r"\(1, 3\)"):
        Population(x[:1], y[:1], 0.5)
    with pytest.raises(UsageError, match="got shapes"):
        Population(x, y[:2], 0.5)
    with pytest.raises(NotFiniteError):
        Population(x, y * math.nan, 0.5)
    with pytest.raises(UsageError, match="2 dimensions"):
        uniform_pair(1, 0.5)
    with pytest.raises(UsageError, match="negatives"):
        fit_slope((1, 2, 4), np.ones((2, 3)), 4)
