"""The report: one or several diagnoses as one self-contained HTML page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from uncollapse.diagnosis.result import Diagnosis
from uncollapse.report import frame, sections, words
from uncollapse.report import tracks as tr
from uncollapse.report.plot_data import page_data

SCRIPTS = ("table.js", "figures.js")
LONG_NAME = 16  # letters of a layer's name that need a wider column


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
        links={name: name.capitalize() for name in _section_names(diagnoses, data)},
        names=names,
        data=data,
        packed_plotly=frame.packed_plotly(),
        **_context(diagnoses),
    )


def _section_names(diagnoses: Sequence[Diagnosis], data: dict[str, Any]) -> list[str]:
    """Return the identifiers of the sections that have something to show, the most important first."""
    plots = {"layers": data["groups"], "spectra": data["spectra"], "tokens": data["heatmaps"]}
    compared = ["difference"] if len(diagnoses) > 1 else []
    return ["verdict", *compared, *(name for name, found in plots.items() if found), "numbers", "measures", "about"]


def _context(diagnoses: Sequence[Diagnosis]) -> dict[str, Any]:
    """Return what the template shows besides the plots."""
    layers = [layer for d in diagnoses for layer in d.layers]
    tracks = tr.build_tracks(diagnoses)
    return {
        "diagnoses": diagnoses,
        "differences": [words.difference(diagnoses[0], d) for d in diagnoses[1:]],
        "has_baseline": any(track.baseline for track in tracks),
        "checkboxes": sections.checkboxes(diagnoses, tracks),
        "measures": sections.measure_names(diagnoses),
        "several_places": len({layer.place for layer in layers}) > 1,
        "has_long_names": any(len(layer.name) > LONG_NAME for layer in layers),
        "glossary": sections.glossary(diagnoses),
        "facts": sections.facts(diagnoses),
        "BADGES": sections.BADGES,
        "summary_line": sections.summary_line,
        "tiles": sections.tiles,
        "spread_note": sections.spread_note,
    }


def _subtitle(diagnoses: Sequence[Diagnosis]) -> str:
    if len(diagnoses) == 1:
        return sections.summary_line(diagnoses[0])
    return f"{len(diagnoses)} diagnoses; the first is the reference."
