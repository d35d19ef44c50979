"""The verdicts and their differences: what the page says first, without any script."""

import math
from collections.abc import Sequence

from uncollapse.diagnosis.describe import between
from uncollapse.diagnosis.result import Advice, Diagnosis, Evidence
from uncollapse.report import tracks as tr
from uncollapse.report import words
from uncollapse.report.markup import Markup, element
from uncollapse.report.sparkline import sparkline

BADGES = {
    "none": "No collapse found",
    "complete": "Complete collapse",
    "dimensional": "Dimensional collapse",
    "both": "Complete and dimensional collapse",
}
TILES = ("mean_cosine", "effective_rank", "dataset_rank_share", "attention_similarity", "mean_average_distance")
MORE_TILES = (
    "dataset_rank",
    "feature_correlation",
    "alignment",
    "uniformity",
    "uniformity_gap",
    "pooled_uniformity",
)


def verdict(d: Diagnosis, name: str, of: int, *, several: bool) -> Markup:
    """The verdict of one diagnosis: badge, sentence, main numbers, evidence, cautions, advice."""
    v = d.verdict
    facts = ({"Onset": v.onset} if v.onset else {}) | {"Certainty": v.certainty}
    return element(
        "article",
        element("h3", swatch(of), name, class_="card-name") if several else None,
        element("p", element("span", BADGES[v.kind], class_=f"badge {v.kind}"), class_="badges"),
        element("p", v.sentence, class_="sentence"),
        element("p", subtitle(d), class_="meta") if several else None,
        element("dl", [element("div", element("dt", k), element("dd", x)) for k, x in facts.items()], class_="facts"),
        tiles(d, of),
        _grounds(d, name, "h4" if several else "h3"),
        class_="card verdict",
    )


def subtitle(d: Diagnosis) -> str:
    """Architecture, size, and how much was fed, in a line."""
    parts = [d.architecture, f"{_size(d.parameters)} parameters" if d.parameters else ""]
    parts += [d.data, f"{d.tokens:,} tokens"]
    return " · ".join(part for part in parts if part)


def swatch(of: int) -> Markup:
    """The colour and the sign by which the figures know a diagnosis."""
    return element("span", class_=f"swatch s{of % 6}", aria_hidden="true")


def tiles(d: Diagnosis, of: int) -> Markup:
    """The main numbers, with a small curve where there are several layers."""
    layers = tr.main_layers(d)
    wanted = TILES if len(layers) > 1 else (*TILES, *MORE_TILES)
    shown = [m for m in wanted if any(math.isfinite(layer[m]) for layer in layers)]
    return element("ul", [_tile(d, m, of) for m in shown], class_="tiles") if shown else Markup("")


def differences(diagnoses: Sequence[Diagnosis]) -> Markup:
    """Each diagnosis beside the first, in sentences."""
    named = tr.diagnosis_names(diagnoses)
    pairs = [
        element(
            "div",
            element("h3", swatch(i), named[i], element("span", " beside ", class_="quiet"), swatch(0), named[0]),
            element("ul", [element("li", text) for text in words.difference(diagnoses[0], d)], class_="sentences"),
            class_="card",
        )
        for i, d in enumerate(diagnoses)
        if i
    ]
    return element("div", pairs, class_="cards")


def _size(count: int) -> str:
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return str(count)


def _tile(d: Diagnosis, measure: str, of: int) -> Markup:
    values = [layer[measure] for layer in tr.main_layers(d) if math.isfinite(layer[measure])]
    beside = [layer[measure] for layer in d.baseline if layer.place == tr.main_place(d)]
    random = [value for value in beside if math.isfinite(value)]
    interval = tr.main_layers(d)[-1].intervals.get(measure)
    start = element("span", f"{words.format_number(values[0])} → ", class_="quiet") if len(values) > 1 else None
    return element(
        "li",
        element("span", words.measure_title(measure), class_="tile-title"),
        element("span", start, words.format_number(values[-1]), class_="tile-value"),
        sparkline(values, random, f"s{of % 6}") if len(values) > 1 else None,
        element("span", between(interval), class_="quiet") if interval else None,
        element("span", f"random weights: {words.format_number(random[-1])}", class_="quiet") if random else None,
    )


def _grounds(d: Diagnosis, name: str, heading: str) -> Markup:
    """Why, how far to trust it, and what to try; nothing where there is nothing to say."""
    reasons = [_evidence(d.verdict.evidence, name, heading), _cautions(d.verdict.cautions, heading)]
    columns = [element("div", reasons) if any(reasons) else None, _advice(d.verdict.advice, heading)]
    return element("div", columns, class_="grounds") if any(columns) else Markup("")


def _evidence(evidence: Sequence[Evidence], name: str, heading: str) -> Markup | None:
    if not evidence:
        return None
    heads = ("Layer", "Measure", "Value", "Bound")
    rows = [
        element(
            "tr",
            element("th", e.layer, scope="row"),
            element("td", words.measure_title(e.measure), element("small", e.says)),
            element("td", words.format_number(e.value), class_="number"),
            element("td", words.format_number(e.bound), class_="number"),
        )
        for e in evidence
    ]
    head = element("tr", [element("th", h, scope="col", class_="number" if h in heads[2:] else None) for h in heads])
    table = element("table", element("thead", head), element("tbody", rows), class_="evidence")
    return element("div", element(heading, "Evidence"), scroller(table, f"Evidence on {name}"))


def _cautions(cautions: Sequence[str], heading: str) -> Markup | None:
    if not cautions:
        return None
    items = [element("li", text) for text in cautions]
    return element("div", element(heading, "Good to know"), element("ul", items, class_="cautions"))


def _advice(advice: Sequence[Advice], heading: str) -> Markup | None:
    if not advice:
        return None
    items = [
        element(
            "li",
            element("p", element("strong", a.cure), " at ", element("strong", a.place), ": ", a.reason),
            element(
                "div",
                element("pre", element("code", a.code)),
                element("button", "Copy", type="button", class_="copy", aria_label=f"Copy the code for {a.cure}"),
                class_="code",
            ),
        )
        for a in advice
    ]
    return element("div", element(heading, "What to try"), element("ol", items, class_="advice"))


def scroller(table: Markup, label: str) -> Markup:
    """Room for a table that is wider than the page; it can be scrolled with the keyboard too."""
    return element("div", table, class_="scroller", tabindex="0", role="region", aria_label=label)
