"""Numbers and differences between diagnoses in words."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from uncollapse.diagnosis.measures import MEASURES
from uncollapse.diagnosis.result import Diagnosis, Layer
from uncollapse.report.tracks import layer_name, main_layers, match_layers, same_layers

KINDS = {
    "none": "no collapse",
    "complete": "complete collapse",
    "dimensional": "dimensional collapse",
    "both": "complete and dimensional collapse",
}
COMPARED = (
    "mean_cosine",
    "effective_rank",
    "dataset_rank",
    "attention_similarity",
    "dirichlet_energy",
    "uniformity",
    "uniformity_gap",
    "alignment",
)
IN_PERCENT = ("uniformity_gap",)
PARAMETERS = {"uniformity": "t", "uniformity_gap": "t", "alignment": "alpha"}  # of measures; 2 by default
ROWS = {  # words about tokens -> about rows of embeddings
    "tokens of a sequence": "rows",
    "the tokens of one example": "a few rows",
    "of the example": "of these",
    "sequences": "samples",
    "sequence": "sample",
    "Tokens": "Rows",
    "tokens": "rows",
    "Token": "Row",
    "token": "row",
}
SAME_RATIO, SAME_STEP = 1.02, 0.01  # smaller changes are not mentioned


@dataclass(frozen=True)
class Change:
    """The change of a measure between two layers that match."""

    before: Layer
    after: Layer
    measure: str

    @property
    def values(self) -> tuple[float, float]:
        """Return the measure before and after."""
        return self.before[self.measure], self.after[self.measure]

    @property
    def ratio(self) -> float | None:
        """Return after / before for measures in [0, ∞); None for measures that are compared by difference."""
        a, b = self.values
        low, high = MEASURES[self.measure].bounds
        return b / a if low == 0 and high is None and a > 0 and b > 0 else None

    @property
    def size(self) -> float:
        """Return how far apart the two values are, by which changes are compared."""
        a, b = self.values
        return abs(math.log(self.ratio)) if self.ratio else abs(b - a)

    @property
    def matters(self) -> bool:
        """Return whether the change is large enough to be mentioned."""
        return self.size > (math.log(SAME_RATIO) if self.ratio else SAME_STEP)


def format_number(value: float | None) -> str:
    """Return a number with about three digits: 0.873, 27.3, 1,234, 3.2e-5; a dash if it was not measured."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(value)
    if 0 < size < 0.001 or size >= 1e7:
        digits, _, power = f"{value:.1e}".partition("e")
        text = f"{digits}e{int(power)}"
    else:
        text = f"{value:,.{3 if size < 1 else 2 if size < 10 else 1 if size < 100 else 0}f}"
    return text.replace("-", "−")


