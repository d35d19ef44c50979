"""List what a reader must know about a verdict: reasons for doubt, and effects that only look like collapse."""

import math
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

from uncollapse.backbones.sites import OUTPUT
from uncollapse.diagnosis.layer_measures import sample_size
from uncollapse.diagnosis.measures import MEASURES
from uncollapse.diagnosis.result import Certainty, Evidence, Kind
from uncollapse.diagnosis.verdict import ALIKE, SHARES, Findings

CLOSE = 0.2  # a value within this fraction of its bound is a close call
SINK = 10.0  # a first token at least this many times as long as the others is called an attention sink
ROGUE = 0.3  # how far the largest features must raise the cosine to be called rogue
MASSIVE = 1000.0  # a largest activation this many times the median is called massive (arXiv 2402.17762)
GROWTH = 10.0  # growth of the tokens' lengths over the blocks that is mentioned
SAME = 0.999  # mean cosine of pooled sequences from which the input hardly matters
SMALLEST = 16  # features below which a low rank is hard to distinguish from a full one
UNKNOWN = 0.05, 0.25  # shares of unknown tokens from which a verdict is less certain, and uncertain
WIDE = 256  # dimensions from which a smooth spectrum may have a low share
STILL = 0.6  # log rank over log ceiling from which a low share still means many dimensions


def list_cautions(findings: Findings) -> tuple[Certainty, tuple[str, ...]]:
    """Return how certain a verdict is, and all cautions that go with it, the reasons for doubt first."""
    doubts = list(_doubts(findings))
    texts = (*(text for _, text in doubts), *_remarks(findings))
    return _certainty(sum(weight for weight, _ in doubts)), texts


def _certainty(doubt: int) -> Certainty:
    return "high" if doubt == 0 else "medium" if doubt == 1 else "low"


def _doubts(found: Findings) -> Iterator[tuple[int, str]]:
    """Yield the reasons to be less certain, each with its weight."""
    yield from _about_amounts(found)
    if found.subject.unknown >= UNKNOWN[0]:
        alike = "all of these become the same token, so layers look more alike than on known words"
        weight = 2 if found.subject.unknown >= UNKNOWN[1] else 1
        yield weight, f"The tokenizer does not know {found.subject.unknown:.0%} of the tokens: {alike}."
    for evidence in _close_calls(found):
        yield 1, f"A close call: {evidence.says} at {evidence.layer} (bound {evidence.bound:.2f})."
    yield from _about_sequences(found)
    if len(found.layers) > 3 and found.first == len(found.layers) - 1:
        narrowing = "Models trained on few classes use few dimensions there by design"
        yield 1, f"Only the last block shows it. {narrowing}; look at the blocks before it."
    if len(found.layers) > 1 and found.first == 0 and not found.subject.partial:
        yield 1, f"{found.layers[0].name} is already collapsed: the input itself is alike or spans few dimensions."
    for collapse in found.collapses:
        dims, most = _dimensions(found, collapse.evidence[-1])
        if collapse.kind == "dimensional" and most > WIDE and math.log(max(dims, 1)) > STILL * math.log(most):
            smooth = "smooth spectra of wide layers also have low shares; look at the singular values"
            yield 1, f"The rank is still about {dims:.0f} of {most}: {smooth}."


def _remarks(found: Findings) -> Iterator[str]:
    """Yield remarks that do not change the certainty of a verdict."""
    if found.subject.remark:
        yield found.subject.remark
    if found.subject.part:
        yield f"This is about one part of the model, {found.subject.part}."
    if found.subject.idle:
        yield f"These parts did not run on the batches and were not measured: {', '.join(found.subject.idle)}."
    if found.subject.outputs:
        yield f"{found.subject.outputs} narrows to the outputs, so the verdict is about {found.last.name} before it."
    if found.subject.partial:
        yield f"Only some of the {found.subject.blocks} blocks were measured; the verdict is about these."
    if found.subject.passes > 1:
        runs = f"{found.subject.architecture} runs {found.subject.passes} times per batch"
        yield f"{runs}; all of these runs are counted."
    if found.subject.skipped:
        batches = "1 batch was" if found.subject.skipped == 1 else f"{found.subject.skipped} batches were"
        yield f"{batches} left out: empty, or only padding."
    if found.subject.unpaired:
        batches = "1 batch has" if found.subject.unpaired == 1 else f"{found.subject.unpaired} batches have"
        yield f"{batches} a second view that is only padding; alignment leaves these out."
    if found.subject.spare_pairs:
        yield "There are more pairs than batches; the rest was not read. Check that each is a view of its batch."
    yield from _outliers(found)
    yield from _recoveries(found)
    if found.subject.one_graph:
        yield "The nodes came without a batch vector, so they count as one graph."
    yield from _compared_with_random(found)


def _about_amounts(found: Findings) -> Iterator[tuple[int, str]]:
    seen, dim, noun = found.last.tokens, found.last.dim, found.nouns[0]
    if seen < 64:
        yield 2, f"Only {seen} {noun} were measured; pass at least a few hundred."
    elif seen < 2 * dim:
        ceiling = f"limit the rank of the dataset to {seen - 1}; its share is relative to this limit"
        few = ceiling if seen <= dim else "are few: the rank of the dataset is underestimated"
        yield 1, f"{seen} {noun} of {dim} features {few}. Use {4 * dim:,} {noun} or more."
    elif dim > (size := sample_size(dim)):
        yield 1, f"The rank share of the dataset comes from {size} {noun}, fewer than the {dim} features."
    if dim < SMALLEST:
        yield 1, f"{dim} features are few: a low rank is hard to distinguish from a full one."
    if found.sequences < 8 and seen < 512 * found.sequences and found.subject.family != "embeddings":
        few = "one sequence was" if found.sequences == 1 else f"{found.sequences} sequences were"
        yield 1, f"Only {few} measured: too few to tell how much sequences differ."
    if "rank_share" not in found.last.measures:
        yield 1, f"{_sets(found)} have fewer than three {noun}, so {noun} are compared over the whole dataset."


