"""What the measures mean: collapsed or not, how, from which layer on, and how sure.

Complete collapse: the tokens of a sequence are alike. Dimensional collapse: they are apart and yet span few of the
dimensions open to them. Both are judged by measures that rogue features and first tokens do not rule (`outliers`), on
the residual stream after each block, and count if they last until the last block. The bounds were set between healthy
and collapsed models; docs/real-models.md has the figures.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from uncollapse.advice import advice
from uncollapse.diagnosis import Certainty, Evidence, Kind, Layer, Verdict
from uncollapse.measures import MEASURES
from uncollapse.sites import OUTPUT

ALIKE = 0.9  # mean cosine from which tokens count as alike
NARROW = 0.25  # share of the open dimensions below which tokens count as narrow
FALLEN = 0.5, 0.4  # also narrow: below half of an earlier layer's share and below this share
SHARES = ("rank_share", "dataset_rank_share")
NOISE = 1e-4  # 1 − cosine below which what is left of a spread is rounding, and its rank says nothing
CLOSE = 0.2  # a value within this part of its bound is a close call
SINK = 10.0  # times the length of other tokens from which a first token is called an attention sink
ROGUE = 0.3  # how far the largest features must raise the cosine to be called rogue
NOUNS = {"pyg": ("nodes", "a graph"), "embeddings": ("rows", "a part")}  # others have tokens of a sequence


@dataclass(frozen=True)
class Subject:
    """What is judged: backbone, class of the model, whether it is causal, its places, and why it has no random twin."""

    family: str
    architecture: str
    causal: bool
    places: tuple[str, ...]
    no_twin: str = ""


def judge(layers: tuple[Layer, ...], random: tuple[Layer, ...], subject: Subject, sequences: int) -> Verdict:
    """The verdict on the residual stream of a model."""
    spine = tuple(layer for layer in layers if layer.place == OUTPUT and layer.name != "final")
    return Case(spine, random, subject, sequences).verdict()


@dataclass(frozen=True)
class Finding:
    """A kind of collapse that lasts from a layer to the end, with its evidence."""

    kind: Kind
    onset: int
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True)
class Case:
    """The layers to be judged, those of a random model, and how many sequences were seen."""

    spine: tuple[Layer, ...]
    random: tuple[Layer, ...]
    subject: Subject
    sequences: int

    def verdict(self) -> Verdict:
        """All that can be said."""
        kind: Kind = "both" if len(self.found) == 2 else self.found[0].kind if self.found else "none"
        onset = self.spine[self.first].name if self.found else None
        doubts = list(self.doubts())
        told = (*(text for _, text in doubts), *self.outliers(), *self.passing(), *self.beside())
        evidence = tuple(e for f in self.found for e in f.evidence) or self.healthy()
        tips = advice(kind, onset, self.subject.family, self.subject.places, self.subject.causal) if onset else ()
        return Verdict(kind, onset, certainty(sum(w for w, _ in doubts)), self.sentence(), evidence, told, tips)

    @cached_property
    def found(self) -> tuple[Finding, ...]:
        """Every kind of collapse that lasts until the last layer."""
        both = (self.run("complete"), self.run("dimensional"))
        return tuple(finding for finding in both if finding is not None)

    @property
    def first(self) -> int:
        """Where the first of them begins; behind the last layer if there is none."""
        return min((finding.onset for finding in self.found), default=len(self.spine))

    @property
    def last(self) -> Layer:
        """The last block."""
        return self.spine[-1]

    @property
    def nouns(self) -> tuple[str, str]:
        """What the rows are, and the set that they come in."""
        return NOUNS.get(self.subject.family, ("tokens", "a sequence"))

    def run(self, kind: Kind) -> Finding | None:
        """The run of layers up to the last one that all show this kind."""
        onset = len(self.spine)
        while onset > 0 and self.shows(kind, onset - 1) is not None:
            onset -= 1
        if onset == len(self.spine):
            return None
        shown = [self.shows(kind, at) for at in dict.fromkeys((onset, len(self.spine) - 1))]
        return Finding(kind, onset, tuple(e for e in shown if e is not None))

    def shows(self, kind: Kind, at: int) -> Evidence | None:
        """What shows this kind of collapse at a layer, if anything does."""
        return self.alike(at) if kind == "complete" else self.narrow(at)

    def alike(self, at: int) -> Evidence | None:
        """A mean cosine that is too large."""
        layer = self.spine[at]
        value = layer["robust_cosine"]
        if not value >= ALIKE:
            return None
        says = f"{self.nouns[0]} are alike, with a mean cosine of {value:.3f}"
        return Evidence(layer.name, "robust_cosine", value, ALIKE, says)

    def narrow(self, at: int) -> Evidence | None:
        """A rank share, of a sequence or of the dataset, that is too small in itself or beside earlier layers."""
        layer = self.spine[at]
        if 1 - layer["robust_cosine"] <= NOISE:  # NaN where no set has two tokens: the dataset is judged all the same
            return None
        for name in SHARES:
            share, peak = layer[name], max(earlier[name] for earlier in self.spine[: at + 1])
            bound = max(NARROW, min(FALLEN[0] * peak, FALLEN[1]))
            if share < bound:
                whose = self.nouns[1] if name == "rank_share" else "the dataset"
                before = "" if bound == NARROW else f" (earlier {peak:.0%})"
                says = f"{self.nouns[0]} of {whose} span {share:.1%} of the dimensions open to them{before}"
                return Evidence(layer.name, name, share, bound, says)
        return None

    def healthy(self) -> tuple[Evidence, ...]:
        """What speaks for a model that is not collapsed."""
        said = {"robust_cosine": (ALIKE, f"{self.nouns[0]} are apart")}
        said |= dict.fromkeys(SHARES, (NARROW, "they span enough dimensions"))
        taken = ((name, *facts) for name, facts in said.items() if name in self.last.measures)
        return tuple(Evidence(self.last.name, name, self.last[name], bound, text) for name, bound, text in taken)

    def sentence(self) -> str:
        """The verdict in words."""
        if not self.found:
            facts = ", ".join(f"{MEASURES[e.measure].short} {e.value:.2f}" for e in self.healthy())
            return f"No collapse: {facts} at {self.last.name} (bounds: cosine {ALIKE}, shares {NARROW})."
        names = {"complete": "Complete collapse", "dimensional": "Dimensional collapse"}
        parts = (
            f"{names[f.kind]} from {self.spine[f.onset].name} on: {f.evidence[-1].says} at {f.evidence[-1].layer}."
            for f in self.found
        )
        return " ".join(parts)

    def doubts(self) -> Iterator[tuple[int, str]]:
        """Reasons to be less sure, each with its weight."""
        seen, dim, noun = self.last.tokens, self.last.dim, self.nouns[0]
        if seen < 64:
            yield 2, f"Only {seen} {noun} were seen; give at least a few hundred."
        elif seen < 2 * dim:
            ceiling = f"bound the rank of the dataset by {seen - 1}; it is judged beside that ceiling"
            few = ceiling if seen <= dim else "are few: the rank of the dataset comes out too low"
            yield 1, f"{seen} {noun} of {dim} features {few}. Give {4 * dim} or more."
        if self.sequences < 8 and seen < 512 * self.sequences:
            few = "one set was" if self.sequences == 1 else f"{self.sequences} sets were"
            yield 1, f"Only {few} seen; how much they differ is not known well."
        if "rank_share" not in self.last.measures:
            yield 1, f"No set had three {noun}: they are judged over the whole dataset, not within {self.nouns[1]}."
        for evidence in self.close_calls():
            yield 1, f"A close call: {evidence.says} at {evidence.layer} (bound {evidence.bound:.2f})."
        if len(self.spine) > 3 and self.first == len(self.spine) - 1:
            narrowing = "Models that were trained on few classes narrow there on purpose"
            yield 1, f"Only the last block shows it. {narrowing}; look at the blocks before it."
        if len(self.spine) > 1 and self.first == 0:
            yield 1, f"It is there at {self.spine[0].name} already: the input is alike or narrow, not only the depth."

    def close_calls(self) -> list[Evidence]:
        """Values at the last block that lie near their bound, on either side."""
        shown = [finding.evidence[-1] for finding in self.found] or list(self.healthy())
        room = {e: 1 - e.bound if e.measure == "robust_cosine" else e.bound for e in shown}
        return [e for e in shown if abs(e.value - e.bound) < CLOSE * room[e]]

    def outliers(self) -> Iterator[str]:
        """What looks like collapse and is not."""
        rogue = max(self.spine, key=lambda layer: layer["mean_cosine"] - layer["robust_cosine"])
        if rogue["mean_cosine"] - rogue["robust_cosine"] > ROGUE:
            yield (
                f"Rogue features: at {rogue.name} the mean cosine of {self.nouns[0]} is {rogue['mean_cosine']:.2f}, "
                f"and {rogue['robust_cosine']:.2f} without the three largest features. That is no collapse."
            )
        sinks = [layer for layer in self.spine if layer["first_token_norm"] > SINK]
        if sinks:
            worst = max(sinks, key=lambda layer: layer["first_token_norm"])
            yield (
                f"First token: at {worst.name} it is {worst['first_token_norm']:.0f} times as long as the others and "
                f"rules the raw rank ({worst['effective_rank']:.1f}). That is an attention sink, no collapse."
            )

    def passing(self) -> Iterator[str]:
        """Runs of at least two layers that look collapsed and recover."""
        kinds: tuple[tuple[Kind, str], ...] = (("complete", "alike"), ("dimensional", "narrow"))
        for kind, word in kinds:
            run = [layer.name for at, layer in enumerate(self.spine[: self.first]) if self.shows(kind, at) is not None]
            if len(run) > 1:
                yield f"In between, from {run[0]} to {run[-1]}, {self.nouns[0]} are {word}, and recover."

    def beside(self) -> Iterator[str]:
        """The same layer of a randomly initialised model."""
        own = self.last
        twin = {layer.name: layer for layer in self.random if layer.place == OUTPUT}.get(own.name)
        if twin is not None:
            taken = [name for name in ("robust_cosine", *SHARES) if name in own.measures and name in twin.measures]
            facts = (f"a {MEASURES[name].short} of {twin[name]:.2f} (here {own[name]:.2f})" for name in taken[:2])
            yield f"Randomly initialised, this architecture has at {own.name} {' and '.join(facts)}."
        elif self.subject.no_twin:
            yield f"There is no random model beside it: {self.subject.no_twin}"


def certainty(doubt: int) -> Certainty:
    """How sure a verdict is, by the weight of its doubts."""
    return "high" if doubt == 0 else "medium" if doubt == 1 else "low"
