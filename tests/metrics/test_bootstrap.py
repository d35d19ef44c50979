"""Resampling, and the mean of a stream of which a sample is kept."""

import math
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import uncollapse as uc
from uncollapse.diagnosis.stats.scalar import VALUES, ScalarStats
from uncollapse.metrics import bootstrap
from uncollapse.metrics.bootstrap import Bootstrap, mean_interval


def test_blocks_add_up_and_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.cat(list(Bootstrap(level=0.5, draws=7, seed=5).draw_rows(11)))
    assert whole.shape == (7, 11)
    assert 0 <= int(whole.min()) <= int(whole.max()) <= 10
    monkeypatch.setattr(bootstrap, "BLOCK", 25)  # two draws at a time
    assert [len(block) for block in Bootstrap(level=0.5, draws=7, seed=5).draw_rows(11)] == [2, 2, 2, 1]


def test_ends_lean_the_other_way_than_the_draws() -> None:
    ratios = torch.tensor([-1.0, 0.0, 4.0])
    assert Bootstrap(0.99).ends(2.0, 0.1, ratios, (0.0, 4.0)) == pytest.approx((1.6, 2.1))
    assert Bootstrap(0.99).ends(2.0, 1.0, ratios, (0.0, 2.5)) == (0.0, 2.5)


def test_draws_that_say_nothing() -> None:
    asked = Bootstrap(0.9)
    assert asked.ends(2.0, 0.1, torch.tensor([math.nan]), (0.0, 4.0)) == (0.0, 4.0)
    assert asked.ends(2.0, 0.1, torch.tensor([math.inf, -1.0, math.nan]), (0.0, 4.0)) == pytest.approx((0.0, 2.1))
    assert asked.ends(2.0, 0.0, torch.tensor([math.inf]), (0.0, 4.0)) == (2.0, 2.0)


def test_the_value_is_never_outside() -> None:
    assert Bootstrap(0.5).ends(1.0, 1.0, torch.tensor([0.1, 0.2, 0.3]), (0.0, 4.0)) == pytest.approx((0.7, 1.0))


