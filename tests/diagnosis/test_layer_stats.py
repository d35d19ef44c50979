"""LayerStats of parts of the batches, merged, equal those of all batches."""

import pickle

import pytest
import torch
from torch import Tensor

import uncollapse as uc
from uncollapse.backbones.sites import Context
from uncollapse.diagnosis.layer_stats import LayerStats, StatsConfig
from uncollapse.diagnosis.result import Layer
from uncollapse.metrics import robust

OF_ALL = ("mean_cosine", "dataset_rank", "feature_correlation", "outlier_share", "pooled_cosine", "alignment")
CONFIG = {"rank_samples": 8, "all_tokens": True}


def batches(count: int = 6) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tokens, their mask, and a second view of them."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        x = torch.randn(4, 9, 5, generator=generator) + 0.5
        mask = torch.rand(4, 9, generator=generator) > 0.2
        found.append((x, mask, x + 0.1 * torch.randn(x.shape, generator=generator)))
    return found


def stats_of(data: list[tuple[Tensor, Tensor, Tensor]], seed: int) -> LayerStats:
    stats = LayerStats(StatsConfig(seed=seed, **CONFIG))
    for x, mask, second in data:
        stats.update(x, mask, Context(mask))
        stats.pool(x, mask)
        stats.pair(second, mask)
    return stats


def layer(stats: LayerStats) -> Layer:
    return stats.layer("block 0", "block", "blocks.0")


def test_merged_gauges_measure_what_one_would() -> None:
    data = batches()
    whole = layer(stats_of(data, 0))
    parts = [stats_of(data[:2], 0), stats_of(data[2:3], 1), stats_of(data[3:], 2)]
    merged = layer(parts[0].merge(parts[1]).merge(parts[2]))
    assert (merged.tokens, merged.dim, merged.heatmap) == (whole.tokens, whole.dim, whole.heatmap)
    assert merged.measures.keys() == whole.measures.keys()
    for name in OF_ALL:
        assert merged[name] == pytest.approx(whole[name], rel=1e-12), name
    for name in ("effective_rank", "robust_cosine", "rank_share", "token_variance"):  # every set was taken
        found, expected = merged.measures[name], whole.measures[name]
        assert found.count == expected.count
        assert found.quantiles == pytest.approx(expected.quantiles, rel=1e-6)
        assert (found.mean, found.std) == pytest.approx((expected.mean, expected.std), rel=1e-9)


def test_any_order_and_nesting_gives_the_same() -> None:
    data = batches()
    a, b, c, empty = (
        stats_of(data[:2], 3),
        stats_of(data[2:3], 1),
        stats_of(data[3:], 2),
        LayerStats(StatsConfig(seed=7, **CONFIG)),
    )
    expected = layer(a.merge(b).merge(c).merge(empty))
    for other in (c.merge(b.merge(a)), empty.merge(b).merge(a.merge(c)), b.merge(empty.merge(c.merge(a)))):
        assert layer(other) == expected
    again = pickle.loads(pickle.dumps(a))
    assert layer(again.merge(b).merge(c)) == expected
    assert (a.sets, a.merge(b).sets, a.merge(b).config.seed) == (8, 12, 1)


def test_merging_leaves_the_parts_alone() -> None:
    data = batches()
    a, empty = stats_of(data[:2], 0), LayerStats(StatsConfig(seed=1, **CONFIG))
    before = layer(a)
    merged = a.merge(empty)
    for x, mask, _ in data[2:]:
        merged.update(x, mask, Context(mask))
    assert layer(a) == before
    assert merged.sets == 24


def test_what_does_not_fit_together_is_not_merged() -> None:
    a = stats_of(batches(1), 0)
    with pytest.raises(ValueError, match="different seeds"):
        a.merge(stats_of(batches(1), 0))
    with pytest.raises(ValueError, match="config"):
        a.merge(LayerStats(StatsConfig(seed=1)))
    other = stats_of(batches(1), 1)
    other.pool(batches(1)[0][0], None)
    with pytest.raises(ValueError, match="second views"):
        a.merge(other)


def test_real_tokens_are_counted() -> None:
    data = batches(2)
    assert layer(stats_of(data, 0)).tokens == sum(int(mask.sum()) for _, mask, _ in data) < 2 * 4 * 9
    stats = LayerStats(StatsConfig(**CONFIG))
    stats.update(data[0][0], None, Context())
    assert (stats.tokens, stats.sets) == (4 * 9, 4)


def test_the_first_token_of_a_decoder_does_not_count_as_one_of_them() -> None:
    """It may be an attention sink, hundreds of times as long as the others."""
    x = batches(1)[0][0]
    x[:, 0] = 300 * x[:, 0].abs()
    found = {}
    for causal in (False, True):
        stats = LayerStats(StatsConfig(**CONFIG))
        stats.update(x, None, Context(causal=causal))
        found[causal] = layer(stats)
    for name in ("robust_cosine", "rank_share"):
        expected = float(getattr(robust, name)(x[:, 1:].float(), torch.ones(4, 8, dtype=torch.bool)).mean())
        assert found[True][name] == pytest.approx(expected, rel=1e-5)
        assert found[False][name] != pytest.approx(expected, rel=1e-2)
    assert found[True]["first_token_norm"] > 100
    assert "first_token_norm" not in found[False].measures


def test_sets_without_a_real_token_do_not_count() -> None:
    """A blank line has no tokens: with a tokenizer that adds none, its row of a batch is all padding."""
    blank = torch.randn(1, 9, 5), torch.zeros(1, 9, dtype=torch.bool), torch.randn(1, 9, 5)
    with_blank = [tuple(torch.cat([part, none]) for part, none in zip(data, blank, strict=True)) for data in batches()]
    found, expected = stats_of(with_blank, 0), stats_of(batches(), 0)
    assert found.sets == expected.sets
    for name in OF_ALL:
        assert layer(found)[name] == pytest.approx(layer(expected)[name], rel=1e-6), name


def test_means_that_are_zero_have_no_direction() -> None:
    stats = LayerStats(StatsConfig())
    x = torch.cat([torch.ones(2, 4, 3), torch.zeros(2, 4, 3)])
    stats.update(x, None, Context())
    assert layer(stats)["pooled_cosine"] == pytest.approx(float(uc.mean_cosine(x.mean(1))))
