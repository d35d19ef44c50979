"""The parts of the page, in their order: each with its heading, and only those that have something to show."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from uncollapse.diagnosis.result import Diagnosis
from uncollapse.report import layer_plots, number_tables, panels, sections
from uncollapse.report import layer_plots as steps
from uncollapse.report import tracks as tr
from uncollapse.report.markup import Markup, element

LAYERS = "Each line is the mean over the sequences, and the band around it holds the middle half of them."
SPECTRA = (
    "Singular values of all tokens around their mean, over their sum. "
    "A curve that drops early means that the tokens span few dimensions."
)
FAINT = " Faint lines are the other layers."
DASHED = " A dashed line is the same architecture with random weights."
TOKENS = "Cosines between the tokens of one example. A square that is bright all over: every token points the same way."
FILM = " The small pictures are the layers in their order; choose one."


@dataclass(frozen=True)
class Part:
    """A section of the page: `name` is its id and its link at the top."""

    name: str
    heading: str
    content: Sequence[Markup]

    def markup(self) -> Markup:
        """The section as HTML."""
        heading = element("h2", self.heading, id=f"{self.name}-h")
        return element("section", heading, self.content, id=self.name, aria_labelledby=f"{self.name}-h")


def data_of(diagnoses: Sequence[Diagnosis]) -> dict[str, Any]:
    """What the page's scripts draw. A single layer has no curves."""
    tracks = tr.build_tracks(diagnoses)
    return {
        "names": tr.diagnosis_names(diagnoses),
        "axis": layer_plots.axis_data(diagnoses, tracks),
        "groups": layer_plots.measure_groups(diagnoses, tracks) if len(tr.layer_axis(diagnoses)) > 1 else [],
        "spectra": steps.spectrum_steps(diagnoses),
        "heatmaps": steps.heatmap_steps(diagnoses),
    }


def parts(diagnoses: Sequence[Diagnosis], data: dict[str, Any]) -> Iterator[Part]:
    """All parts: what is most important comes first."""
    yield from _verdicts(diagnoses)
    yield from _figures(diagnoses, data)
    yield Part("numbers", "Numbers", [number_tables.numbers(diagnoses)])
    yield Part("measures", "How to read the measures", [number_tables.glossary(diagnoses)])
    yield Part("about", "Model, data and versions", [number_tables.about(diagnoses)])


def _verdicts(diagnoses: Sequence[Diagnosis]) -> Iterator[Part]:
    several = len(diagnoses) > 1
    cards = [
        sections.verdict(d, name, i, several=several)
        for i, (d, name) in enumerate(zip(diagnoses, tr.diagnosis_names(diagnoses), strict=True))
    ]
    notes = [
        element("noscript", element("p", "The figures need JavaScript. All numbers are in the table below.")),
        element("p", "This browser cannot draw the figures. All numbers are below.", id="no-figures", hidden=True),
    ]
    content = [*notes, element("div", cards, class_="cards")]
    yield Part("verdict", "Verdicts" if several else "Verdict", content)
    if several:
        yield Part("difference", "What differs", [sections.differences(diagnoses)])


def _figures(diagnoses: Sequence[Diagnosis], data: dict[str, Any]) -> Iterator[Part]:
    tracks = tr.build_tracks(diagnoses)
    dashed = DASHED * any(track.baseline for track in tracks)
    if data["groups"]:
        frames = [panels.controls(diagnoses, tracks), panels.curves(data["groups"])]
        yield Part("layers", "Layer by layer", [_lead(LAYERS + dashed), *frames])
    if data["spectra"]:
        lead = _lead(SPECTRA + FAINT * (len(data["spectra"]["steps"]) > 1) + dashed)
        yield Part("spectra", "Singular values", [lead, panels.spectra(data["spectra"])])
    if data["heatmaps"]:
        lead = _lead(TOKENS + FILM * (len(data["heatmaps"]["steps"]) > 1))
        yield Part("tokens", "Token by token", [lead, panels.heatmaps(data["heatmaps"], diagnoses)])


def _lead(text: str) -> Markup:
    return element("p", text, class_="lead")
