"""uncollapse sweep."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uncollapse.cli import folders, sweep_words
from uncollapse.cli.completion import recipes
from uncollapse.cli.failures import sentence
from uncollapse.cli.options import OUTPUT, flag, option
from uncollapse.errors import UsageError
from uncollapse.lab.config import fields

if TYPE_CHECKING:
    from uncollapse.lab.recipe import Recipe
    from uncollapse.lab.runs.grids import Cell, Grid
    from uncollapse.lab.runs.run_queue import Agenda
    from uncollapse.lab.runs.sweep import Ended, Sweep

BLANKS = r"\s+,\s*|\s*,\s+"  # beside a comma
PICTURES = "pictures.html"  # beside the results
WHAT, HOW = "Experiments", "Run"  # panels of the help
GRID = "A grid of the recipe by name, or fields with values: 'data=cora,citeseer layers=2,4 seed=0-4'; repeatable."


def sweep(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="See: uncollapse list recipes.", show_default=False, autocompletion=recipes
        ),
    ],
    grids: Annotated[list[str] | None, option("GRID", GRID, WHAT, "--grid")] = None,
    choose: Annotated[
        list[str] | None,
        option("FIELD", "Try its values with the first seed; the other seeds take the best on validation.", WHAT),
    ] = None,
    preset: Annotated[
        str | None, option("NAME", "Settings of the recipe for what the grids leave open, such as a paper's.", WHAT)
    ] = None,
    pairs: Annotated[
        list[str] | None, option("KEY=VALUE", "A field that all share; repeatable.", WHAT, "--set")
    ] = None,
    budget_minutes: Annotated[
        float | None, option("N", "Stop then; the same command goes on where it stopped.", HOW, min=0.0)
    ] = None,
    jobs: Annotated[
        int | None, option("N", "Processes of one thread each; as many as cores if not given.", HOW, min=1)
    ] = None,
    data_root: Annotated[Path | None, option("DIR", "Folder that has the data sets.", HOW)] = None,
    dry_run: Annotated[bool, flag("--dry-run", "Only say what is missing and how long it takes.", HOW)] = False,
    results: Annotated[Path, option("DIR", "Folder of all results.", OUTPUT)] = Path("results"),
    runs: Annotated[Path, option("DIR", "Folder of checkpoints and errors.", OUTPUT)] = Path("runs"),
    as_json: Annotated[bool, flag("--json", "Print the plan, or what came of it, as JSON on stdout.", OUTPUT)] = False,
) -> None:
    """Run what is missing of a grid of experiments: cheapest first, several at a time."""
    from uncollapse.cli.sweep_progress import teller
    from uncollapse.lab.engine.runtime import Session
    from uncollapse.lab.recipe import RECIPES
    from uncollapse.lab.runs.results import Results
    from uncollapse.lab.runs.run_queue import Agenda
    from uncollapse.lab.runs.sweep import Limits, Sweep

    try:
        wanted = RECIPES[recipe]
    except KeyError as error:
        raise UsageError(sentence(error)) from error
    folders.check(results, runs, data_root)
    given = {} if preset is None else wanted.preset(preset)
    agenda = Agenda(wanted, _cells(wanted, grids or [], tuple(choose or ()), pairs or [], given), Results(results))
    limits = Limits(jobs or os.cpu_count() or 1, None if budget_minutes is None else 60 * budget_minutes)
    if dry_run:
        _show_plan(agenda, runs, limits.jobs, as_json)
        return
    if agenda.open:
        folders.make(results / wanted.name, runs)
    with teller() as telling:
        sweeping = Sweep(agenda, runs, Session(data_root), limits, telling)
        ended = sweeping.run()
    _show(sweeping, ended, as_json)
    raise typer.Exit(130 if ended == "interrupted" else 1 if agenda.failed else 0)


def _show_plan(agenda: "Agenda", runs: Path, jobs: int, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(sweep_words.facts(agenda), ensure_ascii=False))
    else:
        sweep_words.show_plan(agenda, runs, jobs)


def _show(sweep: "Sweep", ended: "Ended", as_json: bool) -> None:
    """What came of it."""
    agenda = sweep.agenda
    if as_json:
        typer.echo(json.dumps(sweep_words.facts(agenda) | {"ended": ended}, ensure_ascii=False))
        return
    typer.echo(sweep_words.summary(agenda, ended))
    for key in list(agenda.failed)[:1]:
        typer.echo(sweep_words.failures(agenda, sweep.error_file(agenda.config(key))))
    if ended == "done":
        for line in sweep_words.choices(agenda):
            typer.echo(line)
    if ended == "done" and agenda.records:
        typer.echo(sweep_words.where(agenda))
        if drawn := _drawn(agenda):
            typer.echo(f"Drawn: {drawn}")


def _drawn(agenda: "Agenda") -> Path | None:
    """The page with the pictures of all results, where the recipe has some and they can be drawn."""
    recipe = agenda.recipe
    if recipe.plots is None:
        return None
    from uncollapse.lab.tables.table_page import write_page

    records = agenda.results.all(recipe)
    try:
        path = agenda.results.folder / recipe.name / PICTURES
        return write_page(next(iter(recipe.tables.values())), records, path, recipe.plots(records))
    except (ImportError, OSError):  # without matplotlib, or on a full disk: the results are there all the same
        return None


def _cells(
    recipe: "Recipe", texts: list[str], choose: tuple[str, ...], pairs: list[str], preset: Mapping[str, Any]
) -> "list[Cell]":
    """The cells of all grids that were asked for; a preset gives way to the fields of a grid and to pairs."""
    fixed = fields.from_pairs(recipe.config, pairs)
    choose = tuple(name.replace("-", "_") for name in choose)
    found: list[Grid] = []
    for text in texts:
        found += (_written(recipe, text, choose),) if "=" in text else recipe.grid(text)
    if not found:
        names = f"one of {', '.join(recipe.grids)}, or " if recipe.grids else ""
        raise UsageError(f"Say what to run with --grid: {names}fields with values, such as 'layers=2,4 seed=0-4'.")
    for name in choose:
        if name not in fields.settings(recipe.config):
            fields.checked(recipe.config, {name: ""})  # which says what there is
        if not any(name in grid.choose for grid in found):
            raise UsageError(f"--choose {name}: no grid has several values of it; add it, such as '{name}=A,B'.")
    cells: list[Cell] = []
    for grid in found:
        left = {name: value for name, value in preset.items() if name not in grid.values}
        cells += grid.cells(recipe.config, left | fixed)
    return cells


def _written(recipe: "Recipe", text: str, choose: tuple[str, ...]) -> "Grid":
    """The grid that was written out."""
    from uncollapse.lab.runs.grids import parse

    if re.search(BLANKS, text) and not re.search("[\"']", text):  # within quotes, blanks belong to a value
        raise UsageError(f"--grid {text!r}: leave out the blanks beside commas: {re.sub(BLANKS, ',', text)!r}.")
    return parse(text, recipe.config, choose)
