"""Normalised and missing features."""

import pytest
import torch

from uncollapse.errors import UsageError
from uncollapse.lab.data.graph.datasets import NORMALISATIONS, hide_features, normalise_features

X = torch.tensor([[3.0, -1.0, 5.0], [0.0, 0.0, 5.0], [1.0, 2.0, 5.0]])


def test_rows_and_unit_have_norm_one() -> None:
    assert torch.allclose(normalise_features(X, "rows").abs().sum(1), torch.ones(3))
    assert torch.allclose(normalise_features(X, "unit").square().sum(1), torch.ones(3))
    assert torch.allclose(normalise_features(X, "rows")[0], X[0] / 9)


def test_standard_has_mean_zero_and_variance_one_and_drops_constants() -> None:
    x = normalise_features(X, "standard")
    assert torch.allclose(x.mean(0), torch.zeros(3), atol=1e-6)
    assert torch.allclose(x.var(0, unbiased=False), torch.tensor([1.0, 1.0, 0.0]), atol=1e-6)
    assert not normalise_features(torch.full((7, 1), 0.1), "standard").any()  # the mean of seven tenths is not a tenth


def test_auto_is_rows_for_counts_and_none_for_others() -> None:
    assert torch.equal(normalise_features(X.abs(), "auto"), normalise_features(X.abs(), "rows"))
    assert torch.equal(normalise_features(X, "auto"), X)


@pytest.mark.parametrize("how", NORMALISATIONS)
def test_nodes_without_features_stay_finite_and_nothing_is_changed_in_place(how: str) -> None:
    x = torch.cat([X.abs(), torch.zeros(1, 3)])
    before = x.clone()
    found = normalise_features(x, how)
    assert bool(found.isfinite().all())
    assert torch.equal(x, before)
    if how in ("rows", "unit", "auto", "none"):
        assert not found[3].any()


def test_hidden_nodes_are_a_share_of_the_candidates() -> None:
    x, candidates = torch.ones(100, 2), torch.arange(100) < 60
    gone = hide_features(x, candidates, 0.25, 3) == 0
    assert torch.equal(gone[:, 0], gone[:, 1])
    assert int(gone[:, 0].sum()) == 15
    assert not gone[60:].any()
    assert torch.equal(hide_features(x, candidates, 0.25, 3) == 0, gone)
    assert not torch.equal(hide_features(x, candidates, 0.25, 4) == 0, gone)
    assert torch.equal(hide_features(x, candidates, 1.0, 3)[:, 0] == 0, candidates)
    assert torch.equal(hide_features(x, candidates, 0.0, 3), x)


def test_words_for_what_cannot_be() -> None:
    with pytest.raises(UsageError, match="auto, rows"):
        normalise_features(X, "columns")
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(UsageError, match="between"):
            hide_features(X, X[:, 0] > 0, share, 0)
