"""The curves by layer: what the page's script draws, as plain data, with their captions in words."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from uncollapse.diagnosis.measures import MEASURES, Measure
from uncollapse.diagnosis.result import Diagnosis, Layer, Summary
from uncollapse.report import tracks as tr
from uncollapse.report import words

QUESTIONS = {
    "similarity": "Are the tokens alike?",
    "rank": "How many dimensions do they span?",
    "spread": "How far are they spread?",
    "attention": "Where does attention look?",
    "graph": "Do neighbours blend?",
    "outliers": "Do a few features or tokens dominate?",
    "views": "Do the two views agree?",
}
LOG_FROM = 1000.0  # a largest value this many times the smallest is drawn on a logarithmic axis


def round_digits(value: float | None, digits: int = 5) -> float | None:
    """A number for the page: as many digits as can be seen; None for NaN and infinity, which JSON does not have."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")


def axis_data(diagnoses: Sequence[Diagnosis], tracks: Sequence[tr.Track]) -> dict[str, Any]:
    """The common axis, and every track on it."""
    return {
        "labels": [tr.tick_label(name, i + 1) for i, name in enumerate(tr.layer_axis(diagnoses))],
        "tracks": [
            {
                "of": track.of,
                "place": track.place,
                "main": track.place == tr.main_place(diagnoses[track.of]),
                "baseline": track.baseline,
                "dash": ",".join(f"{length}px" for length in track.dash) or "solid",
                "x": track.x,
                "depth": [round_digits(depth, 4) for depth in track.depth],
                "names": [tr.layer_name(layer) for layer in track.layers],
            }
            for track in tracks
        ],
        "onsets": [onset for of, d in enumerate(diagnoses) if (onset := _onset(of, d, tracks))],
    }


def measure_groups(diagnoses: Sequence[Diagnosis], tracks: Sequence[tr.Track]) -> list[dict[str, Any]]:
    """The groups of measures that have data, each with its measures; what a verdict rests on is shown at the start."""
    taken = {name for track in tracks for layer in track.layers for name in layer.measures}
    decisive = {e.measure for d in diagnoses if d.verdict.collapsed for e in d.verdict.evidence}
    found = []
    for group, question in QUESTIONS.items():
        measures = [m for m in MEASURES.values() if m.group == group and m.name in taken]
        if measures:
            drawn = [_measure(m, diagnoses, tracks) for m in measures]
            start = next((i for i, m in enumerate(measures) if m.name in decisive), 0)
            found.append({"id": group, "question": question, "start": start, "measures": drawn})
    return found


def spread_band(summary: Summary | None) -> tuple[float, float] | None:
    """Between which values half of the sequences lie; mean ± deviation where there are no quantiles."""
    if summary is None or summary.count < 2:
        return None
    if len(summary.quantiles) == 5:
        return summary.quantiles[1], summary.quantiles[3]
    return (summary.mean - summary.std, summary.mean + summary.std) if summary.std else None


def describe_measure(measure: Measure) -> str:
    """What a measure is, and which direction is further from collapse."""
    text = measure.says[0].upper() + measure.says[1:]
    return f"{text}. {measure.better.capitalize()} is further from collapse." if measure.better else f"{text}."


def needs_log_axis(measure: Measure, values: Sequence[float]) -> bool:
    """Whether the values span so much that only a logarithmic axis shows them."""
    return measure.bounds[1] is None and min(values) > 0 and max(values) > LOG_FROM * min(values)


def value_range(measure: Measure, values: Sequence[float]) -> tuple[float, float]:
    """From where to where a linear axis goes: similarity is seen against 1, and what counts from 0 starts there."""
    low, high = min(values), max(values)
    if measure.group == "similarity":
        return min(0.0, low - 0.03), 1.03
    if measure.bounds[0] == 0:
        low = 0.0
    elif measure.bounds[1] == 0:
        high = 0.0
    room = 0.06 * (high - low) or 0.5
    return (low if low == 0 else low - room), (high if high == 0 and low < 0 else high + room)


