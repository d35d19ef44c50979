"""What the measures mean: collapsed or not, how, from which layer on, how sure, and what to try.

Complete collapse: the tokens of a sequence are alike. Dimensional collapse: they are apart and yet span few of the
dimensions open to them. Both are judged by measures that rogue features and first tokens do not rule (`outliers`), on
the residual stream after each block, and count if they last until the last block. The bounds were set between healthy
and collapsed models; docs/real-models.md has the figures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from uncollapse.diagnosis import Advice, Certainty, Evidence, Kind, Layer, Verdict
from uncollapse.measures import MEASURES
from uncollapse.sites import OUTPUT

ALIKE = 0.9  # mean cosine from which tokens count as alike
NARROW = 0.25  # share of the open dimensions below which tokens count as narrow
FALLEN = 0.5, 0.4  # also narrow: below half of an earlier layer's share and below this share
SHARES = ("rank_share", "dataset_rank_share")
NOISE = 1e-4  # 1 − cosine below which what is left of a spread is rounding, and its rank says nothing
CLOSE = 0.2  # a value within this part of its bound is a close call
SINK = 10.0  # times the length of other tokens from which a first token is called an attention sink


@dataclass(frozen=True)
class Subject:
    """What is judged: backbone, class of the model, whether it is causal, its places, and why it has no random twin."""

    family: str
    architecture: str
    causal: bool
    places: tuple[str, ...]
    no_twin: str = ""


@dataclass(frozen=True)
class Finding:
    """A kind of collapse that lasts from a layer to the end, with its evidence."""

    kind: Kind
    onset: int
    evidence: tuple[Evidence, ...]


def judge(layers: tuple[Layer, ...], random: tuple[Layer, ...], subject: Subject, sequences: int) -> Verdict:
    """The verdict on the residual stream of a model."""
    spine = [layer for layer in layers if layer.place == OUTPUT and layer.name != "final"]
    found = [f for f in (_find("complete", spine, _alike), _find("dimensional", spine, _narrow)) if f is not None]
    kind: Kind = "none" if not found else found[0].kind if len(found) == 1 else "both"
    onset = None if not found else spine[min(f.onset for f in found)].name
    doubts = _doubts(spine, sequences, found)
    return Verdict(
        kind,
        onset,
        _certainty(doubts),
        _sentence(kind, spine, found),
        tuple(e for f in found for e in f.evidence) or _healthy(spine[-1]),
        (*doubts, *_recognised(spine), *_passing(spine, found), *_beside(spine, random, subject)),
        _advice(kind, onset, subject) if found else (),
    )


def _alike(spine: Sequence[Layer], at: int) -> Evidence | None:
    value = spine[at]["robust_cosine"]
    if not value >= ALIKE:
        return None
    return Evidence(spine[at].name, "robust_cosine", value, ALIKE, f"tokens are alike: mean cosine {value:.3f}")


def _narrow(spine: Sequence[Layer], at: int) -> Evidence | None:
    """The rank share, of a sequence or of the dataset, that is too small in itself or beside earlier layers."""
    layer = spine[at]
    if not 1 - layer["robust_cosine"] > NOISE:
        return None
    for name in SHARES:
        share, peak = layer[name], max((earlier[name] for earlier in spine[: at + 1]), default=0.0)
        bound = max(NARROW, min(FALLEN[0] * peak, FALLEN[1]))
        if share < bound:
            whose = "a sequence" if name == "rank_share" else "the dataset"
            before = "" if bound == NARROW else f"; it was {peak:.0%} before"
            says = f"the tokens of {whose} span {share:.1%} of the dimensions open to them{before}"
            return Evidence(layer.name, name, share, bound, says)
    return None


def _find(
    kind: Kind, spine: Sequence[Layer], test: Callable[[Sequence[Layer], int], Evidence | None]
) -> Finding | None:
    """The run of layers up to the last one that all show this kind."""
    onset = len(spine)
    while onset > 0 and test(spine, onset - 1) is not None:
        onset -= 1
    if onset == len(spine):
        return None
    shown = [test(spine, at) for at in dict.fromkeys((onset, len(spine) - 1))]
    return Finding(kind, onset, tuple(e for e in shown if e is not None))


def _healthy(last: Layer) -> tuple[Evidence, ...]:
    """What speaks for a model that is not collapsed."""
    cosine = Evidence(last.name, "robust_cosine", last["robust_cosine"], ALIKE, "tokens are apart")
    shares = [
        Evidence(last.name, n, last[n], NARROW, "they span enough dimensions") for n in SHARES if n in last.measures
    ]
    return (cosine, *shares) if "robust_cosine" in last.measures else tuple(shares)


def _sentence(kind: Kind, spine: Sequence[Layer], found: Sequence[Finding]) -> str:
    last = spine[-1]
    if kind == "none":
        facts = "; ".join(f"{MEASURES[e.measure].title.lower()} {e.value:.2f}" for e in _healthy(last))
        return f"No collapse: at {last.name} {facts} (bounds: similarity {ALIKE}, rank share {NARROW})."
    names = {"complete": "Complete collapse", "dimensional": "Dimensional collapse"}
    parts = [
        f"{names[f.kind]} from {spine[f.onset].name} on: {f.evidence[-1].says} at {f.evidence[-1].layer}."
        for f in found
    ]
    return " ".join(parts)


def _doubts(spine: Sequence[Layer], sequences: int, found: Sequence[Finding]) -> tuple[str, ...]:
    """Reasons to be less sure."""
    last, doubts = spine[-1], []
    each = last.tokens / max(1, sequences)
    if last.tokens < 64:
        doubts.append(f"Only {last.tokens} tokens were seen; give at least a few hundred.")
    elif last.tokens < 2 * last.dim:
        doubts.append(
            f"{last.tokens} tokens of {last.dim} features bound the rank of the dataset by {last.tokens - 1}; "
            f"it is judged beside that ceiling. Give {4 * last.dim} tokens or more."
        )
    if sequences < 8 and each < 512:
        doubts.append(f"Only {sequences} sequences were seen; their spread is not known well.")
    doubts += [f"A close call: {e.says} at {e.layer} (bound {e.bound:.2f})." for e in _close(last, found)]
    if found and len(spine) > 3 and min(f.onset for f in found) == len(spine) - 1:
        doubts.append(
            "Only the last block shows it. Models that were trained on few classes narrow there on purpose; look at "
            "the blocks before it."
        )
    if found and len(spine) > 1 and min(f.onset for f in found) == 0:
        doubts.append(f"It is there at {spine[0].name} already: the input is alike or narrow, not only the depth.")
    return tuple(doubts)


def _close(last: Layer, found: Sequence[Finding]) -> list[Evidence]:
    """Values at the last block that lie near their bound, on either side."""
    shown = [f.evidence[-1] for f in found] or list(_healthy(last))
    near = {"robust_cosine": lambda e: abs(e.value - e.bound) < CLOSE * (1 - e.bound)}
    return [e for e in shown if near.get(e.measure, lambda e: abs(e.value - e.bound) < CLOSE * e.bound)(e)]


def _certainty(doubts: Sequence[str]) -> Certainty:
    if any(doubt.startswith("Only") and "tokens" in doubt for doubt in doubts) or len(doubts) > 1:
        return "low"
    return "medium" if doubts else "high"


def _recognised(spine: Sequence[Layer]) -> list[str]:
    """Outliers that look like collapse and are not, and the ceiling of short sequences."""
    said = []
    rogue = max(spine, key=lambda layer: layer["mean_cosine"] - layer["robust_cosine"])
    if rogue["mean_cosine"] - rogue["robust_cosine"] > 0.3:
        said.append(
            f"Rogue features: at {rogue.name} the mean cosine of tokens is {rogue['mean_cosine']:.2f}, and "
            f"{rogue['robust_cosine']:.2f} without the three largest features. That is no collapse."
        )
    sinks = [layer for layer in spine if layer["first_token_norm"] > SINK]
    if sinks:
        worst = max(sinks, key=lambda layer: layer["first_token_norm"])
        said.append(
            f"First token: at {worst.name} it is {worst['first_token_norm']:.0f} times as long as the others and rules "
            f"the raw rank ({worst['effective_rank']:.1f}). That is an attention sink, no collapse."
        )
    return said


def _passing(spine: Sequence[Layer], found: Sequence[Finding]) -> list[str]:
    """Runs of at least two layers that look collapsed and recover."""
    said = []
    for kind, test in (("alike", _alike), ("narrow", _narrow)):
        end = next((f.onset for f in found if f.kind == ("complete" if kind == "alike" else "dimensional")), len(spine))
        run = [layer.name for at, layer in enumerate(spine[:end]) if test(spine, at) is not None]
        if len(run) > 1:
            said.append(f"Tokens are {kind} in between, from {run[0]} to {run[-1]}, and recover.")
    return said


def _beside(spine: Sequence[Layer], random: Sequence[Layer], subject: Subject) -> list[str]:
    """The same layer of a randomly initialised model."""
    twin = {layer.name: layer for layer in random if layer.place == OUTPUT}.get(spine[-1].name)
    if twin is None:
        return [f"There is no random model beside it: {subject.no_twin}."] if subject.no_twin else []
    own = spine[-1]
    return [
        f"Randomly initialised, this architecture has at {own.name} a token similarity of "
        f"{twin['robust_cosine']:.2f} (here {own['robust_cosine']:.2f}) and a rank share of {twin['rank_share']:.2f} "
        f"(here {own['rank_share']:.2f})."
    ]


def _advice(kind: Kind, onset: str | None, subject: Subject) -> tuple[Advice, ...]:
    """Cures to try, the likeliest first."""
    if subject.family == "activations":
        return (
            Advice("uniform_loss", "training", "add it to the loss of the encoder", "loss = loss + uc.uniform_loss(x)"),
        )
    if subject.family == "pyg":
        contra = "x = uc.contra_norm(x, scale=1.0, edge_index=edge_index)"
        pair = "x = uc.pair_norm(x)"
        return (
            Advice(
                "contra_norm", "conv.output", f"after each convolution from {onset} on, neighbours left out", contra
            ),
            Advice("pair_norm", "conv.output", "cheaper; keeps the total distance of nodes", pair),
        )
    place = "attention.residual" if "attention.residual" in subject.places else OUTPUT
    causal = ", causal=True" if subject.causal else ""
    first = Advice(
        "contra_norm",
        place,
        f"in each block, at the latest before {onset}",
        f"x = uc.contra_norm(x, scale=0.1{causal})",
    )
    if kind == "complete" and not subject.causal:
        other = Advice("attn_scale", "attention", "lifts what attention averages away", "uc.AttnScale(heads)")
    elif subject.causal:
        return (first,)
    else:
        code = 'x = uc.contra_norm(x, scale=0.1, axis="features")'
        other = Advice("contra_norm", place, "its dual over features, made for few dimensions", code)
    return first, other
