"""The frames of the figures: headings, controls and captions; the page's script draws into them."""

from collections.abc import Sequence
from typing import Any

from uncollapse.diagnosis.result import Diagnosis
from uncollapse.report import tracks as tr
from uncollapse.report.markup import Markup, element
from uncollapse.report.sections import swatch


def controls(diagnoses: Sequence[Diagnosis], tracks: Sequence[tr.Track]) -> Markup:
    """What all curves show: a box for each diagnosis and place, the baseline, and the axis where depths differ."""
    boxes = []
    if len(diagnoses) > 1:
        boxes += [_box(f"of-{i}", [swatch(i), name], True) for i, name in enumerate(tr.diagnosis_names(diagnoses))]
    if any(track.baseline for track in tracks):
        boxes.append(_box("baseline", [_sample(tr.RANDOM_DASH, "sample random"), "random weights"], True))
    others = {t.place: t.dash for t in tracks if t.place in tr.other_places(diagnoses)}
    for place, dash in others.items():
        boxes.append(_box(f"place-{place}", [_sample(dash), f"at {place}"], len(diagnoses) == 1))
    if not tr.same_layers(diagnoses):
        boxes.append(_box("depth", ["relative depth"], False))
    if not boxes:
        return Markup("")
    return element("div", boxes, class_="controls", role="group", aria_label="What the curves show")


def curves(groups: Sequence[dict[str, Any]]) -> Markup:
    """A frame for each group of measures, with a choice of the measure."""
    return element("div", [_group(group) for group in groups], class_="panels")


def spectra(data: dict[str, Any]) -> Markup:
    """A frame with a slider over the layers."""
    plot = element(
        "div", class_="plot tall", id="spectrum-plot", role="group", aria_labelledby="spectra-h spectrum-says"
    )
    return element("figure", _slider("spectrum", data), plot, _caption("spectrum", data), class_="panel card")


def heatmaps(data: dict[str, Any], diagnoses: Sequence[Diagnosis]) -> Markup:
    """A frame for each diagnosis that has heat maps, side by side, with one slider."""
    named = tr.diagnosis_names(diagnoses)
    maps = [
        element(
            "div",
            element("h3", swatch(i), named[i]) if len(diagnoses) > 1 else None,
            element("div", class_="plot map", data_map=str(i), role="group", aria_labelledby="tokens-h heatmap-says"),
            element("div", class_="film", data_film=str(i), role="group", aria_label=f"Layers of {named[i]}"),
            class_="map-card",
        )
        for i, d in enumerate(diagnoses)
        if any(layer.heatmap for layer in d.layers)
    ]
    side_by_side = element("div", maps, class_="maps")
    return element("figure", _slider("heatmap", data), side_by_side, _caption("heatmap", data), class_="panel card")


def _group(group: dict[str, Any]) -> Markup:
    identity, first = group["id"], group["measures"][group["start"]]
    heading, says = f"group-{identity}", f"caption-{identity}"
    return element(
        "figure",
        element("h3", group["question"], id=heading),
        _choice(group),
        element("p", first["says"], class_="says"),
        element("div", class_="plot", role="group", aria_labelledby=f"{heading} {says}"),
        element("figcaption", first["caption"], id=says, aria_live="polite"),
        class_="panel card",
        data_group=identity,
    )


def _choice(group: dict[str, Any]) -> Markup:
    """One of the measures of a group: radio buttons that look like pills."""
    name = f"measure-{group['id']}"
    pills = [
        element(
            "label",
            element("input", type="radio", name=name, value=str(i), checked=i == group["start"]),
            element("span", measure["title"]),
        )
        for i, measure in enumerate(group["measures"])
    ]
    return element("fieldset", element("legend", "Measure", class_="hidden"), pills, class_="pills")


def _slider(name: str, data: dict[str, Any]) -> Markup:
    start, last = data["start"], len(data["steps"]) - 1
    return element(
        "div",
        element("label", "Layer", for_=f"{name}-slider"),
        element("input", type="range", id=f"{name}-slider", min="0", max=str(last), value=str(start), step="1"),
        element("output", data["steps"][start]["label"], id=f"{name}-layer", for_=f"{name}-slider"),
        class_="slider",
        hidden=last == 0,
    )


def _caption(name: str, data: dict[str, Any]) -> Markup:
    return element("figcaption", data["steps"][data["start"]]["says"], id=f"{name}-says", aria_live="polite")


def _box(name: str, label: list[Markup | str], checked: bool) -> Markup:
    return element("label", element("input", type="checkbox", data_show=name, checked=checked), element("span", label))


def _sample(dash: Sequence[int], looks: str = "sample") -> Markup:
    """A piece of the line as the figures draw it."""
    line = element("path", d="M0 4H27", stroke_dasharray=" ".join(map(str, dash)))
    return element("svg", line, class_=looks, viewBox="0 0 27 8", aria_hidden="true")
