"""Name the cause of a collapse, or of a training that fails, from the measured parts of the blocks.

Each rule reads what was measured and returns a cause with its evidence, or None. A part that was not measured neither
confirms nor excludes a cause. Where no rule holds, the cause is unknown, and what was excluded is listed.
"""

from collections.abc import Iterator

from uncollapse.backbones.sites import OUTPUT
from uncollapse.diagnosis.parts import BlockParts, Parts, Switch
from uncollapse.diagnosis.result import Cause, Layer
from uncollapse.diagnosis.verdict import ALIKE, NARROW, Findings

VANISHED = 1e-3  # gradient after the first block over the largest, below which it has vanished
GREW = 10.0  # growth of the stream's length from the first block to the longest
LITTLE = 0.1  # share that the branches of the last blocks add, below which they add little
ALONE = "Without mixing"
APART = 3.0  # factor by which 1 − cosine, or the rank share, must rise for a switch to explain a collapse


def name_causes(found: Findings, parts: Parts) -> tuple[Cause, ...]:
    """Return the causes that the parts show, the most important first; of a healthy model those of failing training."""
    training = _vanishing_gradients(found, parts)
    growth = _norm_growth(parts)
    if not found.collapses:
        return tuple(cause for cause in (training, growth) if cause is not None)
    given = _input(found)
    ruled = (given, _no_residual(parts), training, None if given else _mixing(found, parts), growth)
    causes = tuple(cause for cause in ruled if cause is not None)
    return causes or (_few_directions(found, parts) or _unknown_cause(parts),)


def _no_residual(parts: Parts) -> Cause | None:
    known = [block for block in parts.blocks if block.residual is not None]
    without = [block for block in known if block.residual == 0]
    if not known or 2 * len(without) <= len(known):
        return None
    says = [f"In {len(without)} of {len(known)} blocks, no part of the input bypasses the layer."]
    says += _effect(parts, "residual added", "With a residual added to the same weights")
    return Cause("no_residual", "There is no residual connection.", tuple(says))


def _vanishing_gradients(found: Findings, parts: Parts) -> Cause | None:
    known = [block for block in parts.blocks if block.gradient is not None]
    if len(known) < 3 or found.subject.partial:
        return None
    first, largest = known[0], max(known[:-1], key=lambda block: block.gradient or 0.0)  # the last one may be the head
    if not largest.gradient or (first.gradient or 0.0) >= VANISHED * largest.gradient:
        return None
    sizes = f"{first.gradient:.1e} after {first.name}, {largest.gradient:.1e} after {largest.name}"
    says = f"The gradient of the loss is {sizes}."
    return Cause("vanishing_gradients", "Gradients vanish on their way to the first blocks.", (says,))


def _mixing(found: Findings, parts: Parts) -> Cause | None:
    """Return that tokens or nodes are averaged until they are alike, if they are not without it."""
    base, alone = parts.switch("nothing"), parts.switch("no mixing")
    if base is None or alone is None or not _explains(base, alone, found.kind):
        return None
    what = "Graph convolutions average nodes" if found.subject.family == "pyg" else "Attention averages tokens"
    says = [*_effect(parts, "no mixing", ALONE), *_effect(parts, "uniform attention", "With uniform attention")]
    part = "convolution" if found.subject.family == "pyg" else "attention"
    rise = parts.total(part)
    if rise is not None and rise.cosine > 0:
        says.append(f"Summed over the measured blocks, {part} raises the cosine by {rise.cosine:.2f}.")
    return Cause("mixing", f"{what} until they are alike.", tuple(says))


def _explains(base: Switch, switched: Switch, kind: str) -> bool:
    """Return whether a switch ends a collapse."""
    apart = switched.cosine < ALIKE and 1 - switched.cosine >= APART * (1 - base.cosine)
    wide = switched.rank_share >= NARROW and switched.rank_share >= APART * base.rank_share
    return apart if kind in ("complete", "both") else wide


def _norm_growth(parts: Parts) -> Cause | None:
    """Return that the stream grows so long that later blocks add little to it, as with pre-norm."""
    known = [block for block in parts.blocks if block.length]
    late = [block.residual for block in known[2 * len(known) // 3 :] if block.residual is not None]
    if len(known) < 3 or not late:
        return None
    first, longest = known[0], max(known, key=_length)
    growth, added = _length(longest) / _length(first), 1 - sum(late) / len(late)
    if growth < GREW or added > LITTLE:
        return None
    says = (
        f"Tokens are {growth:.0f} times as long after {longest.name} as after {first.name}.",
        f"The last third of the blocks adds {added:.1%} of the variance.",
    )
    return Cause("norm_growth", "The residual stream grows, and late blocks hardly change it.", says)


def _length(block: BlockParts) -> float:
    return block.length or 0.0


def _input(found: Findings) -> Cause | None:
    first = found.layers[0]
    if first.name != "embed" or found.first > 0:
        return None
    shown = [evidence for c in found.collapses if (evidence := found.shows(c.kind, 0)) is not None]
    says = tuple(f"{evidence.says.capitalize()}." for evidence in shown)
    return Cause("input", "The input of the first block is already collapsed.", says)


def _few_directions(found: Findings, parts: Parts) -> Cause | None:
    """Return that few directions dominate, where tokens are apart and no part of the blocks explains it."""
    if found.kind != "dimensional" or parts.switch("no mixing") is None:
        return None
    last = found.last
    says = [f"The effective rank of all {found.nouns[0]} at {last.name} is {last['dataset_rank']:.1f} of {last.dim}."]
    says += _leading_directions(last)
    says += _effect(parts, "no mixing", ALONE)
    return Cause("few_directions", "A few directions dominate, and no part of the blocks explains it.", tuple(says))


def _leading_directions(layer: Layer) -> Iterator[str]:
    """Yield how much of the variance the largest directions hold, if all singular values are stored."""
    energy = [value**2 for value in layer.spectrum]
    if layer.place == OUTPUT and energy and layer.spectrum_ranks[-1] == len(energy) and sum(energy) > 0:
        yield f"Three directions hold {sum(energy[:3]) / sum(energy):.0%} of the variance."


def _unknown_cause(parts: Parts) -> Cause:
    says = [text for switch in parts.switches[1:] for text in _effect(parts, switch.name, f"Switch “{switch.name}”")]
    return Cause("unknown", "It cannot be determined from these measurements.", tuple(says))


def _effect(parts: Parts, name: str, words: str) -> Iterator[str]:
    """Yield what a switch does to the last block, if it was measured."""
    base, switched = parts.switch("nothing"), parts.switch(name)
    if base is not None and switched is not None:
        ranks = f"rank share {base.rank_share:.2f} → {switched.rank_share:.2f}"
        cosines = f"cosine {base.cosine:.3f} → {switched.cosine:.3f}".replace("-", "−")
        yield f"{words}: {cosines}, {ranks} at {parts.last}."
