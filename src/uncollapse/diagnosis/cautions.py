"""What goes with a verdict: reasons to be less sure of it, and what looks like collapse and is not."""

import math
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

from uncollapse.backbones.sites import OUTPUT
from uncollapse.diagnosis.case import ALIKE, SHARES, Case
from uncollapse.diagnosis.layer_stats import SAMPLE
from uncollapse.diagnosis.measures import MEASURES
from uncollapse.diagnosis.result import Evidence, Kind

CLOSE = 0.2  # a value within this part of its bound is a close call
SINK = 10.0  # times the length of other tokens from which a first token is called an attention sink
ROGUE = 0.3  # how far the largest features must raise the cosine to be called rogue
SAME = 0.999  # mean cosine of pooled sequences from which the input hardly matters
SMALLEST = 16  # features below which few dimensions cannot be told from many
WIDE = 256  # dimensions from which a smooth spectrum may have a low share
STILL = 0.6  # log rank over log ceiling from which a low share is still many dimensions


def doubts(case: Case) -> Iterator[tuple[int, str]]:
    """Reasons to be less sure, each with its weight."""
    yield from _about_amounts(case)
    for evidence in _close_calls(case):
        yield 1, f"A close call: {evidence.says} at {evidence.layer} (bound {evidence.bound:.2f})."
    yield from _about_sequences(case)
    if len(case.spine) > 3 and case.first == len(case.spine) - 1:
        narrowing = "Models that were trained on few classes narrow there on purpose"
        yield 1, f"Only the last block shows it. {narrowing}; look at the blocks before it."
    if len(case.spine) > 1 and case.first == 0:
        yield 1, f"It is there at {case.spine[0].name} already: the input is alike or narrow, not only the depth."
    for finding in case.found:
        dims, most = _dimensions(case, finding.evidence[-1])
        if finding.kind == "dimensional" and most > WIDE and math.log(max(dims, 1)) > STILL * math.log(most):
            smooth = "smooth spectra of wide layers have low shares too; look at the singular values"
            yield 1, f"These are still about {dims:.0f} dimensions of {most}: {smooth}."


def plain(case: Case) -> Iterator[str]:
    """Remarks that do not change how sure a verdict is."""
    if case.subject.outputs:
        yield f"{case.subject.outputs} narrows to the outputs; {case.last.name} before it is judged."
    yield from _outliers(case)
    yield from _passing(case)
    if case.subject.one_graph:
        yield "No batch vector came with the nodes: they count as one graph."
    yield from _beside(case)


def _about_amounts(case: Case) -> Iterator[tuple[int, str]]:
    seen, dim, noun = case.last.tokens, case.last.dim, case.nouns[0]
    if seen < 64:
        yield 2, f"Only {seen} {noun} were seen; give at least a few hundred."
    elif seen < 2 * dim:
        ceiling = f"bound the rank of the dataset by {seen - 1}; it is judged beside that ceiling"
        few = ceiling if seen <= dim else "are few: the rank of the dataset comes out too low"
        yield 1, f"{seen} {noun} of {dim} features {few}. Give {4 * dim} or more."
    elif dim > SAMPLE:
        yield 1, f"The rank share of the dataset comes from {SAMPLE} {noun}, fewer than the {dim} features."
    if dim < SMALLEST:
        yield 1, f"{dim} features are few: a rank that is low is not far from one that is full."
    if case.sequences < 8 and seen < 512 * case.sequences and case.subject.family != "embeddings":
        few = "one set was" if case.sequences == 1 else f"{case.sequences} sets were"
        yield 1, f"Only {few} seen; how much they differ is not known well."
    if "rank_share" not in case.last.measures:
        yield 1, f"No set had three {noun}: they are judged over the whole dataset, not within {case.nouns[1]}."


def _about_sequences(case: Case) -> Iterator[tuple[int, str]]:
    """Sequences that differ in their health, or do not differ at all."""
    cosine = case.last.measures.get("robust_cosine")
    if cosine is not None and not case.found and cosine.quantiles and cosine.mean < ALIKE <= cosine.quantiles[3]:
        yield 1, f"At {case.last.name} a quarter of the sets or more are alike (cosine {cosine.quantiles[3]:.2f})."
    if case.last["pooled_cosine"] >= SAME and not any(f.kind == "complete" for f in case.found):
        yield (
            2,
            (
                f"All sets look the same at {case.last.name}: the cosine of their means is "
                f"{case.last['pooled_cosine']:.4f}. Either they are, or the model hardly looks at its input."
            ),
        )


def _dimensions(case: Case, evidence: Evidence) -> tuple[float, int]:
    """How many dimensions a share stands for, and how many there could be."""
    sampled = evidence.measure == "dataset_rank_share" or case.subject.family == "embeddings"
    rows = case.last.tokens if sampled else case.last.tokens / max(1, case.sequences)
    most = max(1, int(min(rows - 1, case.last.dim, SAMPLE - 1 if sampled else rows)))
    return evidence.value * most, most


def _close_calls(case: Case) -> list[Evidence]:
    """Values at the last block that lie near their bound, on either side."""
    shown = [finding.evidence[-1] for finding in case.found] or list(case.healthy())
    room = {e: 1 - e.bound if e.measure == "robust_cosine" else e.bound for e in shown}
    return [e for e in shown if abs(e.value - e.bound) < CLOSE * room[e]]


def _outliers(case: Case) -> Iterator[str]:
    """What looks like collapse and is not."""
    rogue = max(case.spine, key=lambda layer: layer["mean_cosine"] - layer["robust_cosine"])
    if rogue["mean_cosine"] - rogue["robust_cosine"] > ROGUE:
        yield (
            f"Rogue features: at {rogue.name} the mean cosine of {case.nouns[0]} is {rogue['mean_cosine']:.2f}, "
            f"and {rogue['robust_cosine']:.2f} without the three largest features. That is no collapse."
        )
    sinks = [layer for layer in case.spine if layer["first_token_norm"] > SINK]
    if sinks:
        worst = max(sinks, key=lambda layer: layer["first_token_norm"])
        yield (
            f"First token: at {worst.name} it is {worst['first_token_norm']:.0f} times as long as the others and "
            f"rules the raw rank ({worst['effective_rank']:.1f}). That is an attention sink, no collapse."
        )


def _passing(case: Case) -> Iterator[str]:
    """Runs of at least two layers that look collapsed and recover."""
    kinds: tuple[tuple[Kind, str], ...] = (("complete", "alike"), ("dimensional", "narrow"))
    for kind, word in kinds:
        seen = [(case.shows(kind, at) is not None, layer.name) for at, layer in enumerate(case.spine[: case.first])]
        for collapsed, run in groupby(seen, itemgetter(0)):
            names = [name for _, name in run]
            if collapsed and len(names) > 1:
                yield f"In between, from {names[0]} to {names[-1]}, {case.nouns[0]} are {word}, and recover."


def _beside(case: Case) -> Iterator[str]:
    """The same layer of a randomly initialised model."""
    own = case.last
    twin = {layer.name: layer for layer in case.random if layer.place == OUTPUT}.get(own.name)
    if twin is not None:
        names = ("robust_cosine", *SHARES)
        taken = [name for name in names if name in own.measures and name in twin.measures]
        facts = (f"a {MEASURES[name].short} of {twin[name]:.2f} (here {own[name]:.2f})" for name in taken[:2])
        yield f"Randomly initialised, this architecture has at {own.name} {' and '.join(facts)}."
    elif case.subject.no_twin:
        yield f"There is no random model beside it: {case.subject.no_twin}"
