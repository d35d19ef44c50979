"""The verdict on a model: kind and onset, how sure, the evidence, what to know about it and what to try."""

from dataclasses import replace

from uncollapse.backbones.sites import OUTPUT
from uncollapse.diagnosis import cautions
from uncollapse.diagnosis.advice import advice
from uncollapse.diagnosis.case import Case, Subject
from uncollapse.diagnosis.result import Certainty, Kind, Layer, Verdict


def judge(layers: tuple[Layer, ...], random: tuple[Layer, ...], subject: Subject, sequences: int) -> Verdict:
    """The verdict on the residual stream of a model."""
    spine = tuple(layer for layer in layers if layer.place == OUTPUT and layer.name != "final")
    if subject.family == "pyg" and _ends_in_outputs(spine):
        subject = replace(subject, outputs=spine[-1].name, hidden=len(spine) - 2)  # without the nodes that enter
        spine = spine[:-1]
    case = Case(spine, random, subject, sequences)
    kind: Kind = "both" if len(case.found) == 2 else case.found[0].kind if case.found else "none"
    onset = case.spine[case.first].name if case.found else None
    doubts = list(cautions.doubts(case))
    told = (*(text for _, text in doubts), *cautions.plain(case))
    evidence = tuple(e for finding in case.found for e in finding.evidence) or case.healthy()
    tips = advice(kind, onset, subject) if onset else ()
    return Verdict(kind, onset, certainty(sum(weight for weight, _ in doubts)), case.sentence(), evidence, told, tips)


def _ends_in_outputs(spine: tuple[Layer, ...]) -> bool:
    """Whether the last of several convolutions narrows: what leaves it are outputs, such as logits, not features."""
    return len(spine) > 3 and spine[-1].dim < spine[-2].dim


def certainty(doubt: int) -> Certainty:
    """How sure a verdict is, by the weight of its doubts."""
    return "high" if doubt == 0 else "medium" if doubt == 1 else "low"
