"""Healthy models to compare with: metrics of pretrained models of a kind by relative depth, from `healthy.json`.

`python -m website.pages.real_models` writes that file from `results/real_models`; docs/models.md shows them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

FILE = "healthy.json"
STEPS = 20  # between the first layer and the last
MEASURES = ("mean_cosine", "robust_cosine", "rank_share", "dataset_rank_share")  # that do not depend on the width


@dataclass(frozen=True)
class HealthyModels:
    """Pretrained models of one kind, such as "text encoder".

    curves: by model and measure, the values at even steps of depth from the first layer to the last.
    """

    kind: str
    curves: Mapping[str, Mapping[str, Sequence[float]]]

    @property
    def label(self) -> str:
        """The kind and the models in words."""
        return f"healthy {self.kind}s ({', '.join(self.curves)})"

    def range_at(self, measure: str, depth: float) -> tuple[float, float] | None:
        """Return the lowest and the highest value at a relative depth; None if the measure was not taken."""
        values = [interpolate(of[measure], depth) for of in self.curves.values() if measure in of]
        return (min(values), max(values)) if values else None


@cache
def read() -> Mapping[str, HealthyModels]:
    """Return all healthy models by kind."""
    text = resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    return {kind: HealthyModels(kind, models) for kind, models in json.loads(text).items()}


def like(settings: Mapping[str, Any]) -> HealthyModels | None:
    """Return the healthy models of the kind that the settings of a diagnosis name; None of some blocks only."""
    return None if "layers" in settings else read().get(str(settings.get("kind")))


def interpolate(values: Sequence[float], depth: float) -> float:
    """Return the value at a relative depth between 0 and 1, on the line between its neighbours.

    >>> interpolate([0.0, 1.0, 3.0], 0.75)
    2.0
    """
    at = depth * (len(values) - 1)
    left = min(int(at), len(values) - 2)
    return values[left] + (at - left) * (values[left + 1] - values[left])
