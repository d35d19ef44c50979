"""The curves by layer: what the page's script draws, as plain data, with their captions in words."""

import math
from collections.abc import Sequence
from typing import Any

from uncollapse.diagnosis.measures import MEASURES, Measure
from uncollapse.diagnosis.result import Diagnosis, Summary
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


def rounded(value: float | None, digits: int = 5) -> float | None:
    """A number for the page: as many digits as can be seen; None for NaN and infinity, which JSON does not have."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")


def axis_of(diagnoses: Sequence[Diagnosis], tracks: Sequence[tr.Track]) -> dict[str, Any]:
    """The common axis, and every track on it."""
    return {
        "labels": [tr.short(name, i + 1) for i, name in enumerate(tr.axis(diagnoses))],
        "tracks": [
            {
                "of": track.of,
                "place": track.place,
                "main": track.place == tr.main_place(diagnoses[track.of]),
                "baseline": track.baseline,
                "dash": ",".join(f"{length}px" for length in track.dash) or "solid",
                "x": track.x,
                "depth": [rounded(depth, 4) for depth in track.depth],
                "names": [tr.layer_name(layer) for layer in track.layers],
            }
            for track in tracks
        ],
        "onsets": [onset for of, d in enumerate(diagnoses) if (onset := _onset(of, d, tracks))],
    }


def groups(diagnoses: Sequence[Diagnosis], tracks: Sequence[tr.Track]) -> list[dict[str, Any]]:
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


def band(summary: Summary | None) -> tuple[float, float] | None:
    """Between which values half of the sequences lie; mean ± deviation where there are no quantiles."""
    if summary is None or summary.count < 2:
        return None
    if len(summary.quantiles) == 5:
        return summary.quantiles[1], summary.quantiles[3]
    return (summary.mean - summary.std, summary.mean + summary.std) if summary.std else None


def says(measure: Measure) -> str:
    """What a measure is, and which direction is further from collapse."""
    text = measure.says[0].upper() + measure.says[1:]
    return f"{text}. {measure.better.capitalize()} is further from collapse." if measure.better else f"{text}."


def logarithmic(measure: Measure, values: Sequence[float]) -> bool:
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
    for name, d in zip(tr.names(diagnoses), diagnoses, strict=True):
        start = f"{name}: " if len(diagnoses) > 1 else ""
        parts.append(start + words.path_of(tr.main_layers(d), measure))
        random = [layer for layer in d.baseline if layer.place == tr.main_place(d)]
        if len(diagnoses) == 1 and random and not math.isnan(random[-1][measure]):
            parts.append(f"with random weights: {words.path_of(random, measure)}")
    return f"{words.title(measure)}. {'; '.join(parts)}."


def _measure(measure: Measure, diagnoses: Sequence[Diagnosis], tracks: Sequence[tr.Track]) -> dict[str, Any]:
    lines = [line for i, track in enumerate(tracks) if (line := _line(i, track, measure.name))]
    decisive = {rounded(e.bound) for d in diagnoses for e in d.verdict.evidence if e.measure == measure.name}
    bounds = sorted(bound for bound in decisive if bound is not None)
    seen = [v for line in lines for key in ("mean", "low", "high") for v in line.get(key, ()) if v is not None]
    means = [v for line in lines for v in line["mean"] if v is not None]
    log = bool(means) and logarithmic(measure, means)
    if log:  # a band can reach below zero, a logarithmic axis can not
        lines = [_above(line, min(means) / 2) for line in lines]
    return {
        "name": measure.name,
        "title": measure.title,
        "says": says(measure),
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
    line: dict[str, Any] = {"track": index, "mean": [rounded(s.mean) if s else None for s in summaries]}
    bands = [band(s) for s in summaries]
    if any(bands) and not track.baseline:
        line["low"] = [rounded(b[0]) if b else None for b in bands]
        line["high"] = [rounded(b[1]) if b else None for b in bands]
        line["std"] = [rounded(s.std, 3) if s else None for s in summaries]
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
    return {"of": of, "x": main.x[i], "depth": rounded(main.depth[i], 4), "name": d.verdict.onset}
