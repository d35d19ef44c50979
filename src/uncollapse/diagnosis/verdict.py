"""Decide from the measures whether a model is collapsed, in which way, and from which layer on.

Complete collapse: the tokens of a sequence are alike. Dimensional collapse: they differ, but span only a few of the
dimensions available to them. Both are decided on the residual stream after each block, by measures that ignore rogue
features and first tokens (`metrics.robust`). A collapse counts if it lasts until the last block. The bounds were set
between healthy and collapsed models; docs/models.md has the numbers.

`evaluate` gives the findings. `cautions` and `advice` read them; `build.conclude` puts the three together.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from uncollapse.backbones.sites import OUTPUT
from uncollapse.diagnosis.measures import MEASURES
from uncollapse.diagnosis.result import Evidence, Kind, Layer

ALIKE = 0.9  # mean cosine from which tokens count as alike
NARROW = 0.25  # share of the available dimensions below which tokens count as narrow
FALLEN = 0.5, 0.4  # also narrow: below half of an earlier layer's share and below this share
SHARES = ("rank_share", "dataset_rank_share")
NOISE = 1e-4  # 1 − cosine below which the remaining spread is rounding, so that its rank means nothing
NOUNS = {"pyg": ("nodes", "a graph"), "embeddings": ("rows", "a sample")}  # other families: tokens of a sequence
TITLES = {"complete": "Complete collapse", "dimensional": "Dimensional collapse"}


@dataclass(frozen=True)
class Subject:
    """What is evaluated.

    family, architecture, places: those of the stack. causal: whether tokens attend only to earlier ones. one_graph:
    whether nodes came without a vector that assigns them to graphs. no_baseline: why there is no random baseline.
    modules: the names or patterns of the layers, if the user gave them. blocks: how many the model has, 0 without a
    model. partial: whether only some of them were measured. outputs: for a graph network whose last layer gives outputs
    rather than features, the name of that layer. skipped: how many batches were empty or only padding.
    unknown: the share of tokens that the tokenizer does not know. remark: about the choice of the blocks. part: the
    name of the part of the model that this is about, "" for all of it. idle: names of parts that did not run.
    passes: how often its blocks ran in one pass of the model. unpaired: how many batches have a second view that is
    only padding. spare_pairs: whether second views were left over.
    """

    family: str
    architecture: str
    causal: bool
    places: tuple[str, ...]
    one_graph: bool = False
    no_baseline: str = ""
    modules: tuple[str, ...] = ()
    blocks: int = 0
    partial: bool = False
    outputs: str = ""
    skipped: int = 0
    unknown: float = 0.0
    remark: str = ""
    part: str = ""
    idle: tuple[str, ...] = ()
    passes: int = 1
    unpaired: int = 0
    spare_pairs: bool = False


@dataclass(frozen=True)
class Collapse:
    """One kind of collapse that lasts from a layer, by its position, to the end; with its evidence."""

    kind: Kind
    onset: int
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True)
class Findings:
    """What the measures of a model show.

    layers: the residual stream after each block. baseline: layers of a randomly initialized model. sequences: how many
    were measured.
    """

    layers: tuple[Layer, ...]
    baseline: tuple[Layer, ...]
    subject: Subject
    sequences: int

    @cached_property
    def collapses(self) -> tuple[Collapse, ...]:
        """Every kind of collapse that lasts until the last layer."""
        both = (self._collapse("complete"), self._collapse("dimensional"))
        return tuple(collapse for collapse in both if collapse is not None)

    @property
    def kind(self) -> Kind:
        """The kind of collapse of the whole model."""
        return "both" if len(self.collapses) == 2 else self.collapses[0].kind if self.collapses else "none"

    @property
    def first(self) -> int:
        """The position of the first collapsed layer; one after the last layer if there is none."""
        return min((collapse.onset for collapse in self.collapses), default=len(self.layers))

    @property
    def onset(self) -> str | None:
        """The name of the first collapsed layer."""
        return self.layers[self.first].name if self.collapses else None

    @property
    def last(self) -> Layer:
        """The last block."""
        return self.layers[-1]

    @property
    def nouns(self) -> tuple[str, str]:
        """What the rows are called, and the sets that they come in."""
        return NOUNS.get(self.subject.family, ("tokens", "a sequence"))

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """The evidence of every collapse, or for a healthy model if there is none."""
        return tuple(e for collapse in self.collapses for e in collapse.evidence) or self.healthy()

    def shows(self, kind: Kind, position: int) -> Evidence | None:
        """Return the evidence for this kind of collapse at a layer, or None."""
        return self._alike(position) if kind == "complete" else self._narrow(position)

    def healthy(self) -> tuple[Evidence, ...]:
        """Return the evidence that the last block is not collapsed."""
        says = {"robust_cosine": (ALIKE, f"{self.nouns[0]} are apart")}
        says |= dict.fromkeys(SHARES, (NARROW, "they span enough dimensions"))
        taken = ((name, *facts) for name, facts in says.items() if name in self.last.measures)
        return tuple(Evidence(self.last.name, name, self.last[name], bound, text) for name, bound, text in taken)

    def sentence(self) -> str:
        """Return the verdict in words."""
        if not self.collapses:
            facts = ", ".join(f"{MEASURES[e.measure].short} {round(e.value, 2) + 0.0:.2f}" for e in self.healthy())
            return f"No collapse: {facts} at {self.last.name} (bounds: cosine {ALIKE}, shares {NARROW})."
        return " ".join(
            f"{TITLES[c.kind]} from {self.layers[c.onset].name} on: {c.evidence[-1].says} at {c.evidence[-1].layer}."
            for c in self.collapses
        )

    def _collapse(self, kind: Kind) -> Collapse | None:
        """Return the run of layers, up to the last one, that all show this kind."""
        onset = len(self.layers)
        while onset > 0 and self.shows(kind, onset - 1) is not None:
            onset -= 1
        if onset == len(self.layers):
            return None
        ends = [self.shows(kind, position) for position in dict.fromkeys((onset, len(self.layers) - 1))]
        return Collapse(kind, onset, tuple(e for e in ends if e is not None))

    def _alike(self, position: int) -> Evidence | None:
        """Return a mean cosine that is too large."""
        layer = self.layers[position]
        value = layer["robust_cosine"]
        if not value >= ALIKE:
            return None
        says = f"{self.nouns[0]} are alike, with a robust cosine of {value:.3f}"
        return Evidence(layer.name, "robust_cosine", value, ALIKE, says)

    def _narrow(self, position: int) -> Evidence | None:
        """Return a rank share, of a sequence or of the dataset, that is too small in itself or after earlier layers."""
        layer = self.layers[position]
        if 1 - layer["robust_cosine"] <= NOISE:  # NaN if no set has two tokens; the dataset is still evaluated
            return None
        for name in SHARES:
            until_here = (each[name] for each in self.layers[: position + 1] if name in each.measures)
            share, peak = layer[name], max(until_here, default=0.0)  # max of NaN would depend on its position
            bound = max(NARROW, min(FALLEN[0] * peak, FALLEN[1]))
            if share < bound:
                whose = self.nouns[1] if name == "rank_share" else "the dataset"
                before = "" if bound == NARROW else f" ({peak:.0%} in an earlier layer)"
                says = f"{self.nouns[0]} of {whose} span {share:.1%} of the available dimensions{before}"
                return Evidence(layer.name, name, share, bound, says)
        return None


def evaluate(layers: tuple[Layer, ...], baseline: tuple[Layer, ...], subject: Subject, sequences: int) -> Findings:
    """Return what the measures of a model show about its residual stream."""
    stream = tuple(layer for layer in layers if layer.place == OUTPUT and layer.name != "final")
    if subject.family == "pyg" and _ends_in_outputs(stream):
        subject = replace(subject, outputs=stream[-1].name)
        stream = stream[:-1]
    return Findings(stream, baseline, subject, sequences)


def _ends_in_outputs(stream: tuple[Layer, ...]) -> bool:
    """Return whether the last of several convolutions narrows: it then gives outputs, such as logits, not features."""
    return len(stream) > 3 and stream[-1].dim < stream[-2].dim
