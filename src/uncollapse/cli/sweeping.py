"""uncollapse sweep."""

import difflib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uncollapse.cli.errors import sentence
from uncollapse.cli.options import OUTPUT, flag, option
from uncollapse.cli.outcomes import duration
from uncollapse.loading.errors import UsageError

if TYPE_CHECKING:
    from uncollapse.lab.agenda import Agenda
    from uncollapse.lab.grids import Cell, Grid
    from uncollapse.lab.recipes import Recipe
    from uncollapse.lab.sweeping import Ended

WHAT, HOW = "Experiments", "Run"  # panels of the help
GRID = "A grid of the recipe by name, or fields with values: 'data=cora,citeseer layers=2,4 seed=0-4'; repeatable."


def sweep(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="See: uncollapse list recipes.", show_default=False)],
    grids: Annotated[list[str] | None, option("GRID", GRID, WHAT, "--grid")] = None,
    choose: Annotated[
        list[str] | None,
        option("FIELD", "Try its values with the first seed; the other seeds take the best on validation.", WHAT),
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
    from uncollapse.lab.agenda import Agenda
    from uncollapse.lab.recipes import RECIPES
    from uncollapse.lab.results import Results
    from uncollapse.lab.sessions import Session
    from uncollapse.lab.sweeping import Limits, Sweep

    try:
        wanted = RECIPES[recipe]
    except KeyError as error:
        raise UsageError(sentence(error)) from error
    agenda = Agenda(wanted, _cells(wanted, grids or [], tuple(choose or ()), pairs or []), Results(results))
    limits = Limits(jobs or os.cpu_count() or 1, None if budget_minutes is None else 60 * budget_minutes)
    if dry_run:
        typer.echo(json.dumps(_facts(agenda), ensure_ascii=False) if as_json else _plan(agenda, limits.jobs))
        return
    with teller() as telling:
        sweeping = Sweep(agenda, runs, Session(data_root), limits, telling)
        ended = sweeping.run()
    if as_json:
        typer.echo(json.dumps(_facts(agenda) | {"ended": ended}, ensure_ascii=False))
    else:
        typer.echo(_summary(agenda, ended))
        for key in list(agenda.failed)[:1]:
            typer.echo(_failures(agenda, sweeping.error_file(agenda.config(key))))
    raise typer.Exit(130 if ended == "interrupted" else 1 if agenda.failed else 0)


def _cells(recipe: "Recipe", texts: list[str], choose: tuple[str, ...], pairs: list[str]) -> "list[Cell]":
    """The cells of all grids that were asked for."""
    from uncollapse.lab.grids import parse

    fixed = dict(_pair(pair) for pair in pairs)
    choose = tuple(name.replace("-", "_") for name in choose)
    found: list[Grid] = []
    for text in texts:
        found += (parse(text, recipe.config, choose),) if "=" in text else _named(recipe, text)
    if not found:
        names = f"one of {', '.join(recipe.grids)}, or " if recipe.grids else ""
        raise UsageError(f"Say what to run with --grid: {names}fields with values, such as 'layers=2,4 seed=0-4'.")
    for name in choose:
        if not any(name in grid.choose for grid in found):
            raise UsageError(f"--choose {name}: no grid has several values of it; add it, such as '{name}=A,B'.")
    return [cell for grid in found for cell in grid.cells(recipe.config, fixed)]


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set takes key=value, such as layers=16, got {text!r}.")
    return name.strip().replace("-", "_"), value.strip()


def _named(recipe: "Recipe", name: str) -> "tuple[Grid, ...]":
    """The grids that the recipe has under a name."""
    if name not in recipe.grids:
        close = difflib.get_close_matches(name, recipe.grids, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        there = f"There are: {', '.join(recipe.grids)}." if recipe.grids else "It has none; write fields with values."
        raise UsageError(f"{recipe.name} has no grid named {name!r}.{hint} {there}")
    return recipe.grids[name]


def _plan(agenda: "Agenda", jobs: int) -> str:
    if not agenda.open:
        return f"All {agenda.total} runs are there."
    later = f", and {agenda.later} more once it is known which values are best" if agenda.later else ""
    seconds = agenda.seconds_open()
    several = f" in {jobs} processes, {duration(seconds)} in one" if jobs > 1 else ""
    return (
        f"{agenda.total} runs: {len(agenda.records)} are there, {len(agenda.open)} are missing{later}.\n"
        f"They take about {duration(seconds / jobs)}{several}. Nothing was run."
    )


def _summary(agenda: "Agenda", ended: "Ended") -> str:
    now = len(agenda.records) - agenda.found
    counts = f"{len(agenda.records)} of {agenda.total} runs are done, {now} of them now."
    match ended:
        case "interrupted":
            return f"Interrupted. {counts} The same command goes on from there."
        case "time":
            return f"The time is over. {counts} The same command goes on from there."
    return counts


def _failures(agenda: "Agenda", first: Path) -> str:
    """How many failed, and where one of them says why."""
    waiting = "run waits" if agenda.later == 1 else "runs wait"
    later = f" {agenda.later} {waiting} for what failed." if agenda.later else ""
    verb = "run failed; see" if len(agenda.failed) == 1 else "runs failed; see, for the first,"
    return f"{len(agenda.failed)} {verb} {first}.{later} The same command tries again."


def _facts(agenda: "Agenda") -> dict[str, Any]:
    recipe = agenda.recipe
    missing = [
        {
            "name": recipe.name_of(config),
            "file": str(agenda.results.path(recipe, config)),
            "seconds": round(agenda.seconds(config), 1),
        }
        for config in agenda.missing()
    ]
    failed = [{"name": recipe.name_of(agenda.config(key)), "error": why} for key, why in agenda.failed.items()]
    counts = {"total": agenda.total, "there": len(agenda.records), "later": agenda.later}
    seconds = round(agenda.seconds_open(), 1)
    return {"recipe": recipe.name, **counts, "seconds": seconds, "missing": missing, "failed": failed}
