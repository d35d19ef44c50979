"""The report: one or several diagnoses as one self-contained HTML page, laid out by `templates/diagnosis.html`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from uncollapse.diagnosis.describe import format_interval
from uncollapse.diagnosis.measures import MEASURES
from uncollapse.diagnosis.result import Diagnosis, Layer
from uncollapse.report import frame, words
from uncollapse.report import tracks as tr
from uncollapse.report.plot_data import QUESTIONS, describe_measure, healthy_models, page_data
from uncollapse.report.plots import draw_distances
from uncollapse.report.words import format_number, measure_title

SCRIPTS = ("table.js", "figures.js")
LONG_NAME = 16  # characters of a layer's name that need a wider column
BADGES = {
    "none": "No collapse found",
    "complete": "Complete collapse",
    "dimensional": "Dimensional collapse",
    "both": "Complete and dimensional collapse",
}
TILES = ("mean_cosine", "effective_rank", "dataset_rank_share", "attention_similarity", "mean_average_distance")
SINGLE_LAYER_TILES = (
    "dataset_rank",
    "feature_correlation",
    "alignment",
    "uniformity",
    "uniformity_gap",
    "pooled_uniformity",
)


def write(diagnoses: Diagnosis | Sequence[Diagnosis], path: str | Path, *, title: str | None = None) -> Path:
    """Write a report: one self-contained HTML page.

    Args:
        diagnoses: One diagnosis, or several that are laid over each other. Others are compared with the first.
        path: File to write. It is written atomically.
        title: Heading. Default: the names of the models.

    Returns:
        The path.
    """
    given = (diagnoses,) if isinstance(diagnoses, Diagnosis) else tuple(diagnoses)
    if not given:
        raise ValueError("A report needs at least one diagnosis, got none.")
    return frame.write_html(render_page(given, title), path)


def render_page(diagnoses: Sequence[Diagnosis], title: str | None = None) -> str:
    """Return the page as text."""
    names, data = tr.diagnosis_names(diagnoses), page_data(diagnoses)
    return frame.render(
        "diagnosis.html",
        scripts=SCRIPTS,
        allowed=[frame.plotly_source()],
        title=title or words.join_words(names),
        subtitle=_subtitle(diagnoses),
        subject="report",
        links={name: words.speak(name.capitalize(), diagnoses) for name in _section_names(diagnoses, data)},
        names=names,
        data=data,
        packed_plotly=frame.packed_plotly(),
        **_context(diagnoses),
    )


def _section_names(diagnoses: Sequence[Diagnosis], data: dict[str, Any]) -> list[str]:
    """Return the identifiers of the sections that have something to show, the most important first."""
    plots = {"layers": data["groups"], "distances": any(layer.distances for d in diagnoses for layer in d.layers)}
    plots |= {"spectra": data["spectra"], "tokens": data["heatmaps"]}
    compared = ["difference"] if any(_differences(diagnoses)) else []
    causes = ["causes"] if any(d.parts is not None for d in diagnoses) else []
    shown = [name for name, found in plots.items() if found]
    return ["verdict", *compared, *causes, *shown, "numbers", "measures", "about"]


def _context(diagnoses: Sequence[Diagnosis]) -> dict[str, Any]:
    """Return what the template shows besides the plots."""
    layers = [layer for d in diagnoses for layer in d.layers]
    tracks = tr.build_tracks(diagnoses)
    return {
        "diagnoses": diagnoses,
        "differences": _differences(diagnoses),
        "has_baseline": any(track.baseline for track in tracks),
        "healthy": healthy_models(diagnoses),
        "checkboxes": checkboxes(diagnoses, tracks),
        "measures": measure_names(diagnoses),
        "several_places": len({layer.place for layer in layers}) > 1,
        "has_long_names": any(len(layer.name) > LONG_NAME for layer in layers),
        "glossary": glossary(diagnoses),
        "facts": facts(diagnoses),
        "BADGES": BADGES,
        "summary_line": summary_line,
        "tiles": tiles,
        "spread_note": spread_note,
        "mean_of": mean_of,
        "speak": partial(words.speak, diagnoses=diagnoses),
        "distances": draw_distances(diagnoses),
    }


def _differences(diagnoses: Sequence[Diagnosis]) -> list[list[str]]:
    """Return how each diagnosis after the first differs from it; nothing of another part of the same model."""
    first, *others = diagnoses
    return [[] if other in first.others else list(words.difference(first, other)) for other in others]


def _subtitle(diagnoses: Sequence[Diagnosis]) -> str:
    if len(diagnoses) == 1:
        return summary_line(diagnoses[0])
    if len(diagnoses) == 1 + len(diagnoses[0].others):
        return f"{len(diagnoses)} parts of one model."
    return f"{len(diagnoses)} diagnoses; the first is the reference."


@dataclass(frozen=True)
class Sparkline:
    """A curve as small as a word. paths: SVG path data by CSS class."""

    paths: Mapping[str, str]
    width: int = 120
    height: int = 32

    @classmethod
    def of(cls, values: Sequence[float], baseline: Sequence[float]) -> "Sparkline":
        """Return the values as a line, and the baseline's below it if it has at least two."""
        finite = [v for v in (*values, *baseline) if math.isfinite(v)]
        lines = {"baseline": baseline, "line": values}
        return cls({k: cls._path(v, min(finite), max(finite)) for k, v in lines.items() if len(v) > 1})

    @classmethod
    def _path(cls, values: Sequence[float], low: float, high: float, margin: int = 3) -> str:
        """Return the path of a line from the left edge to the right."""
        points = []
        for i, value in enumerate(values):
            x = margin + (cls.width - 2 * margin) * i / (len(values) - 1)
            y = cls.height - margin - (cls.height - 2 * margin) * (value - low) / ((high - low) or 1)
            points.append(f"{x:.1f} {y:.1f}")
        return "M" + "L".join(points)