def caption(measure: str, diagnoses: Sequence[Diagnosis]) -> str:
    """The main numbers of a curve in words, for those who do not see it."""
    parts = []
    for name, d in zip(tr.diagnosis_names(diagnoses), diagnoses, strict=True):
        start = f"{name}: " if len(diagnoses) > 1 else ""
        parts.append(start + words.describe_path(tr.main_layers(d), measure))
        random = [layer for layer in d.baseline if layer.place == tr.main_place(d)]
        if len(diagnoses) == 1 and random and not math.isnan(random[-1][measure]):
            parts.append(f"with random weights: {words.describe_path(random, measure)}")
    return f"{words.measure_title(measure)}. {'; '.join(parts)}."


def _measure(measure: Measure, diagnoses: Sequence[Diagnosis], tracks: Sequence[tr.Track]) -> dict[str, Any]:
    lines = [line for i, track in enumerate(tracks) if (line := _line(i, track, measure.name))]
    decisive = {round_digits(e.bound) for d in diagnoses for e in d.verdict.evidence if e.measure == measure.name}
    bounds = sorted(bound for bound in decisive if bound is not None)
    seen = [v for line in lines for key in ("mean", "low", "high") for v in line.get(key, ()) if v is not None]
    means = [v for line in lines for v in line["mean"] if v is not None]
    log = bool(means) and needs_log_axis(measure, means)
    if log:  # a band can reach below zero, a logarithmic axis can not
        lines = [_above(line, min(means) / 2) for line in lines]
    return {
        "name": measure.name,
        "title": measure.title,
        "says": describe_measure(measure),
        "caption": caption(measure.name, diagnoses),
        "log": log,
        "range": value_range(measure, [*seen, *bounds] or [0.0]),
        "bounds": bounds,
        "lines": lines,
    }


def _line(index: int, track: tr.Track, measure: str) -> dict[str, Any] | None:
    """The values of one track; None if it has none. Without a spread there is no band."""
    summaries = [layer.measures.get(measure) for layer in track.layers]
    if not any(s and math.isfinite(s.mean) for s in summaries):
        return None
    line: dict[str, Any] = {"track": index, "mean": [round_digits(s.mean) if s else None for s in summaries]}
    bands = [spread_band(s) for s in summaries]
    if any(bands) and not track.baseline:
        line["low"] = [round_digits(b[0]) if b else None for b in bands]
        line["high"] = [round_digits(b[1]) if b else None for b in bands]
        line["std"] = [round_digits(s.std, 3) if s else None for s in summaries]
        line["count"] = [s.count if s else None for s in summaries]
    return line


def _above(line: dict[str, Any], floor: float) -> dict[str, Any]:
    return line | {"low": [None if v is None else max(v, floor) for v in line["low"]]} if "low" in line else line


def _onset(of: int, d: Diagnosis, tracks: Sequence[tr.Track]) -> dict[str, Any] | None:
    main = next((t for t in tracks if t.of == of and not t.baseline and t.place == tr.main_place(d)), None)
    at = [layer.name for layer in main.layers] if main else []
    if main is None or d.verdict.onset not in at:
        return None
    i = at.index(d.verdict.onset)
    return {"of": of, "x": main.x[i], "depth": round_digits(main.depth[i], 4), "name": d.verdict.onset}


SHOWN = 1e-7  # smaller singular values, relative to the largest, are rounding


def spectrum_steps(diagnoses: Sequence[Diagnosis]) -> dict[str, Any] | None:
    """The spectra of every layer of every diagnosis, and the baseline's of the same layers.

    A curve names its ranks by their number in `ranks`: most layers share them.
    """
    steps = _steps(diagnoses, lambda layer: bool(layer.spectrum))
    if not steps:
        return None
    baselines, ranks = tr.distinct_baselines(diagnoses), dict[tuple[int, ...], int]()
    seen = [v for d in diagnoses for layer in d.layers for v in layer.spectrum if v > 0 and math.isfinite(v)]
    drawn = [
        {
            "label": _step_label(layers),
            "says": _spectrum_caption(diagnoses, layers),
            "curves": [_curve(layer, ranks) for layer in layers],
            "random": [
                _curve(_layer_like(random, layer), ranks) for random, layer in zip(baselines, layers, strict=True)
            ],
        }
        for layers in steps
    ]
    return {
        "start": _start(diagnoses, steps),
        "steps": drawn,
        "ranks": list(ranks),
        "range": [max(min(seen, default=SHOWN), SHOWN * max(seen, default=1.0)), max(seen, default=1.0)],
    }


