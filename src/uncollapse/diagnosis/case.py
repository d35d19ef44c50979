"""What the measures mean: collapsed or not, how, and from which layer on.

Complete collapse: the tokens of a sequence are alike. Dimensional collapse: they are apart and yet span few of the
dimensions open to them. Both are judged by measures that rogue features and first tokens do not rule (`outliers`), on
the residual stream after each block, and count if they last until the last block. The bounds were set between healthy
and collapsed models; docs/real-models.md has the figures.
"""

from dataclasses import dataclass
from functools import cached_property

from uncollapse.diagnosis.measures import MEASURES
from uncollapse.diagnosis.result import Evidence, Kind, Layer

ALIKE = 0.9  # mean cosine from which tokens count as alike
NARROW = 0.25  # share of the open dimensions below which tokens count as narrow
FALLEN = 0.5, 0.4  # also narrow: below half of an earlier layer's share and below this share
SHARES = ("rank_share", "dataset_rank_share")
NOISE = 1e-4  # 1 − cosine below which what is left of a spread is rounding, and its rank says nothing
NOUNS = {"pyg": ("nodes", "a graph"), "embeddings": ("rows", "a sample")}  # others have tokens of a sequence


@dataclass(frozen=True)
class Subject:
    """What is judged.

    family, architecture, places: of its stack. causal: whether tokens see only earlier ones. one_graph: whether nodes
    came without saying which graph each belongs to. no_twin: why there is no random model beside it. modules: the names
    or patterns by which the user called its layers. outputs, hidden: in a graph network whose last layer gives outputs
    and no features, its name and the number of blocks before it.
    """

    family: str
    architecture: str
    causal: bool
    places: tuple[str, ...]
    one_graph: bool = False
    no_twin: str = ""
    modules: tuple[str, ...] = ()
    outputs: str = ""
    hidden: int = 0


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
