"""Healthy models: their curves by relative depth, and for whom they are shown."""

import pytest

from uncollapse.diagnosis import reference_data
from uncollapse.diagnosis.reference_data import HealthyModels


def test_the_range_is_that_of_all_models_on_the_lines_between_their_values() -> None:
    models = HealthyModels("decoder", {"a": {"rank_share": [0.0, 1.0]}, "b": {"rank_share": [0.5, 0.5], "x": [1, 2]}})
    assert models.range_at("rank_share", 0.25) == (0.25, 0.5)
    assert models.range_at("rank_share", 1.0) == (0.5, 1.0)
    assert models.range_at("x", 0.5) == (1.5, 1.5)
    assert models.range_at("uniformity", 0.5) is None
    assert models.label == "healthy decoders (a, b)"


@pytest.mark.parametrize("settings", [{}, {"kind": "image encoder"}, {"kind": "decoder", "layers": ["block 1"]}])
def test_other_kinds_and_some_blocks_only_have_none(settings: dict[str, object]) -> None:
    assert reference_data.healthy_like(settings) is None


def test_every_shipped_curve_is_complete() -> None:
    assert set(reference_data.read_healthy()) == {"text encoder", "decoder"}
    for models in reference_data.read_healthy().values():
        for name, curves in models.curves.items():
            assert curves.keys() == set(reference_data.HEALTHY_MEASURES), name
            assert {len(values) for values in curves.values()} == {reference_data.HEALTHY_STEPS + 1}
            assert all(-1 <= value <= 1 for values in curves.values() for value in values)