def join_words(items: Sequence[str]) -> str:
    """Return items as in a sentence: "a, b and c"."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def measure_title(measure: str) -> str:
    """Return the title of a measure, or its name if this version does not know it."""
    return MEASURES[measure].title if measure in MEASURES else measure


def title_in_sentence(measure: str) -> str:
    """Return the title of a measure for use inside a sentence."""
    text = measure_title(measure)
    return text if text.startswith("Dirichlet") else text[0].lower() + text[1:]


def speak(text: str, diagnoses: Sequence[Diagnosis]) -> str:
    """Return a text about tokens; for diagnoses of embeddings only, about rows.

    >>> speak("cosine of two tokens", ())
    'cosine of two tokens'
    """
    if not diagnoses or any(d.family != "embeddings" for d in diagnoses):
        return text
    for old, new in ROWS.items():
        text = re.sub(rf"\b{old}\b", new, text)
    return text


def describe_path(layers: Sequence[Layer], measure: str) -> str:
    """Return how a measure changes over the layers: "0.21 at embed → 0.87 at block 5"."""
    there = [layer for layer in layers if not math.isnan(layer[measure])]
    if not there:
        return "not measured"
    ends = there[:1] if len(there) == 1 else [there[0], there[-1]]
    return " → ".join(f"{format_number(layer[measure])} at {layer.name}" for layer in ends)


def difference(a: Diagnosis, b: Diagnosis) -> list[str]:
    """Return what distinguishes b from a, in sentences: the verdict, then where the measures differ most.

    Layers are matched by name and place, or by relative depth if the models have different blocks.
    """
    sentences = [_compare_verdicts(a, b)]
    if a.data != b.data and a.family == b.family == "embeddings":  # two models' embeddings are in two files
        files = f"{a.data or 'not named'}; {b.data or 'not named'}"
        sentences.append(
            f"They were read from {files}. Compare them only if both have the same inputs, in the same order."
        )
    elif a.data != b.data:
        sentences.append(f"They were measured on different data: {a.data or 'not named'}; {b.data or 'not named'}.")
    elif a.tokens != b.tokens:
        amounts = f"{a.tokens:,} and {b.tokens:,} tokens"
        sentences.append(speak(f"They were measured on {amounts}: ranks depend on how many there are.", (a, b)))
    if not same_layers([a, b]) and max(len(main_layers(d)) for d in (a, b)) > 1:
        counts = f"{len(main_layers(a))} and {len(main_layers(b))}"
        sentences.append(f"The models have different layers, {counts} of them, compared at the same relative depth.")
    left_out = _incomparable(a, b)
    sentences += left_out.values()
    changes = [found for measure in COMPARED if measure not in left_out and (found := _changes(a, b, measure))]
    if not changes:
        sentences.append("No measure was taken in both at layers that belong together.")
    for found in changes:
        sentences += _largest_changes(found)
    return sentences


def _incomparable(a: Diagnosis, b: Diagnosis) -> dict[str, str]:
    """Return a sentence for each measure that was taken with different parameters, and so is not compared."""
    found = {}
    for measure, name in PARAMETERS.items():
        one, other = (d.settings.get(name, 2) for d in (a, b))
        if one != other:
            reason = f"taken with {name} = {one:g} and {name} = {other:g}"
            found[measure] = f"The {title_in_sentence(measure)} is not compared: it was {reason}."
    return found


def _compare_verdicts(a: Diagnosis, b: Diagnosis) -> str:
    one, other = (_describe_verdict(d) for d in (a, b))
    if one == other:
        return f"The verdict stays the same: {one}."
    return f"The verdict is {other} instead of {one}."


def _describe_verdict(d: Diagnosis) -> str:
    return KINDS[d.verdict.kind] + (f" from {d.verdict.onset} on" if d.verdict.onset else "")


def _changes(a: Diagnosis, b: Diagnosis, measure: str) -> list[Change]:
    found = [Change(one, other, measure) for one, other in match_layers(a, b)]
    return [change for change in found if all(map(math.isfinite, change.values))]


def _largest_changes(changes: list[Change]) -> list[str]:
    """Return a sentence on the layer where a measure differs most, and one on the last layer if that is another."""
    largest, last = max(changes, key=lambda change: change.size), _last_change(changes)
    if not largest.matters:
        return [f"The {title_in_sentence(largest.measure)} is the same at every layer, or nearly."]
    shown = [largest] if largest is last or not last.matters else [largest, last]
    return [_sentence(change, "last" if change is last and len(changes) > 1 else "") for change in shown]


def _last_change(changes: list[Change]) -> Change:
    main = [change for change in changes if change.after.place == changes[0].after.place]
    return main[-1]


def _format_ratio(ratio: float) -> str:
    if ratio > 1000:
        return "more than 1,000×"
    return f"{ratio:.{2 if ratio < 1 else 1 if ratio < 10 else 0}f}×" if ratio >= 0.005 else "less than 0.01×"


def _sentence(change: Change, where: str) -> str:
    a, b = change.values
    name, other = layer_name(change.after), layer_name(change.before)
    notes = [f"{where} layer"] if where else []
    notes += [f"{other} in the first"] if name != other else []
    at = name + (f" ({', '.join(notes)})" if notes else "")
    unit = " %" if change.measure in IN_PERCENT else ""
    points = " points" if unit else ""
    step = _format_ratio(change.ratio) if change.ratio else f"{'+' if b > a else ''}{format_number(b - a)}{points}"
    values = f"{format_number(b)}{unit} instead of {format_number(a)}{unit} ({step})"
    return f"At {at} the {title_in_sentence(change.measure)} is {values}.{_overlap(change)}"


def _overlap(change: Change) -> str:
    """Return whether the confidence intervals overlap; empty if there are none."""
    one, other = (layer.intervals.get(change.measure) for layer in (change.before, change.after))
    if one is None or other is None:
        return ""
    return f" Their intervals {'overlap' if one.low <= other.high and other.low <= one.high else 'do not overlap'}."
