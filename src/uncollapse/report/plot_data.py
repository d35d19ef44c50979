"""Data of the interactive plots: what the page's script draws, with captions in words.

Curves have one value per layer. Spectra and heat maps have one step per layer, which a slider selects.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from uncollapse.diagnosis import reference_data
from uncollapse.diagnosis.measures import MEASURES, Measure
from uncollapse.diagnosis.result import Diagnosis, Layer, Summary
from uncollapse.report import tracks as tr
from uncollapse.report import words

QUESTIONS = {
    "similarity": "Are the tokens alike?",
    "rank": "How many dimensions do they span?",
    "spread": "How far are they spread?",
    "attention": "Where does attention look?",
    "graph": "Do neighbors blend?",
    "outliers": "Do a few features or tokens dominate?",
    "views": "Do the two views agree?",
}
LOG_RATIO = 1000.0  # largest over smallest value from which on an axis is logarithmic
SMALLEST = 1e-7  # singular values below this share of the largest are rounding errors


def page_data(diagnoses: Sequence[Diagnosis]) -> dict[str, Any]:
    """Return all that the page's script draws. Diagnoses of a single layer have no curves."""
    tracks = tr.build_tracks(diagnoses)
    return {
        "names": tr.diagnosis_names(diagnoses),
        "axis": axis_data(diagnoses, tracks),
        "groups": measure_groups(diagnoses, tracks) if len(tr.layer_axis(diagnoses)) > 1 else [],
        "spectra": spectrum_steps(diagnoses),
        "heatmaps": heatmap_steps(diagnoses),
    }


