"""Diagnoses -> one HTML file that needs nothing else."""

from collections.abc import Sequence
from pathlib import Path

from uncollapse import __version__
from uncollapse.diagnosis.result import Diagnosis
from uncollapse.io import files
from uncollapse.report import sections, words
from uncollapse.report import tracks as tr
from uncollapse.report.library import asset, packed_plotly, plotly
from uncollapse.report.markup import Child, Markup, data_script, element, fingerprint
from uncollapse.report.parts import Part, data_of, parts

SCRIPTS = ("table.js", "figures.js")


def write(diagnoses: Diagnosis | Sequence[Diagnosis], path: str | Path, *, title: str | None = None) -> Path:
    """Write a report: one self-contained HTML page.

    Args:
        diagnoses: one, or several that are laid over each other; the first is the one that others are compared with.
        path: where to; the file is there as a whole or not at all.
        title: the heading; the name of the model, or the names of all of them, if not given.
    """
    given = (diagnoses,) if isinstance(diagnoses, Diagnosis) else tuple(diagnoses)
    if not given:
        raise ValueError("A report needs at least one diagnosis, got none.")
    text = page(given, title).encode("utf-8", errors="replace")  # file names may hold lone surrogates
    return files.write(Path(path), text)


def page(diagnoses: Sequence[Diagnosis], title: str | None = None) -> str:
    """The page as text."""
    heading = title or words.join_words(tr.diagnosis_names(diagnoses))
    data = data_of(diagnoses)
    found = list(parts(diagnoses, data))
    scripts = [asset(name) for name in SCRIPTS]
    body: list[Child] = [
        element("a", "Skip to the report", href="#main", class_="skip"),
        _bar(found),
        element(
            "main",
            element("div", element("h1", heading), _subtitle(diagnoses), class_="title"),
            [part.markup() for part in found],
            id="main",
        ),
        element("footer", element("p", f"Written by uncollapse {__version__}. This page sends and loads nothing.")),
        data_script("report-data", data),
        element("script", Markup(packed_plotly()), type="text/plain", id="plotly-packed"),
        [element("script", Markup(script)) for script in scripts],
    ]
    return document(heading, [*scripts, plotly()], body)


def document(title: str, scripts: Sequence[str], body: Child) -> str:
    """The frame of every page that this package writes: style, title, and what the page is allowed to do."""
    head = [
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy(scripts)),
        element("meta", name="referrer", content="no-referrer"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{title} · uncollapse"),
        element("style", Markup(asset("report.css"))),
    ]
    return f"<!doctype html>\n{element('html', element('head', head), element('body', body), lang='en')}\n"


def top(what: str, links: Sequence[Child], label: str) -> list[Child]:
    """The link that leads past the bar, to what the page is about, and the bar with links to its parts."""
    name, nav = element("p", "uncollapse", class_="brand"), element("nav", list(links), aria_label=label)
    return [
        element("a", f"Skip to the {what}", href="#main", class_="skip"),
        element("header", name, nav, class_="bar"),
    ]


def policy(scripts: Sequence[str]) -> str:
    """What a browser may do with a page: nothing, but for its own style, its own pictures and these scripts.

    Scripts run by their fingerprint only: one that a name smuggles in would not, even if it got into the page. Styles
    are allowed as they stand, because plotly makes some while it draws and plots have them in their elements; as
    nothing can be loaded, a style has nowhere to send what it sees. blob: is for pictures that the reader saves.
    """
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(map(fingerprint, scripts)) or "'none'",
        "style-src": "'unsafe-inline'",
        "img-src": "data: blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {allowed}" for name, allowed in rules.items())


def _bar(found: Sequence[Part]) -> Markup:
    """What stays at the top: links to the parts, and the choice of the theme."""
    links = [element("a", part.name.capitalize(), href=f"#{part.name}") for part in found]
    return element(
        "header",
        element("p", "uncollapse", class_="brand"),
        element("nav", links, aria_label="Parts of the report"),
        element("button", "Dark theme", type="button", id="theme", hidden=True),
        class_="bar",
    )


def _subtitle(diagnoses: Sequence[Diagnosis]) -> Markup:
    if len(diagnoses) == 1:
        return element("p", sections.subtitle(diagnoses[0]), class_="meta")
    return element("p", f"{len(diagnoses)} diagnoses; the first is the reference.", class_="meta")