def test_a_sample_tells_the_shape_and_all_numbers_the_width() -> None:
    numbers = torch.rand(5 * VALUES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    spread, asked = ScalarStats(0), Bootstrap(draws=300)
    for part in numbers.split(1000):
        spread.update(part)
    found = spread.interval(1.0, asked)
    assert (found.value, found.rows) == (pytest.approx(float(numbers.mean()), rel=1e-12), 5 * VALUES)
    exact = mean_interval(numbers, float(numbers.mean()), float(numbers.std()), len(numbers), 1.0, asked)
    assert found.high - found.low == pytest.approx(exact.high - exact.low, rel=0.15)
    kept = mean_interval(numbers[:VALUES], 0.5, float(numbers.std()), VALUES, 1.0, asked)
    assert found.high - found.low == pytest.approx((kept.high - kept.low) / math.sqrt(5), rel=0.15)


def rows(n: int, d: int, seed: int = 0, lean: float = 0.0) -> Tensor:
    """Rows in float64, uniform on the sphere unless they lean to one side."""
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x[:, 0] += lean
    return x


def quantiles(ratios: list[float], level: float) -> tuple[float, float]:
    """The ends by rank, rounded outwards."""
    ordered, tail = sorted(ratios), (1 - level) / 2
    places = tail * (len(ordered) - 1), (1 - tail) * (len(ordered) - 1)
    return ordered[math.floor(places[0])], ordered[math.ceil(places[1])]


def naive_uniformity(x: Tensor, t: float, chosen: Tensor) -> tuple[float, float]:
    """Uniformity of the rows that were drawn, copies of one row never paired, and its standard error."""
    unit, n = normalize(x, dim=-1), len(chosen)
    around = [
        sum(math.exp(-t * float((unit[i] - unit[j]).square().sum())) for j in chosen if j != i) for i in chosen.tolist()
    ]
    pairs = sum(int(i != j) for i in chosen for j in chosen)
    mean = sum(around) / n
    first = sum(a**2 for a in around) / n / mean**2 - 1
    there = [math.exp(-t * float((a - b).square().sum())) for i, a in enumerate(unit) for b in unit[:i]]
    second = len(there) * sum(g**2 for g in there) / sum(there) ** 2 - 1
    return math.log(sum(around) / pairs), math.sqrt(4 * first / n + 2 * second / n**2)


@pytest.mark.parametrize("t", [0.5, 2.0])
def test_uniformity_is_that_of_loops(t: float) -> None:
    x, asked = rows(9, 3, lean=1.0), Bootstrap(0.8, 15, seed=3)
    value, error = naive_uniformity(x, t, torch.arange(9))
    drawn = [naive_uniformity(x, t, chosen) for block in asked.draw_rows(9) for chosen in block]
    least, most = quantiles([(u - value) / e for u, e in drawn], 0.8)
    found = uc.uniformity_interval(x, t, level=0.8, draws=15, seed=3)
    assert found.value == pytest.approx(float(uc.uniformity(x, t)))
    assert (found.low, found.high) == pytest.approx((value - error * most, value - error * least), rel=1e-9)
    assert (found.level, found.draws, found.rows) == (0.8, 15, 9)


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_alignment_is_that_of_loops(alpha: float) -> None:
    x, y, asked = rows(9, 3), rows(9, 3, seed=1, lean=2.0), Bootstrap(0.8, 15, seed=3)
    distances = (normalize(x, dim=-1) - normalize(y, dim=-1)).norm(dim=-1) ** alpha
    mean, deviation = float(distances.mean()), float(distances.std(correction=0))
    drawn = [distances[chosen] for block in asked.draw_rows(9) for chosen in block]
    least, most = quantiles([float((d.mean() - mean) / d.std(correction=0)) for d in drawn], 0.8)
    found = uc.alignment_interval(x, y, alpha, level=0.8, draws=15, seed=3)
    assert found.value == pytest.approx(float(uc.alignment(x, y, alpha)))
    assert (found.low, found.high) == pytest.approx((mean - deviation * most, mean - deviation * least))


def test_naive_resampling_misses_where_ours_holds() -> None:
    """Copies of a row count as pairs at distance 0 in a plain resample: its interval lies above the value."""
    x, generator = rows(200, 16), torch.Generator().manual_seed(0)
    plain = torch.stack([uc.uniformity(x[torch.randint(200, (200,), generator=generator)]) for _ in range(200)])
    optimum = uc.uniformity_optimum(16)
    assert float(plain.quantile(0.025)) > optimum + 0.05
    found = uc.uniformity_interval(x, draws=200)
    assert found.low < optimum < found.high


@pytest.mark.parametrize("lean", [0.0, 3.0])
def test_the_level_is_how_often_the_true_value_is_held(lean: float) -> None:
    """At the optimum, where intervals by plain quantiles of the draws hold it nearly always, and far from it."""
    truth = uc.uniformity_optimum(16) if lean == 0 else float(uc.uniformity(rows(8000, 16, seed=99, lean=lean)))
    for level, least, most in ((0.5, 0.4, 0.68), (0.95, 0.92, 1.0)):
        found = [uc.uniformity_interval(rows(60, 16, s, lean), level=level, draws=200, seed=s) for s in range(120)]
        assert least <= sum(one.low <= truth <= one.high for one in found) / len(found) <= most


def test_the_level_holds_for_skewed_distances() -> None:
    """Most pairs are close and some are far: an interval of mean ± 1.96 errors would hold the truth too rarely."""
    held = 0
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        apart = torch.empty(30, dtype=torch.float64).exponential_(8.0, generator=generator).clamp(max=2)
        cosine = 1 - apart / 2
        y = torch.stack([cosine, (1 - cosine**2).sqrt()], -1)
        found = uc.alignment_interval(torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand(30, 2), y, draws=300)
        held += found.low <= 0.125 <= found.high
    assert 0.915 <= held / 200 <= 0.985


def test_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = rows(50, 4, lean=1.0)
    whole = uc.uniformity_interval(x, draws=40)
    monkeypatch.setattr(bootstrap, "TILE", 16)
    tiled = uc.uniformity_interval(x, draws=40)
    assert (tiled.low, tiled.high) == pytest.approx((whole.low, whole.high), rel=1e-10)


def test_no_matrix_of_all_pairs(watched: AbstractContextManager[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "TILE", 128)
    with watched as sizes:
        bootstrap._weighted_sums(rows(1000, 4), 2.0, -2.0, torch.ones(5, 1000, dtype=torch.float64))
    assert sizes.largest <= 128 * 128


@pytest.mark.parametrize("n", [0, 1, 2])
def test_too_few_rows_say_nothing(n: int) -> None:
    found = uc.uniformity_interval(rows(n, 4), 1.5)
    assert (found.low, found.high, found.rows) == (-6.0, 0.0, n)
    assert found.value == float(uc.uniformity(rows(n, 4), 1.5))
    pairs = uc.alignment_interval(rows(n, 4), rows(n, 4, seed=1), 3.0)
    assert pairs.low <= pairs.value <= pairs.high
    assert (pairs.low, pairs.high) == (0.0, 8.0)


def test_collapse_is_sure() -> None:
    for x in (torch.ones(40, 5), torch.zeros(40, 5), rows(1, 5).expand(40, 5)):
        found = uc.uniformity_interval(x, draws=50)
        assert (found.value, found.low, found.high) == pytest.approx((0, 0, 0), abs=1e-6)
        pairs = uc.alignment_interval(x, x, draws=50)
        assert (pairs.value, pairs.low, pairs.high) == (0, 0, 0)


def test_equal_distances_are_sure_and_balanced_points_are_not() -> None:
    x = torch.eye(6).repeat(4, 1)
    pairs = uc.alignment_interval(x, x.roll(1, 0), draws=50)
    assert (pairs.low, pairs.high) == pytest.approx((2, 2), abs=1e-6)
    balanced = uc.uniformity_interval(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]).repeat(20, 1))  # each row sees the same
    assert balanced.high - balanced.low > 0.02


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_dtype_is_computed_alike(dtype: torch.dtype) -> None:
    x, y = rows(60, 8).to(dtype), rows(60, 8, seed=1).to(dtype)
    for found, exact in (
        (uc.uniformity_interval(x, draws=50), uc.uniformity_interval(x.double(), draws=50)),
        (uc.alignment_interval(x, y, draws=50), uc.alignment_interval(x.double(), y.double(), draws=50)),
    ):
        assert (found.value, found.low, found.high) == pytest.approx((exact.value, exact.low, exact.high), rel=1e-5)


