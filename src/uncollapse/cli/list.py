"""The command `uncollapse list`: metrics, cures, losses, backbones, recipes and measures."""

import json
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from uncollapse.cli import console
from uncollapse.cli.options import complete_from, flag
from uncollapse.errors import UsageError, did_you_mean
from uncollapse.registry import CURES, LOSSES, METRICS

NARROWEST = 24  # letters of a column that can be read
Columns = tuple[tuple[str, ...], Sequence[tuple[str, ...]]]


def list_names(
    kind: Annotated[
        str | None,
        typer.Argument(
            help="metrics, cures, losses, backbones, recipes or measures",
            metavar="KIND",
            autocompletion=lambda incomplete: complete_from(KINDS)(incomplete),
        ),
    ] = None,
    as_json: Annotated[bool, flag("--json", "Print the entries as JSON and nothing else.")] = False,
) -> None:
    """List all entries of one kind with their properties, such as metrics or cures."""
    if kind is None:
        raise UsageError(f"Say what to list: one of {', '.join(KINDS)}, such as `uncollapse list cures`.")
    if kind not in KINDS:
        hint = did_you_mean(kind, KINDS)
        raise UsageError(f"There is no list of {kind!r}; choose one of {', '.join(KINDS)}.{hint}")
    names, rows = KINDS[kind]()
    if as_json:
        entries = [dict(zip(("name", *names[1:]), row, strict=True)) for row in rows]
        typer.echo(json.dumps(entries, ensure_ascii=False))
        return
    terminal = console.stdout_console()
    if terminal.width < NARROWEST * len(names):
        _print_entries(terminal, names, rows)
        return
    table = Table(Column(names[0], no_wrap=True), *names[1:])
    for row in rows:
        table.add_row(*row)
    terminal.print(table)


def _print_entries(terminal: Console, names: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print one paragraph per entry, where the columns of a table would be too narrow to read."""
    for name, *facts in rows:
        console.print_paragraph(terminal, name, style="bold")
        for heading, text in zip(names[1:], facts, strict=True):
            if text:
                console.print_paragraph(terminal, f"{heading}: {text}", bullet="  ")


def _metrics() -> Columns:
    rows = [(m.name, ", ".join(m.needs), m.better or "neither", m.paper) for m in METRICS.values()]
    return ("metric", "needs", "further from collapse", "paper"), rows


def _cures() -> Columns:
    rows = [(c.name, c.default_places(), c.use, c.cost, ", ".join(c.options()), c.paper) for c in CURES.values()]
    return ("cure", "place", "for", "cost", "options", "paper"), rows


def _losses() -> Columns:
    return ("loss", "needs", "paper"), [(loss.name, ", ".join(loss.needs), loss.paper) for loss in LOSSES.values()]


def _backbones() -> Columns:
    from uncollapse.backbones import BACKBONES

    return ("backbone", "library", "models"), [(b.name, b.library, b.models) for b in BACKBONES.values()]


def _recipes() -> Columns:
    from uncollapse.lab.recipe import RECIPES

    named = [(r, (", ".join(names) for names in (r.tables, r.grids, r.presets))) for r in RECIPES.values()]
    rows = [(r.name, r.title, *lists, r.paper) for r, lists in named]
    return ("recipe", "experiment", "tables", "grids", "presets", "paper"), rows


def _measures() -> Columns:
    from uncollapse.diagnosis.measures import MEASURES

    rows = [(m.name, f"one {m.scope}", m.better or "neither", m.says) for m in MEASURES.values()]
    return ("measure", "of", "further from collapse", "description"), rows


KINDS: dict[str, Callable[[], Columns]] = {
    "metrics": _metrics,
    "cures": _cures,
    "losses": _losses,
    "backbones": _backbones,
    "recipes": _recipes,
    "measures": _measures,
}