def _about_sequences(found: Findings) -> Iterator[tuple[int, str]]:
    """Yield doubts about sequences of which only some are healthy, or that do not differ at all."""
    cosine, pooled = found.last.measures.get("robust_cosine"), found.last["pooled_cosine"]
    if cosine is not None and not found.collapses and cosine.quantiles and cosine.mean < ALIKE <= cosine.quantiles[3]:
        sets = f"In at least a quarter of the {_sets(found).lower()}"
        yield 1, f"{sets}, {found.nouns[0]} are alike at {found.last.name} (cosine {cosine.quantiles[3]:.2f})."
    if pooled >= SAME and not any(collapse.kind == "complete" for collapse in found.collapses):
        same = (
            f"All {_sets(found).lower()} look the same at {found.last.name}: the cosine of their means is {pooled:.4f}"
        )
        yield 2, f"{same}. Either the inputs are the same, or the model hardly uses them."


def _sets(found: Findings) -> str:
    """Return what the rows come in: "Sequences", "Graphs" or "Samples"."""
    return f"{found.nouns[1].split()[-1].capitalize()}s"


def _dimensions(found: Findings, evidence: Evidence) -> tuple[float, int]:
    """Return how many dimensions a share stands for, and how many there could be."""
    sampled = evidence.measure == "dataset_rank_share" or found.subject.family == "embeddings"
    rows = found.last.tokens if sampled else found.last.tokens / max(1, found.sequences)
    most = max(1, int(min(rows - 1, found.last.dim, sample_size(found.last.dim) - 1 if sampled else rows)))
    return evidence.value * most, most


def _close_calls(found: Findings) -> list[Evidence]:
    """Return values at the last block that lie near their bound, on either side."""
    shown = [collapse.evidence[-1] for collapse in found.collapses] or list(found.healthy())
    room = {e: 1 - e.bound if e.measure == "robust_cosine" else e.bound for e in shown}
    return [e for e in shown if abs(e.value - e.bound) < CLOSE * room[e]]


def _outliers(found: Findings) -> Iterator[str]:
    """Yield what looks like collapse but is not."""
    rogue = [layer for layer in found.layers if layer["mean_cosine"] - layer["robust_cosine"] > ROGUE]
    if rogue:
        worst = max(rogue, key=lambda layer: layer["mean_cosine"] - layer["robust_cosine"])
        yield (
            f"Rogue features: at {worst.name} the mean cosine of {found.nouns[0]} is {worst['mean_cosine']:.2f}, "
            f"and {worst['robust_cosine']:.2f} without the three largest features. This is not collapse."
        )
    sinks = [layer for layer in found.layers if layer["first_token_norm"] > SINK]
    if sinks:
        worst = max(sinks, key=lambda layer: layer["first_token_norm"])
        yield (
            f"First token: at {worst.name} it is {worst['first_token_norm']:.0f} times as long as the others and "
            f"dominates the raw rank ({worst['effective_rank']:.1f}). This is an attention sink, not collapse."
        )
    yield from _massive(found)


def _massive(found: Findings) -> Iterator[str]:
    """Yield massive activations and norms that grow with depth, of causal models."""
    massive = [layer for layer in found.layers if layer["massive_activation"] >= MASSIVE]
    if massive:
        worst = max(massive, key=lambda layer: layer["massive_activation"])
        yield (
            f"Massive activations from {massive[0].name} on: at {worst.name} the largest is "
            f"{worst['massive_activation']:,.0f} times the median. They act like biases; this is not collapse."
        )
    blocks = [layer for layer in found.layers if layer["token_norm"] > 0 and layer.name != "embed"]
    if len(blocks) > 3 and blocks[-1]["token_norm"] > GROWTH * blocks[0]["token_norm"]:
        grown = blocks[-1]["token_norm"] / blocks[0]["token_norm"]
        yield (
            f"The norm of tokens grows {grown:.0f}-fold from {blocks[0].name} to {blocks[-1].name}: with pre-norm, "
            "later blocks change them less and less. If you train from scratch, try layer_norm_scaling."
        )


def _recoveries(found: Findings) -> Iterator[str]:
    """Yield runs of at least two layers that look collapsed and recover."""
    kinds: tuple[tuple[Kind, str], ...] = (("complete", "are alike"), ("dimensional", "span few dimensions"))
    for kind, word in kinds:
        before = enumerate(found.layers[: found.first])
        seen = [(found.shows(kind, position) is not None, layer.name) for position, layer in before]
        for collapsed, run in groupby(seen, itemgetter(0)):
            names = [name for _, name in run]
            if collapsed and len(names) > 1:
                yield f"From {names[0]} to {names[-1]}, {found.nouns[0]} {word}; they recover later."


def _compared_with_random(found: Findings) -> Iterator[str]:
    """Yield the measures of the same layer in a randomly initialized model."""
    own = found.last
    random = {layer.name: layer for layer in found.baseline if layer.place == OUTPUT}.get(own.name)
    if random is not None:
        names = ("robust_cosine", *SHARES)
        taken = [name for name in names if name in own.measures and name in random.measures]
        facts = (f"a {MEASURES[name].short} of {random[name]:.2f} (here {own[name]:.2f})" for name in taken[:2])
        yield f"With random weights, this architecture has {' and '.join(facts)} at {own.name}."
    elif found.subject.no_baseline:
        yield f"There is no random model to compare with: {found.subject.no_baseline}"
