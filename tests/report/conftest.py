"""Diagnoses made by hand: numbers that move like those of a model whose tokens grow alike."""

import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from uncollapse.diagnosis.measures import MEASURES
from uncollapse.diagnosis.result import Advice, Diagnosis, Evidence, Layer, Summary, Verdict

Make = Callable[..., Diagnosis]
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, driven by Playwright."""
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium: install it, or name it in CHROMIUM")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


def summary(name: str, value: float) -> Summary:
    """What a measure of this scope has: a spread only if it is one of sequences."""
    if MEASURES[name].scope == "dataset":
        return Summary(value)
    step = 0.02 + 0.05 * abs(value)
    return Summary(value, step, tuple(value + k * step for k in (-1.6, -0.7, 0.0, 0.7, 1.6)), 32)


def values(cosine: float) -> dict[str, float]:
    return {
        "mean_cosine": cosine,
        "robust_cosine": 0.9 * cosine,
        "effective_rank": 40 * (1 - cosine) + 1,
        "rank_share": 1 - cosine,
        "dataset_rank": 200 * (1 - cosine) + 1,
        "token_variance": 10 ** (3 - 6 * cosine),
        "uniformity": -3.5 * (1 - cosine),
        "outlier_share": 0.3,
        "attention_similarity": 0.2 + 0.7 * cosine,
    }


def layer(name: str, cosine: float, *, place: str = "block", path: str = "", tokens: int = 6) -> Layer:
    spectrum = [math.exp(-0.1 * (1 + 9 * cosine) * i) for i in range(64)]
    heatmap = tuple(tuple(1.0 if i == j else cosine for j in range(tokens)) for i in range(tokens))
    return Layer(
        name,
        place,
        path or f"encoder.{name}",
        64,
        1000,
        {measure: summary(measure, value) for measure, value in values(cosine).items()},
        tuple(value / sum(spectrum) for value in spectrum),
        tuple(range(1, 65)),
        heatmap,
    )


def verdict(layers: Sequence[Layer]) -> Verdict:
    onset = next((one.name for one in layers if one["mean_cosine"] > 0.75), None)
    if onset is None:
        return Verdict("none", None, "high", "No layer collapses.")
    last = layers[-1]
    return Verdict(
        "complete",
        onset,
        "medium",
        f"Tokens grow alike from {onset} on.",
        (Evidence(last.name, "mean_cosine", last["mean_cosine"], 0.9, "two tokens point the same way"),),
        ("Only 32 sequences were measured.",),
        (Advice("contra_norm", "attention.residual", "it pushes tokens apart", 'uc.attach(model, "contra_norm")'),),
    )


@pytest.fixture(scope="session")
def make() -> Make:
    """A diagnosis whose mean cosine goes evenly from 0.1 to `top`, with more fields by name."""

    def build(
        model: str = "model",
        top: float = 0.9,
        blocks: int = 4,
        *,
        names: Sequence[str] | None = None,
        places: Sequence[str] = (),
        baseline: bool = True,
        tokens: int = 6,
        **fields: object,
    ) -> Diagnosis:
        along = list(names or ["embed", *(f"block {i}" for i in range(blocks))])
        cosines = [0.1 + (top - 0.1) * i / max(len(along) - 1, 1) for i in range(len(along))]
        main = [layer(name, c, tokens=tokens) for name, c in zip(along, cosines, strict=True)]
        others = [
            layer(name, c - 0.05, place=place)
            for place in places
            for name, c in list(zip(along, cosines, strict=True))[1:]
        ]
        random = tuple(layer(name, c / 2) for name, c in zip(along, cosines, strict=True)) if baseline else ()
        known: dict[str, object] = {
            "model": model,
            "architecture": "BertModel",
            "family": "huggingface",
            "parameters": 22_713_216,
            "data": "32 sentences",
            "batches": 4,
            "sequences": 32,
            "tokens": 1000,
            "layers": (*main, *others),
            "verdict": verdict(main),
            "baseline": random,
            "example": tuple(f"word{i}" for i in range(tokens)),
            "settings": {"attention": True, "max_batches": None, "places": ["block", *places]},
            "versions": {"torch": "2.13.0"},
            "created": "2025-01-02T03:04:05+00:00",
            "seconds": 1.5,
        }
        return Diagnosis(**(known | fields))  # type: ignore[arg-type]

    return build
