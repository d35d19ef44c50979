"""The result of a diagnosis, layer by layer: frozen, printed as a table, stored as JSON."""

import dataclasses
import io
import json
import math
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from uncollapse.backbones.sites import OUTPUT
from uncollapse.diagnosis.measures import MEASURES
from uncollapse.diagnosis.parts import Parts
from uncollapse.errors import did_you_mean
from uncollapse.io import display, files, hub, typed_json
from uncollapse.metrics.bootstrap import Interval
from uncollapse.registry import RENDERERS

SCHEMA = 1
WIDEST = 120  # columns of printed text; fewer in a narrower terminal
SHOWN = (  # columns of the table for a terminal, if they were measured
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
LEAST = (  # of these, what a narrow terminal leaves out, the least important first
    "dataset_rank",
    "attention_std",
    "mean_cosine",
    "uniformity",
    "alignment",
    "effective_rank",
    "dirichlet_energy",
    "attention_similarity",
)

Kind = Literal["none", "complete", "dimensional", "both"]
Certainty = Literal["high", "medium", "low"]
CauseName = Literal["no_residual", "vanishing_gradients", "mixing", "norm_growth", "few_directions", "input", "unknown"]


@dataclass(frozen=True)
class Summary:
    """A measure of one layer, summarized over the data.

    A measure of each sequence has the mean, the (population) standard deviation and the quantiles 5, 25, 50, 75 and
    95 % over `count` sequences. A measure of the whole dataset has its value as `mean`, no quantiles, and count 1.
    """

    mean: float
    std: float = 0.0
    quantiles: tuple[float, ...] = ()
    count: int = 1


@dataclass(frozen=True)
class Layer:
    """What was measured at one place of one block.

    name: "embed", "block 0" …, "final". place: "block" is the residual stream after the block. path: of the module.
    dim: features. tokens: how many real tokens were seen. measures: name -> summary, with the names of
    `diagnosis.measures.MEASURES`. spectrum: singular values of all tokens, minus their mean, over their sum, largest
    first (at most 256, evenly spaced by rank if there are more; `spectrum_ranks` holds their ranks, from 1).
    heatmap: cosines between the tokens of the example sequence (at most 48 × 48), for reports. intervals: the
    confidence intervals of some measures, for embeddings only, see `diagnose_rows`. distances: for embeddings only,
    the shares of the distances of unit rows in 40 bins from 0 to 2: of two "rows", of a row and its partner ("pairs"),
    and of two "random" points on the sphere.
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
    distances: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name of the layer, with its place unless that is after the block: "block 9 attention.residual"."""
        return self.name if self.place == OUTPUT else f"{self.name} {self.place}"

    def __getitem__(self, measure: str) -> float:
        """Return the mean of a measure, NaN if it was not measured. KeyError if there is no such measure."""
        if measure in self.measures:
            return self.measures[measure].mean
        if measure not in MEASURES:
            names = did_you_mean(measure, MEASURES) or f" There are: {', '.join(self.measures)}."
            raise KeyError(f"There is no measure {measure!r}.{names}")
        return math.nan


@dataclass(frozen=True)
class Evidence:
    """One number behind the verdict: a measure at a layer, and the bound that it is compared with."""

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

    @property
    def sentence(self) -> str:
        """The reason after the name; only the reason where nothing is advised."""
        return self.reason if self.cure == "none" else f"{self.cure}: {self.reason}"


@dataclass(frozen=True)
class Cause:
    """Why a model collapses, or does not train: a sentence, and the measured facts behind it, also in sentences."""

    name: CauseName
    sentence: str
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What the measures mean.

    kind: none, complete (tokens are alike), dimensional (tokens are apart and span few dimensions), or both.
    onset: name of the first collapsed layer, None if there is none. certainty: see `cautions` for the reasons.
    sentence: the verdict in one or two sentences. outlook: how often acting on such a verdict has helped, in words.
    causes: the most important first, if they were looked for.
    """

    kind: Kind
    onset: str | None
    certainty: Certainty
    sentence: str
    evidence: tuple[Evidence, ...] = ()
    cautions: tuple[str, ...] = ()
    advice: tuple[Advice, ...] = ()
    outlook: str = ""
    causes: tuple[Cause, ...] = ()

    @property
    def collapsed(self) -> bool:
        """Whether any kind of collapse was found."""
        return self.kind != "none"

    @property
    def sure(self) -> str:
        """The certainty as a sentence."""
        return f"Certainty: {self.certainty}."

    def describe_cause(self, cause: Cause) -> str:
        """Return the sentence of a cause, with its role: a healthy model has findings that may become causes."""
        return f"{'Cause' if self.collapsed else 'Not a collapse, but'}: {cause.sentence}"

    def lines(self) -> tuple[str, ...]:
        """Return everything as lines of text: the finding, its certainty, causes, cautions, the outlook and advice."""
        causes = (text for c in self.causes for text in (self.describe_cause(c), *(f"  {e}" for e in c.evidence)))
        tips = (line for tip in self.advice for line in (f"→ {tip.sentence}", f"  {tip.code}"))
        cautions = (f"· {caution}" for caution in self.cautions)
        return (self.sentence, self.sure, *causes, *cautions, *filter(None, [self.outlook]), *tips)


@dataclass(frozen=True)
class Diagnosis:
    """The measurements of a model, layer by layer, with a verdict.

    model: its name. architecture: class name. family: name of the backbone. parameters: their number. data: a
    description of the data. batches, sequences, tokens: their numbers. layers: the layers after each block, in the
    order of the model, followed by those at other places. baseline: the layers of a randomly initialized model of the
    same architecture, on fewer batches; empty if not measured. example: the tokens of the heat maps, as text. settings:
    the arguments of the measurement. versions, created, seconds: the environment, the date and the duration. parts: the
    effect of each part of each block, with `causes=True`. others: the diagnoses of the other parts of the model, such
    as its second tower, from the same passes.
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
    parts: Parts | None = None
    others: tuple["Diagnosis", ...] = ()

    def save(self, path: str | Path) -> Path:
        """Write JSON that `load` reads back exactly; the file is never half written."""
        return files.write(Path(path), self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a diagnosis that `save` wrote. ValueError for anything else."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not a readable diagnosis: {error}") from error

    def push(self, repo_id: str, *, private: bool = False) -> str:
        """Push the diagnosis as diagnosis.json, with a card, to a repository on the HuggingFace hub ("owner/name").

        The repository is created if there is none, and its own card is never replaced.

        Returns:
            The address of the commit.
        """
        card = f"---\ntags:\n- uncollapse\n---\n\n# Diagnosis of {self.model}\n\n```text\n{self}\n```\n"
        contents = {"diagnosis.json": (self.to_json() + "\n").encode()}
        return hub.push(repo_id, contents, card, private=private, message=f"Diagnosis of {self.model}")

    def to_json(self) -> str:
        """Return the diagnosis as JSON."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the diagnosis that `to_json` wrote. ValueError for any other text."""
        return cls.of(typed_json.parse(text))

    @classmethod
    def of(cls, state: Any) -> Self:
        """Return the diagnosis that a value of JSON describes. ValueError if it does not fit."""
        if not isinstance(state, dict) or "schema" not in state:
            raise ValueError("it has no schema, so Diagnosis.save did not write it.")
        if state["schema"] != SCHEMA:
            got = str(state["schema"])[:20]
            raise ValueError(f"it has schema {got}, and this version of uncollapse reads {SCHEMA}.")
        try:
            found: Self = typed_json.build(cls, state)
            _check(found)
        except ValueError as error:
            raise ValueError(f"it does not fit the schema ({error}).") from error
        return found

    def report(self, path: str | Path = "report.html", *others: "Diagnosis") -> Path:
        """Write an HTML report, with other diagnoses for comparison; needs the extra `report`."""
        written: Path = RENDERERS["page"]([self, *self.others, *others], path)
        return written

    def plot(self, measure: str = "effective_rank", path: str | Path | None = None) -> Any:
        """Draw a measure by layer; needs the extra `report`.

        Without a path, return a matplotlib figure, which a notebook shows and which can be changed
        (`figure.axes[0].set_title(…)`). With a path, write a PNG, SVG or PDF file and return the path.
        """
        return RENDERERS["plot"](self, measure, path)

    def compare(self, *others: "Diagnosis") -> Any:
        """Compare other diagnoses with this one: `print(d.compare(after))`; it shows itself in a notebook."""
        return RENDERERS["comparison"]([self, *others])

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with one row per layer and one column per measure; needs pandas."""
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

    def table(self, width: int | None = None) -> Table:
        """Return the main measures as a table for a terminal; those that do not fit into its width are only named."""
        head, rows = self._grid()
        head, rows, left_out = display.fit_columns(head, rows, width, [MEASURES[name].short for name in LEAST])
        table = Table(title=display.wrap_title(self._title(), width), title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column(head[0], overflow="fold")
        widths = display.exact_widths(head, rows, display.column_widths(head, rows), width)
        for name, exact in zip(head[1:], widths[1:], strict=True):
            table.add_column(Text(name), justify="right", width=exact)
        for row in rows:
            table.add_row(*map(Text, row))
        if left_out:
            missing = f"Not shown, for lack of width: {', '.join(left_out)}."
            table.caption, table.caption_justify = display.wrap_title(missing, width), "left"
        return table

    def _title(self) -> str:
        title = f"{self.model} on {self.data}" if self.data else self.model
        return "\nwith ".join([title, *self.settings.get("cures", ())])

    def _grid(self) -> tuple[list[str], list[list[str]]]:
        """Return the head and the rows of the table."""
        shown = [m for m in SHOWN if any(m in layer.measures for layer in self.layers)]
        if len(self.layers) == 1:  # transposed: many columns do not fit into a narrow terminal
            (layer,) = self.layers
            values = [[MEASURES[name].short, display.format_value(layer[name])] for name in shown]
            return ["measure", layer.name], values
        rows = [[layer.label, *(display.format_value(layer[name]) for name in shown)] for layer in self.layers]
        return ["layer", *(MEASURES[name].short for name in shown)], rows

    def __repr__(self) -> str:
        found = self.verdict.kind if self.verdict.onset is None else f"{self.verdict.kind} from {self.verdict.onset} on"
        return f"<Diagnosis of {self.model}: {len(self.layers)} layers, collapse: {found}>"

    def _repr_html_(self) -> str:
        verdict, codes = self.verdict, {tip.code for tip in self.verdict.advice}
        lines = [line for line in verdict.lines() if line.strip() not in codes]
        tips = "".join(display.html_code(tip.code) for tip in verdict.advice)
        own = display.html_table(*self._grid(), self._title()) + display.html_lines(lines) + tips
        return own + "".join(other._repr_html_() for other in self.others)

    def tables(self, width: int | None = None) -> tuple[Table, ...]:
        """Return all tables for a terminal: the measures, and the parts and switches if causes were looked for."""
        others = () if self.parts is None else (self.parts.table(), self.parts.switch_table())
        return (self.table(width), *others)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.tables(options.max_width)
        notes = () if self.parts is None else self.parts.notes()
        yield from (Text(line) for line in (*notes, *self.verdict.lines()))
        yield from self.others

    def __str__(self) -> str:
        wide = min(WIDEST, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDEST
        console = Console(width=wide, file=io.StringIO(), force_terminal=False, color_system=None)
        with console.capture() as captured:
            console.print(self)
        return captured.get().rstrip()


def _check(found: Diagnosis) -> None:
    """Raise ValueError if the parts of a diagnosis do not fit together."""
    if not any(layer.place == OUTPUT for layer in found.layers):
        raise ValueError("it has no layer after a block")
    for layer in (*found.layers, *found.baseline):
        if len(layer.spectrum) != len(layer.spectrum_ranks):
            raise ValueError(
                f"{layer.name} has {len(layer.spectrum)} singular values but {len(layer.spectrum_ranks)} ranks"
            )
        if any(len(row) != len(layer.heatmap) for row in layer.heatmap):
            raise ValueError(f"{layer.name} has a heat map that is not square")
        if any(not shares or not math.isclose(sum(shares), 1, rel_tol=1e-6) for shares in layer.distances.values()):
            raise ValueError(f"{layer.name} has shares of distances that do not add up to 1")
    cures = found.settings.get("cures", [])
    if not isinstance(cures, list) or not all(isinstance(cure, str) for cure in cures):
        raise ValueError("the cures in its settings are not a list of texts")
