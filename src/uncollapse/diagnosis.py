"""The result of a measurement, layer by layer: frozen, printed as a table, stored as JSON."""

import dataclasses
import io
import json
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from uncollapse import files
from uncollapse.bootstrap import Interval
from uncollapse.measures import MEASURES

SCHEMA = 1
SHOWN = (  # measures of the table for a terminal, where they were taken
    "mean_cosine",
    "robust_cosine",
    "effective_rank",
    "rank_share",
    "dataset_rank",
    "dataset_rank_share",
    "attention_similarity",
    "attention_std",
    "dirichlet_energy",
    "uniformity",
    "alignment",
)

Kind = Literal["none", "complete", "dimensional", "both"]
Certainty = Literal["high", "medium", "low"]


@dataclass(frozen=True)
class Summary:
    """A measure of one layer over what was measured.

    A measure of each sequence has mean, deviation (population) and the quantiles 5, 25, 50, 75 and 95 % over `count`
    sequences; one of the whole dataset has its value as `mean`, no deviation and no quantiles, and count 1.
    """

    mean: float
    std: float = 0.0
    quantiles: tuple[float, ...] = ()
    count: int = 1


@dataclass(frozen=True)
class Layer:
    """What was measured at one place of one block.

    name: "embed", "block 0" …, "final". place: "block" is the residual stream after the block. path: of the module.
    dim: features. tokens: how many real tokens were seen. measures: name -> summary; the names are those of
    `uncollapse.measures.MEASURES`. spectrum: singular values of all tokens, minus their mean, over their sum, largest
    first (at most 256, evenly spaced by rank if there are more; `spectrum_ranks` holds their ranks, from 1).
    heatmap: cosines between the tokens of the example sequence (at most 48 × 48), for reports. intervals: how sure
    some measures are, by name; of embeddings only, see `diagnose_rows`.
    """

    name: str
    place: str
    path: str
    dim: int
    tokens: int
    measures: Mapping[str, Summary]
    spectrum: tuple[float, ...] = ()
    spectrum_ranks: tuple[int, ...] = ()
    heatmap: tuple[tuple[float, ...], ...] = ()
    intervals: Mapping[str, Interval] = field(default_factory=dict)

    def __getitem__(self, measure: str) -> float:
        """The mean of a measure, NaN where it was not taken."""
        return self.measures[measure].mean if measure in self.measures else math.nan


@dataclass(frozen=True)
class Evidence:
    """One number that speaks for the verdict: a measure at a layer beside the bound that it crosses."""

    layer: str
    measure: str
    value: float
    bound: float
    says: str


@dataclass(frozen=True)
class Advice:
    """What to try: a cure by its registered name, the place, the reason in a sentence, and a line of code."""

    cure: str
    place: str
    reason: str
    code: str


@dataclass(frozen=True)
class Verdict:
    """What the measures mean.

    kind: none, complete (tokens are alike), dimensional (tokens are apart and span few dimensions), or both.
    onset: name of the first layer from which on it holds, None for none. certainty: how sure, `cautions` say why.
    sentence: the whole in one or two sentences.
    """

    kind: Kind
    onset: str | None
    certainty: Certainty
    sentence: str
    evidence: tuple[Evidence, ...] = ()
    cautions: tuple[str, ...] = ()
    advice: tuple[Advice, ...] = ()

    @property
    def collapsed(self) -> bool:
        """Whether any kind of collapse was found."""
        return self.kind != "none"

    @property
    def sure(self) -> str:
        """How sure it is, in words."""
        return f"Certainty: {self.certainty}."

    def lines(self) -> tuple[str, ...]:
        """All of it as text: what was found, how sure that is, what to know and what to try."""
        tips = (line for tip in self.advice for line in (f"→ {tip.reason}", f"  {tip.code}"))
        return (self.sentence, self.sure, *(f"· {caution}" for caution in self.cautions), *tips)