@dataclass(frozen=True)
class Tile:
    """A main number of a diagnosis.

    first, last: values at the first and the last layer; first is None if there is only one. interval: how certain the
    last one is, in words. random: the last value with random weights, None if that was not measured.
    """

    title: str
    first: float | None
    last: float
    sparkline: Sparkline
    interval: str
    random: float | None


@dataclass(frozen=True)
class Checkbox:
    """A control that shows or hides lines of the curves. dash: the pattern of these lines, as a sample next to it."""

    shows: str
    label: str
    checked: bool = True
    swatch: int | None = None
    dash: Sequence[int] = ()
    line_class: str = "sample"


def summary_line(d: Diagnosis) -> str:
    """Return architecture, size, and the amount of data in one line."""
    parts = [d.architecture, f"{_format_size(d.parameters)} parameters" if d.parameters else ""]
    parts += [d.data, words.speak(f"{d.tokens:,} tokens", [d])]
    return " · ".join(part for part in parts if part)


def tiles(d: Diagnosis) -> list[Tile]:
    """Return the main numbers that were measured."""
    layers = tr.main_layers(d)
    names = TILES if len(layers) > 1 else (*TILES, *SINGLE_LAYER_TILES)
    return [_tile(d, name) for name in names if any(math.isfinite(layer[name]) for layer in layers)]


def checkboxes(diagnoses: Sequence[Diagnosis], tracks: Sequence[tr.Track]) -> list[Checkbox]:
    """Return the controls of the curves: one per diagnosis and place, the baseline, and the axis if depths differ."""
    boxes = []
    if len(diagnoses) > 1:
        names = tr.diagnosis_names(diagnoses)
        boxes += [Checkbox(f"of-{i}", name, swatch=i) for i, name in enumerate(names)]
    if any(track.baseline for track in tracks):
        boxes.append(Checkbox("baseline", "random weights", dash=tr.RANDOM_DASH, line_class="sample random"))
    if tracks and (models := healthy_models(diagnoses)):
        boxes.append(Checkbox("healthy", models.label, line_class="sample healthy", dash=(27,)))
    others = {t.place: t.dash for t in tracks if t.place in tr.other_places(diagnoses)}
    for place, dash in others.items():
        boxes.append(Checkbox(f"place-{place}", f"at {place}", len(diagnoses) == 1, dash=dash))
    if not tr.same_layers(diagnoses):
        boxes.append(Checkbox("depth", "relative depth", False))
    return boxes


