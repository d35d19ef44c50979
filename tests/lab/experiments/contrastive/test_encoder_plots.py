"""Pictures of encoders."""

import math
import warnings
from typing import Any

import numpy
import pytest
import torch
from tests.lab.experiments.contrastive.test_predictors import made

from uncollapse.lab.experiments.contrastive import circle
from uncollapse.lab.experiments.contrastive import recipe as contrast
from uncollapse.lab.experiments.contrastive.encoder_plots import (
    angle_density,
    circle_figure,
    circle_plots,
    objective_kind,
    scatter_plots,
)

pytest.importorskip("matplotlib")


def full(**settings: Any) -> list[dict[str, Any]]:
    from dataclasses import asdict

    return [
        record | {"config": asdict(contrast.Config(**settings)) | {"seed": at}} for at, record in enumerate(made(9))
    ]


def test_a_group_of_encoders_has_a_picture_with_its_correlations() -> None:
    (picture,) = scatter_plots([*full(), full(epochs=3)[0]])
    assert picture.title == "9 encoders on stl10"
    assert "alignment + uniformity" in picture.caption
    assert "both, weighted 1.00 (R² 1.00)" in picture.caption
    assert "Partial rank correlation, with 95 % intervals: alignment given uniformity -" in picture.caption
    labels = [axes.get_xlabel() for axes in picture.figure.axes]
    assert labels[:3] == ["alignment, lower is better", "alignment + uniformity", "log(M + 1) − loss, nats"]
    assert "rank correlation" in picture.figure.axes[1].get_title(loc="left")


def test_two_encoders_have_none() -> None:
    assert list(scatter_plots(full()[:2])) == []


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ((1, 0, 0), "InfoNCE alone"),
        ((1, 0, 1), "mixtures of all"),
        ((0, 1, 1), "alignment and uniformity"),
        ((0, 0, 1), "one of the two alone"),
    ],
)
def test_kinds_of_objectives(weights: tuple[int, ...], words: str) -> None:
    assert objective_kind(dict(zip(("contrast", "align", "uniform"), weights, strict=True))) == words


def test_the_density_around_the_circle_is_one_and_follows_the_angles() -> None:
    around = numpy.linspace(-math.pi, math.pi, 3601)
    density = angle_density(numpy.array([0.5, 0.5, -3.1]), around)
    assert torch.trapezoid(torch.tensor(density), torch.tensor(around)) == pytest.approx(1.0, abs=1e-3)
    assert around[density.argmax()] == pytest.approx(0.5, abs=0.01)
    wrapped = angle_density(numpy.array([math.pi]), around)
    assert wrapped[0] == pytest.approx(wrapped[-1])  # the ends meet


def test_circles_of_the_same_settings_share_a_picture() -> None:
    from dataclasses import asdict

    records = [
        {
            "config": asdict(circle.Config(learned=learned, epochs=epochs)),
            "figures": {"validation": 0.2, "test": 0.25},
            "data": {"classes": ["cat", "dog", "emu"]},
            "circle": {"angles": [0.0, 1.0, 2.0], "labels": [0, 0, 2], "distances": [3, 0, 0, 1]},
        }
        for learned, epochs in (("random", 2), ("contrastive", 2), ("contrastive", 3))
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a mean of nothing: no dog was held back
        pictures = list(circle_plots(records))
    assert [len(picture.figure.axes) for picture in pictures] == [2 * 6, 6]
    assert pictures[0].caption == "Linear accuracy on test images: random: 25.0 %; contrastive: 25.0 %."


def test_titles_of_circles_say_which_images_they_are_of() -> None:
    points = {"angles": [0.0, 1.0, 2.0], "labels": [0, 1, 2], "distances": [1, 2, 1]}
    about = {"circle": points, "data": {"classes": ["a", "b", "c"]}}
    for metrics, shown in (({"validation": 0.2, "test": 0.3}, "validation"), ({"test": 0.3}, "test")):
        axes = circle_figure({"random": {**about, "figures": metrics}}).axes[0]
        title = axes.get_title() + axes.get_title(loc="left")
        assert "random: 30.0 % linear on test images" in title
        assert f"{shown} images: mean distance" in title
