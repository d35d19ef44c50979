"""Static plots of diagnoses, as PNG, SVG or PDF, and of the distances between embeddings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from uncollapse.diagnosis.measures import MEASURES
from uncollapse.diagnosis.result import Diagnosis, Layer
from uncollapse.errors import did_you_mean
from uncollapse.report import tracks as tr
from uncollapse.report.canvas import (
    INK,
    LINE,
    QUIET,
    add_legend_below,
    new_figure,
    save_figure,
    series_color,
    series_marker,
    series_style,
    tick_positions,
)
from uncollapse.report.plot_data import SMALLEST, needs_log_axis, spread_band, value_range

SIZE = (7.2, 4.2)

Diagnoses = Diagnosis | Sequence[Diagnosis]
DISTANCES_SIZE = (5.6, 3.4)  # inches; narrow, so that the plot fits on a phone
STYLES = {"rows": ("two rows", "-"), "pairs": ("a row and its partner", ":")}


def plot(diagnoses: Diagnoses, measure: str = "effective_rank", path: str | Path | None = None) -> Any:
    """Plot a measure by layer: mean, the middle half of the sequences, and the random baseline dashed.

    Args:
        diagnoses: One diagnosis, or several that are laid over each other.
        measure: A name of `uncollapse.diagnosis.measures.MEASURES`.
        path: File to write, which ends in .png, .svg or .pdf.

    Returns:
        The path; without one, the matplotlib figure.
    """
    given = _as_sequence(diagnoses)
    if measure not in MEASURES:
        hint = did_you_mean(measure, MEASURES)
        raise ValueError(f"No measure is named {measure!r}.{hint} There are: {', '.join(MEASURES)}.")
    if not any(measure in layer.measures for d in given for layer in d.layers):
        raise ValueError(
            f"{measure!r} was not taken in these diagnoses. There are: {', '.join(_taken_measures(given))}."
        )
    figure, (axes,) = new_figure(MEASURES[measure].title, SIZE)
    for track in tr.build_tracks(given):
        _draw_track(axes, track, given, measure)
    _label_layers(axes, tr.layer_axis(given))
    _scale_values(axes, given, measure)
    _add_legend(figure, axes)
    return figure if path is None else save_figure(figure, path)


def plot_spectrum(diagnoses: Diagnoses, path: str | Path = "spectrum.png", *, layer: str | None = None) -> Path:
    """Plot the singular values of one layer on a logarithmic axis. Default: the last layer."""
    given = _as_sequence(diagnoses)
    found = [_find_layer(d, layer, "spectrum") for d in given]
    names = ", ".join(dict.fromkeys(one.name for one in found))
    figure, (axes,) = new_figure(f"Singular values at {names}", SIZE)
    for of, (d, one, name) in enumerate(zip(given, found, tr.diagnosis_names(given), strict=True)):
        for random in [b for b in d.baseline if (b.name, b.place) == (one.name, one.place) and b.spectrum]:
            style = {"color": QUIET, "linestyle": "--", "linewidth": 1.2, "label": f"{name}, random weights"}
            axes.plot(random.spectrum_ranks, random.spectrum, **style)
        axes.plot(one.spectrum_ranks, one.spectrum, label=name, **series_style(of))
    axes.set_yscale("log")
    axes.set_ylim(bottom=max(axes.get_ylim()[0], SMALLEST * max(one.spectrum[0] for one in found)))
    axes.set_xlabel("rank of the singular value", color=INK)
    axes.set_ylabel("share of the sum", color=INK)
    _add_legend(figure, axes)
    return save_figure(figure, path)


def _add_legend(figure: Any, axes: Any) -> None:
    """Add a legend below the plot if there are several lines."""
    if len(axes.get_legend_handles_labels()[1]) > 1:
        add_legend_below(figure, axes, 2)


def plot_heatmap(diagnoses: Diagnoses, path: str | Path = "heatmap.png", *, layer: str | None = None) -> Path:
    """Plot the cosines between the tokens of the example at one layer, side by side. Default: the last layer."""
    given = _as_sequence(diagnoses)
    found = [_find_layer(d, layer, "heatmap") for d in given]
    figure, all_axes = new_figure("Cosine of tokens", (4.4 * len(given) + 0.8, 4.4), len(given))
    low = min(0.0, *(value for one in found for row in one.heatmap for value in row))
    for axes, d, one, name in zip(all_axes, given, found, tr.diagnosis_names(given), strict=True):
        image = axes.imshow(one.heatmap, vmin=low, vmax=1, cmap="cividis")
        axes.set_title(f"{name}, {one.name}" if len(given) > 1 else one.name, fontsize=10, color=INK, parse_math=False)
        _label_tokens(axes, d.example[: len(one.heatmap)])
    figure.colorbar(image, ax=list(all_axes), label="cosine", shrink=0.8)
    return save_figure(figure, path)


def _as_sequence(diagnoses: Diagnoses) -> tuple[Diagnosis, ...]:
    given = (diagnoses,) if isinstance(diagnoses, Diagnosis) else tuple(diagnoses)
    if not given:
        raise ValueError("A plot needs at least one diagnosis, got none.")
    return given


def _taken_measures(diagnoses: Sequence[Diagnosis]) -> list[str]:
    return [m for m in MEASURES if any(m in layer.measures for d in diagnoses for layer in d.layers)]


def _find_layer(d: Diagnosis, name: str | None, what: str) -> Layer:
    """Return the layer of this name that has a spectrum or a heat map; without a name, the last one that has."""
    there = [layer for layer in tr.main_layers(d) if getattr(layer, what)]
    chosen = [layer for layer in there if name in (None, layer.name)]
    if not chosen:
        listed = ", ".join(layer.name for layer in there) or "none"
        raise ValueError(f"{d.model} has no {what} at layer {name!r}. Layers that have one: {listed}.")
    return chosen[-1]


def _draw_track(axes: Any, track: tr.Track, diagnoses: Sequence[Diagnosis], measure: str) -> None:
    """Draw one track. The main one gets its band and a mark at the onset."""
    values = [layer[measure] for layer in track.layers]
    if all(map(math.isnan, values)):
        return
    d, name = diagnoses[track.of], tr.diagnosis_names(diagnoses)[track.of]
    if track.baseline:
        label, style = f"{name}, random weights", {"color": QUIET, "linewidth": 1.2}
    elif track.place == tr.main_place(d):
        label, style = name, {"color": series_color(track.of), "linewidth": 2.0, "marker": series_marker(track.of)}
        _draw_band(axes, track, measure)
        _mark_onset(axes, track, d.verdict.onset)
    else:
        label, style = f"{name}, {track.place}", {"color": series_color(track.of), "linewidth": 1.2}
    dash = (0, track.dash) if track.dash else "solid"
    axes.plot(track.x, values, label=label, linestyle=dash, markersize=4, **style)


def _draw_band(axes: Any, track: tr.Track, measure: str) -> None:
    bands = [spread_band(layer.measures.get(measure)) or (math.nan, math.nan) for layer in track.layers]
    low, high = zip(*bands, strict=True)
    axes.fill_between(track.x, low, high, color=series_color(track.of), alpha=0.16, linewidth=0)


def _mark_onset(axes: Any, track: tr.Track, onset: str | None) -> None:
    at = {layer.name: x for layer, x in zip(track.layers, track.x, strict=True)}
    if onset in at:
        axes.axvline(at[onset], color=series_color(track.of), linewidth=1, linestyle="-.", label="onset")


def _label_layers(axes: Any, names: Sequence[str]) -> None:
    at = tick_positions(len(names), 16)
    axes.set_xticks(list(at), [tr.tick_label(names[i], i + 1) for i in at], parse_math=False)
    axes.set_xlabel("layer", color=INK)
    axes.grid(axis="y", color=LINE, linewidth=0.8)


def _scale_values(axes: Any, diagnoses: Sequence[Diagnosis], measure: str) -> None:
    layers = [layer for d in diagnoses for layer in (*d.layers, *d.baseline)]
    means = [layer[measure] for layer in layers if math.isfinite(layer[measure])]
    edges = [edge for layer in layers for edge in spread_band(layer.measures.get(measure)) or ()]
    if needs_log_axis(MEASURES[measure], means):
        axes.set_yscale("log")
    else:
        axes.set_ylim(*value_range(MEASURES[measure], [*means, *edges]))
    axes.set_ylabel(MEASURES[measure].title, color=INK)


def _label_tokens(axes: Any, tokens: Sequence[str]) -> None:
    at = tick_positions(len(tokens), 24)
    shown = [tokens[i][:12] for i in at]
    axes.set_xticks(list(at), shown, rotation=90, fontsize=7, parse_math=False)
    axes.set_yticks(list(at), shown, fontsize=7, parse_math=False)


@dataclass(frozen=True)
class DistancePlot:
    """A figure of matplotlib, and its main numbers in words."""

    figure: Any
    caption: str


def draw_distances(diagnoses: Sequence[Diagnosis]) -> DistancePlot | None:
    """Return the histograms of all layers that have them; None if there are none."""
    found = [
        (name, layer, of)
        for of, (name, d) in enumerate(zip(tr.diagnosis_names(diagnoses), diagnoses, strict=True))
        for layer in d.layers
        if layer.distances
    ]
    if not found:
        return None
    figure, (axes,) = new_figure("", DISTANCES_SIZE)
    captions, widths = [], set()
    for name, layer, of in found:
        start = f"{name}: " if len(found) > 1 else ""
        for kind, (words, line) in STYLES.items():
            if kind in layer.distances:
                _draw_shares(axes, layer.distances[kind], f"{start}{words}", line, series_color(of))
                captions.append(f"{start}{words}, median {_median(layer.distances[kind]):.2f}")
        if layer.dim not in widths and "random" in layer.distances:
            label = f"random points in {layer.dim} dimensions"
            _draw_shares(axes, layer.distances["random"], label, "--", QUIET)
            captions.append(f"{label}, median {_median(layer.distances['random']):.2f}")
            widths.add(layer.dim)
    axes.set_xlabel("distance on the unit sphere", color=INK)
    axes.set_ylabel("share of pairs", color=INK)
    axes.set_xlim(0, 2)
    axes.set_ylim(bottom=0)
    add_legend_below(figure, axes, 2)
    return DistancePlot(figure, f"Distances: {'; '.join(captions)}.")


def _draw_shares(axes: Any, shares: Sequence[float], label: str, line: str, color: str) -> None:
    edges = [2 * number / len(shares) for number in range(len(shares) + 1)]
    axes.stairs(shares, edges, label=label, linestyle=line, color=color, linewidth=1.6)


def _median(shares: Sequence[float]) -> float:
    """Return the middle of the bin in which half of the pairs is reached."""
    reached = next(number for number, total in enumerate(accumulate(shares)) if total >= 0.5 * sum(shares))
    return 2 * (reached + 0.5) / len(shares)