@dataclass(frozen=True)
class Diagnosis:
    """A model measured layer by layer.

    model: its name as the user knows it. architecture: class name. family: backbone. parameters: their number.
    data: what was fed, in words. batches, sequences, tokens: how much of it. layers: in the order of the model, after
    each block; layers of other places follow in the same order with their place. baseline: the same for a randomly
    initialised model of the same architecture, on fewer batches; empty if not measured. example: the tokens of the
    heat maps, as text. settings: what the measurement was asked to do. versions, created, seconds: for repeating it.
    """

    model: str
    architecture: str
    family: str
    parameters: int
    data: str
    batches: int
    sequences: int
    tokens: int
    layers: tuple[Layer, ...]
    verdict: Verdict
    baseline: tuple[Layer, ...] = ()
    example: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    created: str = ""
    seconds: float = 0.0
    schema: int = SCHEMA

    def save(self, path: str | Path) -> Path:
        """Write JSON that `load` reads back exactly; a file of this name is never half written."""
        return files.write(Path(path), self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote. ValueError if it is something else."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no diagnosis that can be read: {error}") from error

    def to_json(self) -> str:
        """All of it as JSON."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The diagnosis that `to_json` wrote. ValueError if the text is something else."""
        state = json.loads(text)
        if not isinstance(state, dict) or "schema" not in state:
            raise ValueError("it has no schema, so it was not written by Diagnosis.save.")
        if state["schema"] != SCHEMA:
            raise ValueError(f"it has schema {state['schema']}, and this version of uncollapse reads {SCHEMA}.")
        try:
            found: Self = read(cls, state)
        except (KeyError, TypeError) as error:
            raise ValueError(f"it does not fit the schema ({error}).") from error
        return found

    def report(self, path: str | Path = "report.html", *others: "Diagnosis") -> Path:
        """Write the page that shows it, with other diagnoses laid over it; needs the extra `report`."""
        from uncollapse import report

        return report.write([self, *others], path)

    def to_frame(self) -> Any:
        """A pandas DataFrame with a row a layer and a column a measure; pandas must be installed."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_frame needs pandas; install it with: pip install pandas") from error
        rows = [
            {"layer": layer.name, "place": layer.place, "path": layer.path, "dim": layer.dim, "tokens": layer.tokens}
            | {name: summary.mean for name, summary in layer.measures.items()}
            for layer in self.layers
        ]
        return pandas.DataFrame(rows)

    def table(self) -> Table:
        """The main measures as a table for a terminal."""
        shown = [m for m in SHOWN if any(m in layer.measures for layer in self.layers)]
        title = f"{self.model} on {self.data}" if self.data else self.model
        title = "\nwith ".join([title, *self.settings.get("cures", ())])
        table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("layer", no_wrap=True)
        for name in shown:
            table.add_column(MEASURES[name].short, justify="right")
        for layer in self.layers:
            label = layer.name if layer.place == "block" else f"{layer.name} {layer.place}"
            table.add_row(Text(label), *(_number(layer[name]) for name in shown))
        return table

    def __rich__(self) -> Group:
        return Group(self.table(), *(Text(line) for line in self.verdict.lines()))

    def __str__(self) -> str:
        console = Console(width=120, file=io.StringIO(), force_terminal=False, color_system=None)
        with console.capture() as captured:
            console.print(self)
        return captured.get().rstrip()


def read(cls: Any, state: Any) -> Any:
    """A dataclass of this module from what `dataclasses.asdict` and JSON made of it; unknown or missing keys raise."""
    kinds = typing.get_type_hints(cls)
    unknown = set(state) - {f.name for f in dataclasses.fields(cls)}
    if unknown:
        raise TypeError(f"unknown entry {min(unknown)!r}")
    return cls(**{name: _value(kinds[name], value) for name, value in state.items()})


def _value(kind: Any, value: Any) -> Any:
    """A value of a field of this type: nested dataclasses, tuples and mappings of them; plain values as they are."""
    if dataclasses.is_dataclass(kind):
        return read(kind, value)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return tuple(_value(inner[0], item) for item in value)
    if origin is Mapping and dataclasses.is_dataclass(inner[1]):
        return {key: read(inner[1], item) for key, item in value.items()}
    return value


def _number(value: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1e4 else f"{value:.2e}"
