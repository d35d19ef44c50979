"""The tables and lists at the end of the page: all numbers, what they mean, and what was measured."""

from collections.abc import Mapping, Sequence

from uncollapse.diagnosis.describe import between
from uncollapse.diagnosis.measures import MEASURES
from uncollapse.diagnosis.result import Diagnosis, Layer
from uncollapse.report import tracks as tr
from uncollapse.report import words
from uncollapse.report.layer_plots import QUESTIONS, describe_measure
from uncollapse.report.markup import Markup, breakable, element, join
from uncollapse.report.sections import scroller, swatch

LONG = 16  # letters of a name that need a wider column


def numbers(diagnoses: Sequence[Diagnosis]) -> Markup:
    """Every layer with every measure; the headings are buttons that sort."""
    taken = {name for d in diagnoses for layer in d.layers for name in layer.measures}
    measures = [*(m for m in MEASURES if m in taken), *sorted(taken - set(MEASURES))]
    several, placed = len(diagnoses) > 1, len({layer.place for d in diagnoses for layer in d.layers}) > 1
    heads = ["#", "Layer", *["Diagnosis"] * several, *["Place"] * placed, *map(words.measure_title, measures)]
    rows = []
    for of, (name, d) in enumerate(zip(tr.diagnosis_names(diagnoses), diagnoses, strict=True)):
        for i, layer in enumerate(d.layers):
            which = [element("td", swatch(of), breakable(name), class_="which")] * several + [
                element("td", layer.place)
            ] * placed
            rows.append(_row(i + 1, layer, which, measures, layer.name == d.verdict.onset))
    first = len(heads) - len(measures)
    table = element(
        "table",
        element("caption", "All layers and measures: means over the sequences", class_="hidden"),
        element("thead", element("tr", [_sorting(head, i, number=i >= first) for i, head in enumerate(heads)])),
        element("tbody", rows),
        id="numbers-table",
        class_="long" if any(len(layer.name) > LONG for d in diagnoses for layer in d.layers) else None,
    )
    csv = element("button", "Download as CSV", type="button", id="csv", class_="action", hidden=True)
    return join([element("div", csv, class_="tools"), scroller(table, "All layers and measures")])


def glossary(diagnoses: Sequence[Diagnosis]) -> Markup:
    """What each measure that was taken means."""
    taken = {name for d in diagnoses for layer in d.layers for name in layer.measures}
    found = []
    for group, question in QUESTIONS.items():
        here = [m for m in MEASURES.values() if m.group == group and m.name in taken]
        if here:
            entries = [element("div", element("dt", m.title), element("dd", describe_measure(m))) for m in here]
            found.append(element("section", element("h3", question), element("dl", entries), class_="card"))
    return element("div", found, class_="cards glossary")


def about(diagnoses: Sequence[Diagnosis]) -> Markup:
    """Model, data, settings and versions, a column for each diagnosis."""
    head = element("tr", element("td"), [element("th", name, scope="col") for name in tr.diagnosis_names(diagnoses)])
    groups: tuple[tuple[str, list[Mapping[str, object]]], ...] = (
        ("Model and data", [_facts(d) for d in diagnoses]),
        ("Settings", [d.settings for d in diagnoses]),
        ("Versions", [d.versions for d in diagnoses]),
    )
    bodies = [_facts_rows(name, columns) for name, columns in groups if any(columns)]
    return scroller(element("table", element("thead", head), bodies, class_="about"), "Facts")


def _facts_rows(heading: str, columns: Sequence[Mapping[str, object]]) -> Markup:
    keys = list(dict.fromkeys(key for column in columns for key in column))
    rows = [
        element("tr", element("th", key, scope="row"), [element("td", _said(c.get(key, "–"))) for c in columns])
        for key in keys
    ]
    across = element("tr", element("th", heading, colspan=str(len(columns) + 1), scope="rowgroup"))
    return element("tbody", across, rows)


def _facts(d: Diagnosis) -> dict[str, object]:
    return {
        "architecture": d.architecture,
        "family": d.family,
        "parameters": f"{d.parameters:,}",
        "data": d.data,
        "measured": f"{d.batches:,} batches, {d.sequences:,} sequences, {d.tokens:,} tokens",
        "created": d.created,
        "time": f"{d.seconds:.1f} s",
    }


def _said(value: object) -> str:
    """A setting as people say it."""
    if value is None or value == "":
        return "not given"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(_said(item) for item in value) or "none"
    return str(value)


def _sorting(head: str, column: int, *, number: bool) -> Markup:
    button = element("button", head, element("span", class_="arrow", aria_hidden="true"), type="button")
    order = "none" if column else "ascending"
    return element("th", button, scope="col", aria_sort=order, class_="number" if number else None)


def _row(number: int, layer: Layer, which: list[Markup], measures: Sequence[str], onset: bool) -> Markup:
    cells = [
        element("td", words.format_number(layer[m]), data_v=repr(layer[m]), title=_spread(layer, m)) for m in measures
    ]
    name = [breakable(layer.name), element("span", "onset", class_="tag") if onset else None]
    path = element("small", breakable(layer.path)) if layer.path and layer.path != layer.name else None
    return element(
        "tr",
        element("td", str(number), data_v=str(number)),
        element("th", name, path, scope="row", data_v=layer.name),
        which,
        cells,
        class_="onset" if onset else None,
    )


def _spread(layer: Layer, measure: str) -> str | None:
    summary, interval = layer.measures.get(measure), layer.intervals.get(measure)
    if interval is not None:
        return f"{between(interval)}, over {interval.rows:,} {'pairs' if measure == 'alignment' else 'rows'}"
    if summary is None or summary.count < 2:
        return None
    return f"± {words.format_number(summary.std)} over {summary.count:,} sequences"