def measure_names(diagnoses: Sequence[Diagnosis]) -> list[str]:
    """Return the names of all measures that were taken, known ones first, in their order."""
    taken = {name for d in diagnoses for layer in d.layers for name in layer.measures}
    return [*(name for name in MEASURES if name in taken), *sorted(taken - set(MEASURES))]


def mean_of(layer: Layer, measure: str) -> float:
    """Return the mean of a measure, which another version may have taken; NaN if this layer does not have it."""
    return layer.measures[measure].mean if measure in layer.measures else math.nan


def spread_note(layer: Layer, measure: str) -> str:
    """Return how certain or how spread a value is, in words; empty if that is not known."""
    summary, interval = layer.measures.get(measure), layer.intervals.get(measure)
    if interval is not None:
        return f"{format_interval(interval)}, over {interval.rows:,} {'pairs' if measure == 'alignment' else 'rows'}"
    if summary is None or summary.count < 2:
        return ""
    return f"± {format_number(summary.std)} over {summary.count:,} sequences"


def glossary(diagnoses: Sequence[Diagnosis]) -> dict[str, dict[str, str]]:
    """Return what each measure that was taken means, grouped by the question it answers."""
    taken = set(measure_names(diagnoses))
    groups = {
        words.speak(question, diagnoses): {
            m.title: words.speak(describe_measure(m), diagnoses)
            for m in MEASURES.values()
            if m.group == group and m.name in taken
        }
        for group, question in QUESTIONS.items()
    }
    return {question: entries for question, entries in groups.items() if entries}


def facts(diagnoses: Sequence[Diagnosis]) -> dict[str, dict[str, list[str]]]:
    """Return model, data, settings and versions by group and key, with one value per diagnosis."""
    groups: dict[str, list[Mapping[str, object]]] = {
        "Model and data": [_model_facts(d) for d in diagnoses],
        "Settings": [_settings(d) for d in diagnoses],
        "Versions": [d.versions for d in diagnoses],
    }
    return {heading: _rows(columns) for heading, columns in groups.items() if any(columns)}


def _tile(d: Diagnosis, measure: str) -> Tile:
    layers = tr.main_layers(d)
    values = [layer[measure] for layer in layers if math.isfinite(layer[measure])]
    random = [layer[measure] for layer in tr.main_layers(d, d.baseline)]
    random = [value for value in random if math.isfinite(value)]
    interval = layers[-1].intervals.get(measure)
    return Tile(
        measure_title(measure),
        values[0] if len(values) > 1 else None,
        values[-1],
        Sparkline.of(values, random),
        format_interval(interval) if interval else "",
        random[-1] if random else None,
    )


def _rows(columns: Sequence[Mapping[str, object]]) -> dict[str, list[str]]:
    keys = dict.fromkeys(key for column in columns for key in column)
    return {key: [_format_setting(column.get(key, "–")) for column in columns] for key in keys}


def _settings(d: Diagnosis) -> Mapping[str, object]:
    """Return the settings; of embeddings without those that only models have."""
    of_models = ("places", "tokens", "attention") if d.family == "embeddings" else ()
    return {name: value for name, value in d.settings.items() if name not in of_models}


def _model_facts(d: Diagnosis) -> dict[str, object]:
    return {
        "architecture": d.architecture,
        "family": d.family,
        "parameters": f"{d.parameters:,}",
        "data": d.data,
        "measured": f"{d.tokens:,} rows"
        if d.family == "embeddings"
        else f"{d.batches:,} batches, {d.sequences:,} sequences, {d.tokens:,} tokens",
        "created": d.created,
        "time": f"{d.seconds:.1f} s",
    }


def _format_size(count: int) -> str:
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return str(count)


def _format_setting(value: object) -> str:
    if value is None or value == "":
        return "not given"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_format_setting, value)) or "none"
    return str(value)
