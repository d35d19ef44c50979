"""What the sliders of the page walk through: the singular values and the token similarities, layer by layer."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from uncollapse.diagnosis.result import Diagnosis, Layer
from uncollapse.report import tracks as tr
from uncollapse.report.layer_plots import rounded

SHOWN = 1e-7  # smaller singular values, relative to the largest, are rounding


def spectra(diagnoses: Sequence[Diagnosis]) -> dict[str, Any] | None:
    """The spectra of every layer of every diagnosis, and the baseline's of the same layers.

    A curve names its ranks by their number in `ranks`: most layers share them.
    """
    steps = _steps(diagnoses, lambda layer: bool(layer.spectrum))
    if not steps:
        return None
    baselines, ranks = tr.baselines(diagnoses), dict[tuple[int, ...], int]()
    seen = [v for d in diagnoses for layer in d.layers for v in layer.spectrum if v > 0 and math.isfinite(v)]
    drawn = [
        {
            "label": _label(layers),
            "says": _spectra_say(diagnoses, layers),
            "curves": [_curve(layer, ranks) for layer in layers],
            "random": [_curve(_same(random, layer), ranks) for random, layer in zip(baselines, layers, strict=True)],
        }
        for layers in steps
    ]
    return {
        "start": _start(diagnoses, steps),
        "steps": drawn,
        "ranks": list(ranks),
        "range": [max(min(seen, default=SHOWN), SHOWN * max(seen, default=1.0)), max(seen, default=1.0)],
    }


def heatmaps(diagnoses: Sequence[Diagnosis]) -> dict[str, Any] | None:
    """The cosines between the tokens of the example after each block.

    In thousandths and below the diagonal only: they are symmetric. `short` names the layer of each diagnosis.
    """
    main = {tr.main_place(d) for d in diagnoses}
    steps = _steps(diagnoses, lambda layer: bool(layer.heatmap) and layer.place in main)
    if not steps:
        return None
    values = [v for layers in steps for layer in layers if layer for row in layer.heatmap for v in row]
    return {
        "start": _start(diagnoses, steps),
        "steps": [
            {
                "label": _label(layers),
                "short": [layer and tr.short(layer.name, i + 1) for layer in layers],
                "says": _heatmaps_say(diagnoses, layers),
                "maps": [_half(layer) for layer in layers],
            }
            for i, layers in enumerate(steps)
        ],
        "tokens": [list(d.example) for d in diagnoses],
        "lowest": min([0.0, *(v for v in values if math.isfinite(v))]),
    }


def off_diagonal_mean(heatmap: Sequence[Sequence[float]]) -> float:
    """Mean cosine of two different tokens."""
    n = len(heatmap)
    total = sum(value for i, row in enumerate(heatmap) for j, value in enumerate(row) if i != j)
    return total / max(n * (n - 1), 1)


def directions(layer: Layer) -> str:
    """How fast the singular values fall, in words."""
    large = [r for r, v in zip(layer.spectrum_ranks, layer.spectrum, strict=True) if v >= layer.spectrum[0] / 10]
    about = "about " if len(layer.spectrum) < layer.spectrum_ranks[-1] else ""
    return f"{about}{large[-1]} of {layer.spectrum_ranks[-1]} singular values are at least a tenth of the largest"


def _steps(diagnoses: Sequence[Diagnosis], has: Callable[[Layer], bool]) -> list[list[Layer | None]]:
    """For each layer of the deepest diagnosis, the layer of every diagnosis that belongs to it."""
    deepest = max(diagnoses, key=lambda d: sum(has(layer) for layer in d.layers))
    found = [{_key(deep): own for own, deep in tr.matched(d, deepest) if has(own)} for d in diagnoses]
    return [[own.get(_key(layer)) for own in found] for layer in deepest.layers if has(layer)]


def _start(diagnoses: Sequence[Diagnosis], steps: Sequence[Sequence[Layer | None]]) -> int:
    """The last layer of the main place: what people want to see first."""
    main = {tr.main_place(d) for d in diagnoses}
    return max((i for i, layers in enumerate(steps) if any(la and la.place in main for la in layers)), default=0)


def _key(layer: Layer) -> tuple[str, str]:
    return layer.name, layer.place


def _label(layers: Sequence[Layer | None]) -> str:
    """The name of the layer; all of them where the models call it differently."""
    return " · ".join(dict.fromkeys(tr.layer_name(layer) for layer in layers if layer))


def _say(diagnoses: Sequence[Diagnosis], layers: Sequence[Layer | None], what: Callable[[Layer], str]) -> str:
    """What holds for each diagnosis at this step, with its name where there are several."""
    parts = [
        what(layer) + (f" ({name})" if len(diagnoses) > 1 else "")
        for name, layer in zip(tr.names(diagnoses), layers, strict=True)
        if layer
    ]
    return f"At {_label(layers)}: {'; '.join(parts)}."


def _spectra_say(diagnoses: Sequence[Diagnosis], layers: Sequence[Layer | None]) -> str:
    return _say(diagnoses, layers, directions)


def _heatmaps_say(diagnoses: Sequence[Diagnosis], layers: Sequence[Layer | None]) -> str:
    def mean(layer: Layer) -> str:
        return f"two tokens of the example have a mean cosine of {off_diagonal_mean(layer.heatmap):.2f}"

    return _say(diagnoses, layers, mean)


def _same(layers: Sequence[Layer], layer: Layer | None) -> Layer | None:
    """The layer of this name and place among others."""
    return next((other for other in layers if layer and _key(other) == _key(layer)), None)


def _curve(layer: Layer | None, ranks: dict[tuple[int, ...], int]) -> dict[str, Any] | None:
    if layer is None or not layer.spectrum:
        return None
    at = ranks.setdefault(tuple(layer.spectrum_ranks), len(ranks))
    return {"ranks": at, "value": [rounded(v, 4) for v in layer.spectrum]}


def _half(layer: Layer | None) -> list[list[int | None]] | None:
    if layer is None:
        return None
    return [[_thousandths(value) for value in row[: i + 1]] for i, row in enumerate(layer.heatmap)]


def _thousandths(value: float) -> int | None:
    return round(1000 * value) if math.isfinite(value) else None