def round_digits(value: float | None, digits: int = 5) -> float | None:
    """Return a number with as many digits as a plot can show; None for NaN and infinity, which JSON lacks."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")


def axis_data(diagnoses: Sequence[Diagnosis], tracks: Sequence[tr.Track]) -> dict[str, Any]:
    """Return the common axis of all layers, and every track on it."""
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
        "onsets": [onset for of, d in enumerate(diagnoses) if (onset := _onset_data(of, d, tracks))],
    }


def measure_groups(diagnoses: Sequence[Diagnosis], tracks: Sequence[tr.Track]) -> list[dict[str, Any]]:
    """Return the groups of measures that have data. A measure that a verdict rests on is shown first."""
    taken = {name for track in tracks for layer in track.layers for name in layer.measures}
    decisive = {e.measure for d in diagnoses if d.verdict.collapsed for e in d.verdict.evidence}
    found = []
    for group, question in QUESTIONS.items():
        measures = [m for m in MEASURES.values() if m.group == group and m.name in taken]
        if measures:
            drawn = [_measure_data(m, diagnoses, tracks) for m in measures]
            start = next((i for i, m in enumerate(measures) if m.name in decisive), 0)
            question = words.speak(question, diagnoses)
            found.append({"id": group, "question": question, "start": start, "measures": drawn})
    return found


def spread_band(summary: Summary | None) -> tuple[float, float] | None:
    """Return the quartiles over the sequences, or mean ± standard deviation if quantiles were not stored."""
    if summary is None or summary.count < 2:
        return None
    if len(summary.quantiles) == 5:
        return summary.quantiles[1], summary.quantiles[3]
    return (summary.mean - summary.std, summary.mean + summary.std) if summary.std else None


def describe_measure(measure: Measure) -> str:
    """Return what a measure is, and which direction is further from collapse."""
    text = measure.says[0].upper() + measure.says[1:]
    return f"{text}. {measure.better.capitalize()} is further from collapse." if measure.better else f"{text}."


def needs_log_axis(measure: Measure, values: Sequence[float]) -> bool:
    """Return whether the values span so many orders of magnitude that they need a logarithmic axis."""
    return measure.bounds[1] is None and min(values) > 0 and max(values) > LOG_RATIO * min(values)


def value_range(measure: Measure, values: Sequence[float]) -> tuple[float, float]:
    """Return the limits of a linear axis. Similarities are shown up to 1; measures bounded by 0 start or end there."""
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
    """Return the main numbers of a curve in words, for screen readers."""
    parts = []
    for name, d in zip(tr.diagnosis_names(diagnoses), diagnoses, strict=True):
        start = f"{name}: " if len(diagnoses) > 1 else ""
        parts.append(start + words.describe_path(tr.main_layers(d), measure))
        random = tr.main_layers(d, d.baseline)
        if len(diagnoses) == 1 and random and not math.isnan(random[-1][measure]):
            parts.append(f"with random weights: {words.describe_path(random, measure)}")
    return f"{words.measure_title(measure)}. {'; '.join(parts)}."


def _measure_data(measure: Measure, diagnoses: Sequence[Diagnosis], tracks: Sequence[tr.Track]) -> dict[str, Any]:
    lines = [line for i, track in enumerate(tracks) if (line := _line_data(i, track, measure.name))]
    decisive = {round_digits(e.bound) for d in diagnoses for e in d.verdict.evidence if e.measure == measure.name}
    bounds = sorted(bound for bound in decisive if bound is not None)
    seen = [v for line in lines for key in ("mean", "low", "high") for v in line.get(key, ()) if v is not None]
    band = _healthy_band(measure.name, diagnoses, tracks)
    seen += [*band["low"], *band["high"]] if band else []
    means = [v for line in lines for v in line["mean"] if v is not None]
    log = bool(means) and needs_log_axis(measure, means)
    if log:  # a band may reach below zero, a logarithmic axis cannot
        lines = [_clip_band(line, min(means) / 2) for line in lines]
    return {
        "name": measure.name,
        "title": measure.title,
        "says": words.speak(describe_measure(measure), diagnoses),
        "caption": caption(measure.name, diagnoses),
        "log": log,
        "range": value_range(measure, [*seen, *bounds] or [0.0]),
        "bounds": bounds,
        "lines": lines,
        "healthy": band,
    }


def healthy_models(diagnoses: Sequence[Diagnosis]) -> reference_data.HealthyModels | None:
    """Return the healthy models of the kind that all diagnoses are of; None if there are none."""
    found = [reference_data.healthy_like(d.settings) for d in diagnoses]
    return found[0] if all(each is found[0] for each in found) else None


def _healthy_band(measure: str, diagnoses: Sequence[Diagnosis], tracks: Sequence[tr.Track]) -> dict[str, Any] | None:
    """Return the range of healthy models of the same kind along the main track of the deepest model."""
    models = healthy_models(diagnoses)
    mains = [t for t in tracks if not t.baseline and t.place == tr.main_place(diagnoses[t.of])]
    if models is None or not mains:
        return None
    along = max(mains, key=lambda track: len(track.x))
    ranges = [models.range_at(measure, depth) for depth in along.depth]
    if None in ranges:
        return None
    low, high = zip(*((round_digits(a), round_digits(b)) for a, b in filter(None, ranges)), strict=True)
    return {"x": along.x, "depth": [round_digits(depth, 4) for depth in along.depth], "low": low, "high": high}


def _line_data(index: int, track: tr.Track, measure: str) -> dict[str, Any] | None:
    """Return the values of one track, with a band where the spread is known; None if it has no values."""
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


def _clip_band(line: dict[str, Any], floor: float) -> dict[str, Any]:
    return line | {"low": [None if v is None else max(v, floor) for v in line["low"]]} if "low" in line else line


def _onset_data(of: int, d: Diagnosis, tracks: Sequence[tr.Track]) -> dict[str, Any] | None:
    main = next((t for t in tracks if t.of == of and not t.baseline and t.place == tr.main_place(d)), None)
    at = [layer.name for layer in main.layers] if main else []
    if main is None or d.verdict.onset not in at:
        return None
    i = at.index(d.verdict.onset)
    return {"of": of, "x": main.x[i], "depth": round_digits(main.depth[i], 4), "name": d.verdict.onset}


def spectrum_steps(diagnoses: Sequence[Diagnosis]) -> dict[str, Any] | None:
    """Return the spectra of every layer of every diagnosis, and those of the baseline; None if there are none.

    Most layers have the same ranks, so a curve refers to them by an index into `ranks`.
    """
    steps = _steps(diagnoses, lambda layer: bool(layer.spectrum))
    if not steps:
        return None
    baselines = [{_key(layer): layer for layer in reversed(each)} for each in tr.distinct_baselines(diagnoses)]
    ranks: dict[tuple[int, ...], int] = {}
    values = [v for d in diagnoses for layer in d.layers for v in layer.spectrum if v > 0 and math.isfinite(v)]
    largest = max(values, default=1.0)
    drawn = [
        {
            "label": _step_label(layers),
            "says": _spectrum_caption(diagnoses, layers),
            "curves": [_curve_data(layer, ranks) for layer in layers],
            "random": [
                _curve_data(random.get(_key(layer)) if layer else None, ranks)
                for random, layer in zip(baselines, layers, strict=True)
            ],
        }
        for layers in steps
    ]
    return {
        "start": _start(diagnoses, steps),
        "steps": drawn,
        "ranks": list(ranks),
        "range": [max(min(values, default=SMALLEST), SMALLEST * largest), largest],
    }


def heatmap_steps(diagnoses: Sequence[Diagnosis]) -> dict[str, Any] | None:
    """Return the cosines between the tokens of the example after each block; None if there are none.

    They are symmetric, so only the lower triangle is stored, in thousandths. `short` is the tick label of the layer in
    each diagnosis.
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
        "noun": words.speak("token", diagnoses),
        "lowest": min([0.0, *(v for v in values if math.isfinite(v))]),
    }