def test_a_sharp_potential_does_not_underflow() -> None:
    found = uc.uniformity_interval(rows(30, 64), 500.0, draws=50)
    assert -2000 < found.low < found.value < found.high < -100


def test_seeds_and_the_random_state() -> None:
    state = torch.get_rng_state()
    x = rows(30, 4)
    first, again, other = (uc.uniformity_interval(x, draws=40, seed=s) for s in (0, 0, 1))
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), state)


def test_gap() -> None:
    assert uc.uniformity_gap(uc.uniformity_optimum(16, 3.0), 16, 3.0) == pytest.approx(0)
    assert uc.uniformity_gap(torch.tensor(0.0), 16) == 100
    assert uc.uniformity_gap(uc.uniformity_optimum(16) / 4, 16) == pytest.approx(75)
    assert uc.uniformity_gap(uc.uniformity_optimum(16) - 0.1, 16) < 0
    assert uc.uniformity_gap(2e-6, 16) == uc.uniformity_gap(1e-3, 16, 1000.0) == 100  # what rounding leaves of 0
    for bad in (0.5, 1e-3, math.nan):
        with pytest.raises(ValueError, match="at most"):
            uc.uniformity_gap(bad, 16)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"level": 0.0}, "level"),
        ({"level": 1.0}, "such as 0.95, got 1.0"),
        ({"level": 95}, "got 95"),
        ({"draws": 0}, "draws"),
        ({"draws": 1.5}, "draws"),
        ({"draws": 39}, "at least 40"),  # without a draw in each tail
        ({"level": 0.999}, "at least 2,000"),
    ],
)
def test_bad_options(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        uc.uniformity_interval(rows(5, 3), **options)
    with pytest.raises(ValueError, match=says):
        uc.alignment_interval(rows(5, 3), rows(5, 3), **options)


def test_bad_input() -> None:
    x = rows(5, 3)
    with pytest.raises(ValueError, match=r"\(2, 5, 3\)"):
        uc.uniformity_interval(x.expand(2, 5, 3))
    with pytest.raises(ValueError, match=r"\(n, d\)"):
        uc.alignment_interval(x[0], x[0])
    with pytest.raises(ValueError, match="same shape"):
        uc.alignment_interval(x, x[1:])
    for t in (0.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="positive"):
            uc.uniformity_interval(x, t)
    for alpha in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match="alpha"):
            uc.alignment_interval(x, x, alpha)
    with pytest.raises(ValueError, match="finite"):
        uc.uniformity_interval(x * math.nan)
    with pytest.raises(TypeError, match="floating-point"):
        uc.uniformity_interval(x.long())
