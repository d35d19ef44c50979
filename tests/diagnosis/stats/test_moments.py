"""Moments and Reservoir against the stacked rows, for any split into batches and any tree of merges."""

import math
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from scipy.stats import chi2
from tests.diagnosis.stats.random_merges import merge_in_some_order
from torch import Tensor

from uncollapse.diagnosis.stats.moments import Moments
from uncollapse.diagnosis.stats.reservoir import Reservoir
from uncollapse.diagnosis.stats.streaming import CHUNK
from uncollapse.metrics import similarity, spectrum

SUMS = ("sum", "gram", "unit_sum")
DERIVED = ("mean", "variance", "covariance", "spectrum", "effective_rank", "stable_rank", "participation_ratio")
DERIVED += ("mean_cosine", "feature_correlation", "outlier_share")


def tokens(n: int, d: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Correlated rows with a mean, so that centring and correlation matter."""
    generator = torch.Generator().manual_seed(seed)
    mix, shift = torch.randn(d, d, generator=generator), torch.randn(d, generator=generator)
    return (torch.randn(n, d, generator=generator) @ mix + shift).to(dtype)


def moments_of(*batches: Tensor, dim: int | None = None) -> Moments:
    moments = Moments(dim or batches[0].shape[-1])
    for batch in batches:
        moments.update(batch)
    return moments


def distance(a: Moments, b: Moments) -> float:
    """The largest difference of a sum, relative to its norm."""
    assert (a.count, a.unit_count) == (b.count, b.unit_count)
    return max(float((getattr(a, s) - getattr(b, s)).norm() / getattr(b, s).norm()) for s in SUMS)


@st.composite
def batch_sizes(draw, total: int) -> list[int]:
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=8)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


# --- the sums


def test_sums_equal_loops_over_rows():
    x = tokens(37, 5)
    x[4] = 0
    moments = moments_of(x)
    total, gram, unit = torch.zeros(5).double(), torch.zeros(5, 5).double(), torch.zeros(5).double()
    for row in x:
        total += row
        gram += torch.outer(row, row)
        if row.norm() > 0:
            unit += row / row.norm()
    assert (moments.count, moments.unit_count) == (37, 36)
    for ours, naive in ((moments.sum, total), (moments.gram, gram), (moments.unit_sum, unit)):
        assert ours.dtype == torch.float64
        torch.testing.assert_close(ours, naive, rtol=1e-13, atol=1e-13)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_split_and_merge_tree_is_exact_on_integers(data):
    x = torch.randint(-1000, 1000, (60, 3), generator=torch.Generator().manual_seed(1)).float()
    whole = moments_of(x)
    parts = [moments_of(batch) for batch in x.split(data.draw(batch_sizes(60)))]
    merged = merge_in_some_order(parts, data.draw)
    assert (merged.count, merged.unit_count) == (whole.count, whole.unit_count)
    assert torch.equal(merged.sum, whole.sum)
    assert torch.equal(merged.gram, whole.gram)
    assert torch.equal(merged.gram, (x.double().mT @ x.double()))
    assert distance(merged, whole) <= 1e-15


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_split_and_merge_tree_is_close_on_reals(data):
    x = tokens(200, 4)
    whole = moments_of(x)
    parts = [moments_of(batch) for batch in x.split(data.draw(batch_sizes(200)))]
    merged = merge_in_some_order(parts, data.draw)
    assert distance(merged, whole) <= 1e-13
    one, other = merged.state(), reduce(Moments.merge, parts).state()
    if len(parts) > 1:
        assert all(torch.equal(one[name], other[name]) for name in SUMS)  # to the last bit


def test_merge_is_commutative_to_the_last_bit_and_leaves_its_parts_alone():
    a, b = moments_of(tokens(50, 6, seed=1)), moments_of(tokens(70, 6, seed=2))
    before = a.state(), b.state()
    ab, ba, plus = a.merge(b), b.merge(a), a + b
    for name in SUMS:
        assert torch.equal(ab.state()[name], ba.state()[name])
        assert torch.equal(ab.state()[name], plus.state()[name])
        assert torch.equal(a.state()[name], before[0][name])
        assert torch.equal(b.state()[name], before[1][name])
    ab.update(tokens(3, 6))
    assert a.count == 50
    assert torch.equal(a.sum, before[0]["sum"][0])


def test_merging_with_empty_moments_changes_nothing():
    a = moments_of(tokens(9, 3))
    for merged in (a + Moments(3), Moments(3) + a):
        assert merged.count == 9
        assert all(torch.equal(getattr(merged, s), getattr(a, s)) for s in SUMS)


def test_many_small_updates_are_as_good_as_the_exact_sum():
    x = tokens(20_000, 2)
    x[:, 0] += 1e4
    moments = moments_of(*x.split(5))
    exact = math.fsum(x[:, 0].tolist()), math.fsum(v * v for v in x[:, 0].tolist())
    assert float(moments.sum[0]) == pytest.approx(exact[0], rel=4e-16)
    assert float(moments.gram[0, 0]) == pytest.approx(exact[1], rel=4e-16)


def test_what_rounding_took_survives_updates_and_merges():
    one, tiny = torch.ones(1, 1).double(), torch.full((1, 1), 2.0**-60).double()
    first, second = moments_of(one, tiny), moments_of(-one)
    assert float(first.sum) == 1
    for moments in (first + second, second + first, moments_of(one, tiny, -one)):
        assert float(moments.sum) == 2.0**-60


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_dtypes_are_cast_and_not_rounded(dtype):
    x = tokens(80, 4).to(dtype)
    assert distance(moments_of(x), moments_of(x.double())) == 0


def test_all_leading_dimensions_are_rows():
    x = tokens(24, 4)
    whole = moments_of(x)
    assert distance(moments_of(x.reshape(2, 3, 4, 4)), whole) == 0
    assert distance(moments_of(*x), whole) <= 1e-15
    assert distance(moments_of(x.mT.contiguous().mT), whole) <= 1e-15


def test_mask_deletes_rows_whatever_they_hold():
    x = tokens(3 * CHUNK, 3).reshape(3, CHUNK, 3)
    mask = torch.rand(3, CHUNK, generator=torch.Generator().manual_seed(0)) > 0.3
    mask[1] = False
    dirty = x.masked_fill(~mask[..., None], torch.nan)
    moments = Moments(3)
    moments.update(dirty, mask)
    assert distance(moments, moments_of(x[mask])) <= 1e-14
    moments.update(dirty[:, 0], torch.zeros(3, dtype=torch.bool))
    assert moments.count == int(mask.sum())


def test_rows_may_require_gradients_and_may_be_absent():
    moments = moments_of(tokens(5, 3).requires_grad_(), torch.zeros(0, 3), torch.zeros(2, 0, 3))
    assert moments.count == 5
    assert not moments.gram.requires_grad


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e141])
def test_bad_entries_are_refused_and_nothing_is_added(bad):
    moments = moments_of(tokens(10, 3))
    before = moments.state()
    x = tokens(2 * CHUNK + 5, 3)
    x[-1, 1] = bad
    x[3, 2] = bad
    with pytest.raises(ValueError, match="2 of"):
        moments.update(x)
    after = moments.state()
    assert (after["count"], after["unit_count"]) == (before["count"], before["unit_count"])
    assert all(torch.equal(after[s], before[s]) for s in SUMS)


def test_infinity_is_refused_in_half_precision():
    with pytest.raises(ValueError, match="1 of"):
        Moments(2).update(torch.tensor([[65504.0, torch.inf]], dtype=torch.float16))
    assert moments_of(torch.tensor([[65504.0, -65504.0]], dtype=torch.float16)).count == 1


def test_bad_arguments():
    moments = Moments(3)
    with pytest.raises(TypeError, match="int64"):
        moments.update(torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"\(3, 2\)"):
        moments.update(torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"got \(\)"):
        moments.update(torch.tensor(1.0))
    with pytest.raises(TypeError, match="bool"):
        moments.update(torch.zeros(2, 3), torch.ones(2))
    with pytest.raises(ValueError, match="mask"):
        moments.update(torch.zeros(2, 3), torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="same dim"):
        moments.merge(Moments(4))
    with pytest.raises(TypeError):
        moments + 1
    for dim in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="dim"):
            Moments(dim)
    with pytest.raises(ValueError, match="k must"):
        moments_of(tokens(4, 3)).outlier_share(0)
    assert moments.count == 0


@pytest.mark.parametrize("name", DERIVED)
def test_nothing_is_derived_from_no_rows(name):
    with pytest.raises(ValueError, match="no rows"):
        getattr(Moments(3), name)()


# --- what is derived from them


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("shape", [(300, 7), (5, 12), (1, 4), (2, 1)])
def test_spectrum_and_ranks_equal_those_of_the_stacked_rows(shape, center):
    x = tokens(*shape)
    moments = moments_of(*x.split(3))
    stacked = x - x.mean(0) if center else x
    sigma = torch.linalg.svdvals(stacked)
    scale = float(torch.linalg.svdvals(x)[0])
    sigma = torch.where(sigma > 1e-12 * scale, sigma, 0.0)
    torch.testing.assert_close(moments.spectrum(center), sigma, rtol=1e-11, atol=1e-13 * scale)
    for name in ("effective_rank", "stable_rank", "participation_ratio"):
        ours = getattr(moments, name)(center)
        torch.testing.assert_close(ours, getattr(spectrum, name)(x, center=center), rtol=1e-11, atol=0)
    if sigma[0] > 0:
        p = sigma / sigma.sum()
        naive = math.exp(-sum(float(v) * math.log(v) for v in p if v > 0))
        assert float(moments.effective_rank(center)) == pytest.approx(naive, rel=1e-11)
        assert float(moments.stable_rank(center)) == pytest.approx(float((sigma**2).sum() / sigma[0] ** 2), rel=1e-11)
        ratio = float((sigma**2).sum() ** 2 / (sigma**4).sum())
        assert float(moments.participation_ratio(center)) == pytest.approx(ratio, rel=1e-11)


def test_mean_variance_and_covariance():
    x = tokens(150, 4)
    moments = moments_of(*x.split(40))
    torch.testing.assert_close(moments.mean(), x.mean(0), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(moments.variance(), x.var(0, correction=0), rtol=1e-13, atol=0)
    torch.testing.assert_close(moments.covariance(), x.mT.cov(correction=0), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(moments.covariance(center=False), x.mT @ x / 150, rtol=1e-13, atol=1e-13)


def test_mean_cosine_equals_the_loop_over_pairs():
    x = tokens(20, 3)
    x[[3, 11]] = 0
    pairs = [(i, j) for i in range(20) for j in range(20) if i != j]
    naive = sum(float(torch.cosine_similarity(x[i], x[j], dim=0)) for i, j in pairs) / len(pairs)
    moments = moments_of(*x.split(6))
    assert float(moments.mean_cosine()) == pytest.approx(naive, rel=1e-12)
    torch.testing.assert_close(moments.mean_cosine(), similarity.mean_cosine(x), rtol=1e-12, atol=0)


def test_feature_correlation_equals_the_loop_over_features():
    x = tokens(60, 5)
    x[:, 2] = 0.3
    moments = moments_of(*x.split(7))
    total = 0.0
    for i in range(5):
        for j in range(5):
            if i != j and 2 not in (i, j):
                total += abs(float(torch.corrcoef(x[:, [i, j]].mT)[0, 1]))
    assert float(moments.variance()[2]) == 0
    assert float(moments.feature_correlation()) == pytest.approx(total / 20, rel=1e-12)
    torch.testing.assert_close(moments.feature_correlation(), similarity.feature_correlation(x), rtol=1e-12, atol=0)


@pytest.mark.parametrize("k", [1, 3, 9])
def test_outlier_share_equals_the_sorted_variances(k):
    x = tokens(50, 6)
    x[:, 4] *= 30
    largest = sorted(x.var(0, correction=0).tolist(), reverse=True)
    ours = moments_of(*x.split(11)).outlier_share(k)
    assert float(ours) == pytest.approx(sum(largest[:k]) / sum(largest), rel=1e-12)
    torch.testing.assert_close(ours, similarity.outlier_share(x, k=k), rtol=1e-12, atol=0)


@pytest.mark.parametrize("batch", [1, 32, CHUNK, 16 * CHUNK])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identical_rows_have_no_variance_in_any_stream(batch, dtype):
    row, count = tokens(1, 24, dtype=dtype), max(4096, batch)
    moments = Moments(24)
    for _ in range(count // batch):
        moments.update(row.expand(batch, 24))
    assert moments.count == count
    for name in ("effective_rank", "stable_rank", "participation_ratio"):
        assert float(getattr(moments, name)()) == pytest.approx(1, rel=1e-12)
        assert float(getattr(moments, name)(center=True)) == 0
    assert torch.equal(moments.variance(), torch.zeros(24).double())
    assert float(moments.feature_correlation()) == 0
    assert float(moments.outlier_share()) == 0
    assert float(moments.mean_cosine()) == pytest.approx(1, rel=1e-12)


def test_zero_rows_and_one_row_give_zeros_and_no_nan():
    zero = moments_of(torch.zeros(7, 3))
    assert zero.unit_count == 0
    for name in DERIVED:
        assert torch.count_nonzero(getattr(zero, name)()) == 0
    one = moments_of(tokens(1, 3))
    assert float(one.mean_cosine()) == 0
    assert float(one.feature_correlation()) == 0
    assert float(one.effective_rank()) == 1
    assert one.spectrum().shape == (1,)


@pytest.mark.parametrize("scale", [1e-130, 1e130])
def test_ranks_do_not_depend_on_the_scale(scale):
    x = tokens(40, 4)
    plain, scaled = moments_of(x), moments_of(x * scale)
    for name in ("effective_rank", "stable_rank", "participation_ratio", "mean_cosine", "feature_correlation"):
        torch.testing.assert_close(getattr(scaled, name)(), getattr(plain, name)(), rtol=1e-12, atol=0)


def test_singular_values_are_resolved_at_condition_1e6_and_zero_beyond_the_noise():
    generator = torch.Generator().manual_seed(0)
    u = torch.linalg.qr(torch.randn(500, 64, dtype=torch.float64, generator=generator)).Q
    v = torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64, generator=generator)).Q
    sigma = torch.logspace(0, -6, 64, dtype=torch.float64)
    resolved = moments_of(*(u * sigma @ v.mT).split(50))
    torch.testing.assert_close(resolved.spectrum(), sigma, rtol=1e-3, atol=0)
    torch.testing.assert_close(resolved.spectrum()[:40], sigma[:40], rtol=1e-7, atol=0)
    p = sigma / sigma.sum()
    assert float(resolved.effective_rank()) == pytest.approx(float((-p * p.log()).sum().exp()), rel=1e-6)
    sigma[20:] = 1e-9
    lost = moments_of(*(u * sigma @ v.mT).split(50))
    assert torch.count_nonzero(lost.spectrum()) == 20


def hard_rows(kind: str) -> Tensor:
    x = tokens(3 * CHUNK, 150)
    if kind == "condition 1e6":
        return torch.linalg.qr(x).Q * torch.logspace(0, -6, 150, dtype=torch.float64)
    if kind == "large mean":
        return x / x.std() + 300
    if kind == "tiny tail":
        return x * torch.where(torch.arange(150) < 140, 1.0, 1e-5)
    x[::3] = 0
    return x


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["condition 1e6", "large mean", "tiny tail", "zero rows"])
def test_sums_of_hard_rows_are_those_in_extended_precision(kind, dtype):
    x = hard_rows(kind).to(dtype)
    moments, exact = moments_of(*x.split(2500)), x.double().numpy().astype("longdouble")
    gram = torch.from_numpy((exact.T @ exact).astype("float64"))
    size = gram.diagonal().sqrt()
    assert float(((moments.gram - gram) / size / size[:, None].clamp(min=1e-300)).abs().max()) < 1e-14
    torch.testing.assert_close(moments.sum, torch.from_numpy(exact.sum(0).astype("float64")), rtol=1e-13, atol=1e-12)
    assert moments.unit_count == int((x != 0).any(-1).sum())


def test_centring_cancels_as_documented():
    x = tokens(1000, 3)
    for offset in (1e2, 1e4):
        moments = moments_of(*(x + offset).split(100))
        expected = (x + offset).var(0, correction=0)
        error = float(((moments.variance() - expected) / expected).abs().max())
        assert error <= 1e-15 * float((offset**2 / expected).max()) + 1e-14


# --- storage


def test_state_survives_safetensors_and_can_be_continued():
    x = tokens(90, 4)
    moments = moments_of(*x[:50].split(7))
    stored = {name: torch.as_tensor(value) for name, value in moments.state().items()}
    loaded = Moments.from_state(load(save(stored)))
    for one in (moments, loaded):
        one.update(x[50:])
    assert (loaded.count, loaded.unit_count) == (90, 90)
    assert all(torch.equal(loaded.state()[s], moments.state()[s]) for s in SUMS)
    assert repr(loaded) == "Moments(dim=4, count=90)"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("count", -1),
        ("count", 2.5),
        ("count", 3),  # fewer than unit_count
        ("sum", torch.zeros(4).double()),
        ("sum", 0),
        ("gram", torch.zeros(2, 4, 3).double()),
        ("gram", torch.zeros(2, 4, 4)),
        ("gram", -torch.eye(4).double().expand(2, 4, 4)),
        ("unit_sum", torch.full((2, 4), torch.nan).double()),
        ("other", 1),
    ],
)
def test_a_wrong_state_of_moments_is_refused(name, value):
    state = moments_of(tokens(9, 4)).state()
    with pytest.raises(ValueError, match=name):
        Moments.from_state({**state, name: value})


def test_states_of_two_and_of_three_numbers_are_read():
    a, b, c = (moments_of(tokens(50, 4, seed=seed)) for seed in range(3))
    assert [len(one.state()["gram"]) for one in (a, a + b)] == [2, 3]  # two is what earlier versions wrote
    for one in (a, a + b):
        again = Moments.from_state(one.state())
        assert all(torch.equal((again + c).state()[name], (one + c).state()[name]) for name in SUMS)
    for wrong in (torch.zeros(1, 4), torch.zeros(4, 4)):
        with pytest.raises(ValueError, match="2 to 3"):
            Moments.from_state({**a.state(), "unit_sum": wrong.double()})


def test_a_state_is_a_copy():
    moments = moments_of(tokens(9, 4))
    state = moments.state()
    kept = {name: state[name].clone() for name in SUMS}
    Moments.from_state(state).update(tokens(2, 4))
    moments.update(tokens(2, 4))
    assert all(torch.equal(state[name], kept[name]) for name in SUMS)


# --- the reservoir


def numbered(n: int, d: int = 1) -> Tensor:
    """Rows that say which they are."""
    return torch.arange(n, dtype=torch.float32)[:, None].expand(n, d).contiguous()


def sample_of(*batches: Tensor, size: int, seed: int) -> Reservoir:
    reservoir = Reservoir(size, batches[0].shape[-1], seed)
    for batch in batches:
        reservoir.update(batch)
    return reservoir


def uniformity_p_value(samples: list[Tensor], n: int) -> float:
    """Chi-square test that each of n rows is as often in a sample; inclusions of a sample are negatively correlated."""
    size = len(samples[0])
    seen = torch.bincount(torch.cat(samples).long().flatten(), minlength=n).double()
    expected = len(samples) * size / n
    statistic = float(((seen - expected) ** 2).sum() / (expected * (1 - size / n)) * (n - 1) / n)
    return float(chi2.sf(statistic, n - 1))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_sample_does_not_depend_on_batch_sizes(data):
    x = tokens(300, 2, dtype=torch.float32)
    whole = sample_of(x, size=20, seed=5)
    split = sample_of(*x.split(data.draw(batch_sizes(300))), size=20, seed=5)
    assert split.count == whole.count == 300
    assert torch.equal(split.rows, whole.rows)


def test_the_sample_does_not_depend_on_chunks():
    x = numbered(3 * CHUNK + 17)
    whole = sample_of(x, size=2 * CHUNK, seed=5)
    assert torch.equal(whole.rows, sample_of(*x.split(100), size=2 * CHUNK, seed=5).rows)
    assert len(whole.rows.unique()) == 2 * CHUNK


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_merge_tree_gives_the_same_sample(data):
    parts = [sample_of(batch, size=12, seed=seed) for seed, batch in enumerate(numbered(100).split([40, 3, 0, 30, 27]))]
    left = reduce(Reservoir.merge, parts)
    tree = merge_in_some_order(parts, data.draw)
    assert tree.count == 100
    assert tree.seeds == frozenset(range(5))
    assert torch.equal(tree.rows, left.rows)
    for one in (left, tree):
        one.update(numbered(200)[100:])
    assert torch.equal(tree.rows, left.rows)


def test_samples_are_uniform_and_so_are_their_merges():
    x = numbered(40)
    single = [sample_of(*x.split(9), size=10, seed=s).rows for s in range(1500)]
    backwards = [sample_of(*x.flip(0).split(9), size=10, seed=s).rows for s in range(1500)]
    merged = [
        sample_of(x[:7], size=10, seed=2 * s).merge(sample_of(x[7:], size=10, seed=2 * s + 1)).rows for s in range(1500)
    ]
    for samples in (single, backwards, merged):
        assert all(len(rows.unique()) == 10 for rows in samples)
        assert 0.01 < uniformity_p_value(samples, 40) < 0.99


def test_pairs_of_rows_are_sampled_together_as_often_as_they_should_be():
    x = numbered(8)
    together = torch.zeros(8, 8)
    for s in range(2000):
        rows = sample_of(x[:3], size=3, seed=2 * s).merge(sample_of(x[3:], size=3, seed=2 * s + 1)).rows
        index = rows.long().flatten()
        together[index[:, None], index] += 1
    pairs = together[torch.triu_indices(8, 8, 1).unbind()]
    expected = 2000 * (3 * 2) / (8 * 7)
    deviation = (pairs - expected) / math.sqrt(expected * (1 - expected / 2000))
    assert float(deviation.abs().max()) < 3.5


def test_a_test_of_uniformity_would_notice_a_biased_sample():
    x = numbered(40)
    biased = [
        torch.cat([sample_of(x[:20], size=6, seed=s).rows, sample_of(x[20:], size=4, seed=s).rows]) for s in range(500)
    ]
    assert uniformity_p_value(biased, 40) < 1e-6


def test_short_streams_are_kept_whole():
    x = tokens(5, 3, dtype=torch.float32)
    reservoir = sample_of(x, size=8, seed=0)
    assert torch.equal(reservoir.rows.sort(0).values, x.sort(0).values)
    empty = Reservoir(8, 3)
    assert empty.rows.shape == (0, 3)
    assert empty.count == 0
    assert torch.equal(empty.merge(sample_of(x, size=8, seed=1)).rows.sort(0).values, x.sort(0).values)


def test_masked_rows_are_no_part_of_the_stream():
    x = tokens(3 * CHUNK, 2, dtype=torch.float32).reshape(3, CHUNK, 2)
    mask = torch.rand(3, CHUNK, generator=torch.Generator().manual_seed(0)) > 0.4
    reservoir = Reservoir(30, 2, seed=3)
    reservoir.update(x.masked_fill(~mask[..., None], torch.nan), mask)
    deleted = sample_of(x[mask], size=30, seed=3)
    assert reservoir.count == deleted.count == int(mask.sum())
    assert torch.equal(reservoir.rows, deleted.rows)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rows_of_other_dtypes_come_back_as_float32(dtype):
    x = tokens(50, 3).to(dtype)
    reservoir = sample_of(x.clone().requires_grad_(), size=6, seed=2)
    assert reservoir.rows.dtype == torch.float32
    assert not reservoir.rows.requires_grad
    assert torch.equal(reservoir.rows, sample_of(x.float(), size=6, seed=2).rows)


def test_rows_are_copies():
    x = numbered(4)
    reservoir = sample_of(x, size=4, seed=0)
    before = reservoir.rows.clone()
    x += 1
    assert torch.equal(reservoir.rows, before)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e39])
def test_bad_entries_leave_the_reservoir_unchanged(bad):
    x = tokens(2 * CHUNK, 2)
    broken = x.clone()
    broken[-1, 0] = bad
    reservoir, untouched = Reservoir(9, 2), Reservoir(9, 2)
    with pytest.raises(ValueError, match="1 of"):
        reservoir.update(broken)
    assert reservoir.count == 0
    for one in (reservoir, untouched):
        one.update(x)
    assert torch.equal(reservoir.rows, untouched.rows)


def test_rows_that_vanish_in_float32_are_counted_among_real_rows():
    x = torch.full((10, 2), 1e-50, dtype=torch.float64)
    with pytest.raises(ValueError, match="3 of 4"):
        Reservoir(9, 2).update(x.index_fill(0, torch.tensor(3), 0.0), torch.arange(10) < 4)


def test_bad_arguments_of_a_reservoir():
    with pytest.raises(ValueError, match="size"):
        Reservoir(0, 3)
    with pytest.raises(ValueError, match="dim"):
        Reservoir(3, 0)
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match="seed"):
            Reservoir(3, 3, seed=seed)
    with pytest.raises(ValueError, match=r"\(\.\.\., 3\)"):
        Reservoir(3, 3).update(torch.zeros(2, 4))
    with pytest.raises(ValueError, match="same size"):
        Reservoir(3, 3, seed=0).merge(Reservoir(4, 3, seed=1))
    with pytest.raises(ValueError, match="same size"):
        Reservoir(3, 3, seed=0).merge(Reservoir(3, 4, seed=1))
    with pytest.raises(ValueError, match="seeds"):
        Reservoir(3, 3, seed=7).merge(Reservoir(3, 3, seed=1)).merge(Reservoir(3, 3, seed=7))


def test_a_reservoir_survives_safetensors_and_can_be_continued():
    x = tokens(400, 2, dtype=torch.float32)
    whole = sample_of(x, size=15, seed=4)
    half = sample_of(x[:150], size=15, seed=4)
    stored = {name: torch.as_tensor(value) for name, value in half.state().items()}
    loaded = Reservoir.from_state(load(save(stored)))
    loaded.update(x[150:])
    assert torch.equal(loaded.rows, whole.rows)
    assert loaded.seeds == {4}
    assert repr(loaded) == "Reservoir(size=15, dim=2, count=400)"


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("size", 0, "size"),
        ("count", -3, "count"),
        ("count", 2, "rows"),  # fewer than there are rows
        ("rows", torch.zeros(5, 2).double(), "rows"),
        ("rows", torch.full((5, 2), torch.nan), "rows"),
        ("priorities", torch.zeros(4).double(), "priorities"),
        ("priorities", torch.ones(5).double(), "priorities"),
        ("seeds", torch.tensor([], dtype=torch.long), "seeds"),
        ("seeds", torch.tensor([-1]), "seeds"),
        ("generator", torch.zeros(3, dtype=torch.uint8), "generator"),
        ("other", 1, "other"),
    ],
)
def test_a_wrong_state_of_a_reservoir_is_refused(name, value, match):
    state = sample_of(tokens(9, 2), size=5, seed=0).state()
    with pytest.raises(ValueError, match=match):
        Reservoir.from_state({**state, name: value})