def off_diagonal_mean(heatmap: Sequence[Sequence[float]]) -> float:
    """Return the mean cosine of two different tokens."""
    n = len(heatmap)
    total = sum(value for i, row in enumerate(heatmap) for j, value in enumerate(row) if i != j)
    return total / max(n * (n - 1), 1)


def describe_spectrum(layer: Layer) -> str:
    """Return how fast the singular values fall, in words."""
    large = [r for r, v in zip(layer.spectrum_ranks, layer.spectrum, strict=True) if v >= layer.spectrum[0] / 10]
    about = "about " if len(layer.spectrum) < layer.spectrum_ranks[-1] else ""
    return f"{about}{large[-1]} of {layer.spectrum_ranks[-1]} singular values are at least a tenth of the largest"


def _steps(diagnoses: Sequence[Diagnosis], has: Callable[[Layer], bool]) -> list[list[Layer | None]]:
    """Return, for each layer of the deepest diagnosis, the matching layer of every diagnosis."""
    deepest = max(diagnoses, key=lambda d: sum(has(layer) for layer in d.layers))
    found = [{_key(deep): own for own, deep in tr.match_layers(d, deepest) if has(own)} for d in diagnoses]
    return [[own.get(_key(layer)) for own in found] for layer in deepest.layers if has(layer)]


def _start(diagnoses: Sequence[Diagnosis], steps: Sequence[Sequence[Layer | None]]) -> int:
    """Return the step that is shown first: the last layer of the main place."""
    main = {tr.main_place(d) for d in diagnoses}
    return max((i for i, layers in enumerate(steps) if any(la and la.place in main for la in layers)), default=0)


def _key(layer: Layer) -> tuple[str, str]:
    return layer.name, layer.place


def _step_label(layers: Sequence[Layer | None]) -> str:
    """Return the name of a step's layer; all names if they differ between the models."""
    return " · ".join(dict.fromkeys(tr.layer_name(layer) for layer in layers if layer))


def _caption(diagnoses: Sequence[Diagnosis], layers: Sequence[Layer | None], describe: Callable[[Layer], str]) -> str:
    """Return the description of each diagnosis at this step, with its name if there are several."""
    parts = [
        describe(layer) + (f" ({name})" if len(diagnoses) > 1 else "")
        for name, layer in zip(tr.diagnosis_names(diagnoses), layers, strict=True)
        if layer
    ]
    return f"At {_step_label(layers)}: {'; '.join(parts)}."


def _spectrum_caption(diagnoses: Sequence[Diagnosis], layers: Sequence[Layer | None]) -> str:
    return _caption(diagnoses, layers, describe_spectrum)


def _heatmap_caption(diagnoses: Sequence[Diagnosis], layers: Sequence[Layer | None]) -> str:
    def mean(layer: Layer) -> str:
        return f"two tokens of the example have a mean cosine of {off_diagonal_mean(layer.heatmap):.2f}"

    return words.speak(_caption(diagnoses, layers, mean), diagnoses)


def _curve_data(layer: Layer | None, ranks: dict[tuple[int, ...], int]) -> dict[str, Any] | None:
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