def heatmap_steps(diagnoses: Sequence[Diagnosis]) -> dict[str, Any] | None:
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
                "label": _step_label(layers),
                "short": [layer and tr.tick_label(layer.name, i + 1) for layer in layers],
                "says": _heatmap_caption(diagnoses, layers),
                "maps": [_lower_triangle(layer) for layer in layers],
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


def describe_spectrum(layer: Layer) -> str:
    """How fast the singular values fall, in words."""
    large = [r for r, v in zip(layer.spectrum_ranks, layer.spectrum, strict=True) if v >= layer.spectrum[0] / 10]
    about = "about " if len(layer.spectrum) < layer.spectrum_ranks[-1] else ""
    return f"{about}{large[-1]} of {layer.spectrum_ranks[-1]} singular values are at least a tenth of the largest"


def _steps(diagnoses: Sequence[Diagnosis], has: Callable[[Layer], bool]) -> list[list[Layer | None]]:
    """For each layer of the deepest diagnosis, the layer of every diagnosis that belongs to it."""
    deepest = max(diagnoses, key=lambda d: sum(has(layer) for layer in d.layers))
    found = [{_key(deep): own for own, deep in tr.match_layers(d, deepest) if has(own)} for d in diagnoses]
    return [[own.get(_key(layer)) for own in found] for layer in deepest.layers if has(layer)]


def _start(diagnoses: Sequence[Diagnosis], steps: Sequence[Sequence[Layer | None]]) -> int:
    """The last layer of the main place: what people want to see first."""
    main = {tr.main_place(d) for d in diagnoses}
    return max((i for i, layers in enumerate(steps) if any(la and la.place in main for la in layers)), default=0)


def _key(layer: Layer) -> tuple[str, str]:
    return layer.name, layer.place


def _step_label(layers: Sequence[Layer | None]) -> str:
    """The name of the layer; all of them where the models call it differently."""
    return " · ".join(dict.fromkeys(tr.layer_name(layer) for layer in layers if layer))


def _caption(diagnoses: Sequence[Diagnosis], layers: Sequence[Layer | None], what: Callable[[Layer], str]) -> str:
    """What holds for each diagnosis at this step, with its name where there are several."""
    parts = [
        what(layer) + (f" ({name})" if len(diagnoses) > 1 else "")
        for name, layer in zip(tr.diagnosis_names(diagnoses), layers, strict=True)
        if layer
    ]
    return f"At {_step_label(layers)}: {'; '.join(parts)}."


def _spectrum_caption(diagnoses: Sequence[Diagnosis], layers: Sequence[Layer | None]) -> str:
    return _caption(diagnoses, layers, describe_spectrum)


def _heatmap_caption(diagnoses: Sequence[Diagnosis], layers: Sequence[Layer | None]) -> str:
    def mean(layer: Layer) -> str:
        return f"two tokens of the example have a mean cosine of {off_diagonal_mean(layer.heatmap):.2f}"

    return _caption(diagnoses, layers, mean)


def _layer_like(layers: Sequence[Layer], layer: Layer | None) -> Layer | None:
    """The layer of this name and place among others."""
    return next((other for other in layers if layer and _key(other) == _key(layer)), None)


def _curve(layer: Layer | None, ranks: dict[tuple[int, ...], int]) -> dict[str, Any] | None:
    if layer is None or not layer.spectrum:
        return None
    at = ranks.setdefault(tuple(layer.spectrum_ranks), len(ranks))
    return {"ranks": at, "value": [round_digits(v, 4) for v in layer.spectrum]}


def _lower_triangle(layer: Layer | None) -> list[list[int | None]] | None:
    if layer is None:
        return None
    return [[_thousandths(value) for value in row[: i + 1]] for i, row in enumerate(layer.heatmap)]


def _thousandths(value: float) -> int | None:
    return round(1000 * value) if math.isfinite(value) else None
