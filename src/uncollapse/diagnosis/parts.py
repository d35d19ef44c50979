"""The parts of the blocks of a model, what each does to the tokens, and the model with parts switched off: frozen."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.table import Table
from rich.text import Text

ROWS = 12  # blocks in the table for a terminal


@dataclass(frozen=True)
class Change:
    """How much a part of a block changes the tokens that pass it: their mean cosine, and their rank share."""

    cosine: float
    rank_share: float

    def plus(self, other: "Change") -> "Change":
        """Return the change by both."""
        return Change(self.cosine + other.cosine, self.rank_share + other.rank_share)

    def texts(self) -> tuple[str, str]:
        """Return both numbers with their signs."""
        cosine, share = (f"{value:+.2f}".replace("-", "−") for value in (self.cosine, self.rank_share))
        return cosine, share


@dataclass(frozen=True)
class BlockParts:
    """The parts of one block.

    changes: part -> its change, of the parts that were measured. "attention", "cross" and "mlp" are from the residual
    stream before the part to the stream after it; "norm" is the sum over the norms of the block; "convolution" is from
    its input to its output, and "rest" from there to the next layer. residual: the share of the variance after the
    block that its residual branch carries, 0 if there is none. length: root mean square of the features after the
    block. gradient: norm of the gradient of the loss there. None: not measured.
    """

    name: str
    changes: Mapping[str, Change] = field(default_factory=dict)
    residual: float | None = None
    length: float | None = None
    gradient: float | None = None


@dataclass(frozen=True)
class Switch:
    """The last block with a part of every block switched off or changed; with the loss, if there is one.

    name: "nothing" for the model as it is.
    """

    name: str
    cosine: float
    rank_share: float
    loss: float | None = None


@dataclass(frozen=True)
class Parts:
    """The parts of a model, measured on one batch.

    last: the block at which switches are compared. missing: what was not measured -> the reason.
    """

    last: str
    blocks: tuple[BlockParts, ...]
    switches: tuple[Switch, ...]
    missing: Mapping[str, str] = field(default_factory=dict)

    def switch(self, name: str) -> Switch | None:
        """Return the switch of this name, None if it was not measured."""
        return next((switch for switch in self.switches if switch.name == name), None)

    @property
    def names(self) -> tuple[str, ...]:
        """The parts that were measured in some block, in order."""
        return tuple(dict.fromkeys(part for block in self.blocks for part in block.changes))

    def total(self, part: str) -> Change | None:
        """Return the sum of the changes of a part over all blocks, None if it was not measured."""
        found = [block.changes[part] for block in self.blocks if part in block.changes]
        return functools.reduce(Change.plus, found) if found else None

    @staticmethod
    def label(part: str) -> str:
        """Return the name of a part in tables."""
        return "MLP" if part == "mlp" else part

    def table(self) -> Table:
        """Return the blocks as a table for a terminal, at most twelve of them."""
        shown = _select_shown(self.blocks)
        few = "" if len(shown) == len(self.blocks) else f" ({len(shown)} of {len(self.blocks)} blocks)"
        title = f"Change of cosine / rank share by each part{few}"
        table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("layer", no_wrap=True)
        for heading in (*map(self.label, self.names), "residual", "length", "gradient"):
            table.add_column(heading, justify="right", no_wrap=True)
        for block in shown:
            table.add_row(block.name, *_cells(block, self.names))
        return table

    def switch_table(self) -> Table:
        """Return the switches as a table for a terminal."""
        table = Table(
            title=Text(f"With a part switched off, at {self.last}"), title_justify="left", box=box.SIMPLE_HEAD
        )
        table.add_column("switch", no_wrap=True)
        losses = any(switch.loss is not None for switch in self.switches)
        for heading in ("cosine", "rank share", *(["loss"] if losses else [])):
            table.add_column(heading, justify="right")
        for switch in self.switches:
            loss = [_short(switch.loss)] if losses else []
            table.add_row(switch.name, f"{switch.cosine:.3f}", f"{switch.rank_share:.3f}", *loss)
        return table

    def notes(self) -> Iterator[str]:
        """Yield a sentence for each reason why something was not measured."""
        for reason in dict.fromkeys(self.missing.values()):
            yield f"Not measured: {', '.join(what for what, why in self.missing.items() if why == reason)} ({reason})."


def _select_shown(blocks: Sequence[BlockParts]) -> list[BlockParts]:
    if len(blocks) <= ROWS:
        return list(blocks)
    return [blocks[round(number * (len(blocks) - 1) / (ROWS - 1))] for number in range(ROWS)]


def _cells(block: BlockParts, parts: Sequence[str]) -> list[str]:
    changes = [block.changes.get(part) for part in parts]
    texts = ["–" if change is None else "/".join(change.texts()) for change in changes]
    share = "–" if block.residual is None else f"{block.residual:.2f}"
    return [*texts, share, _short(block.length), _short(block.gradient)]


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e+")
