"""The command `uncollapse sweep`: run a grid of experiments."""

import json
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uncollapse.cli import console
from uncollapse.cli.console import error_sentence
from uncollapse.cli.options import OUTPUT, complete_recipe, flag, option
from uncollapse.cli.run_tables import MISSING, PlannedRun, format_duration, format_metric, print_runs
from uncollapse.errors import UsageError
from uncollapse.lab.config import fields
from uncollapse.lab.config.field_types import as_text
from uncollapse.lab.config.fields import config_fields

if TYPE_CHECKING:
    from uncollapse.lab.recipe import Recipe
    from uncollapse.lab.runs.grids import Grid, GridCell
    from uncollapse.lab.runs.run_queue import RunQueue
    from uncollapse.lab.runs.sweep import StopReason, Sweep

BLANKS = r"\s+,\s*|\s*,\s+"  # next to a comma
PLOTS = "plots.html"  # next to the results
WHAT, HOW = "Experiments", "Run"  # panels of the help
GRID = "A grid of the recipe by name, or fields with values: 'data=cora,citeseer layers=2,4 seed=0-4'; repeatable."


def sweep(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="See: uncollapse list recipes.",
            show_default=False,
            autocompletion=complete_recipe,
        ),
    ],
    grids: Annotated[list[str] | None, option("GRID", GRID, WHAT, "--grid")] = None,
    choose: Annotated[
        list[str] | None,
        option("FIELD", "Try its values with the first seed; the other seeds use the best on validation.", WHAT),
    ] = None,
    preset: Annotated[
        str | None, option("NAME", "Named settings for fields that the grids leave open, such as a paper's.", WHAT)
    ] = None,
    pairs: Annotated[
        list[str] | None,
        option("KEY=VALUE", "A field that all runs share; it narrows a grid; repeatable.", WHAT, "--set"),
    ] = None,
    budget_minutes: Annotated[
        float | None, option("N", "Stop after this many minutes; the same command continues.", HOW, min=0.0)
    ] = None,
    jobs: Annotated[
        int | None, option("N", "Processes, one thread each; one per core if not given.", HOW, min=1)
    ] = None,
    on: Annotated[
        str | None,
        option("PLACE", "Run on a cluster: dask://HOST:PORT or slurm. Folders must be shared by all machines.", HOW),
    ] = None,
    data_root: Annotated[Path | None, option("DIR", "Folder with the datasets.", HOW)] = None,
    dry_run: Annotated[bool, flag("--dry-run", "Only print what is missing and how long it takes.", HOW)] = False,
    results: Annotated[Path, option("DIR", "Folder of all results.", OUTPUT)] = Path("results"),
    runs: Annotated[Path, option("DIR", "Folder for checkpoints and errors.", OUTPUT)] = Path("runs"),
    as_json: Annotated[bool, flag("--json", "Print the plan or the outcome as JSON on stdout.", OUTPUT)] = False,
) -> None:
    """Run the missing experiments of a grid: cheapest first, several in parallel."""
    from uncollapse.cli.progress import sweep_progress
    from uncollapse.lab.engine.runtime import Runtime
    from uncollapse.lab.recipe import RECIPES
    from uncollapse.lab.runs.cluster import connect
    from uncollapse.lab.runs.results import Results
    from uncollapse.lab.runs.run_queue import RunQueue
    from uncollapse.lab.runs.sweep import Limits, Sweep

    try:
        wanted = RECIPES[recipe]
    except KeyError as error:
        raise UsageError(error_sentence(error)) from error
    console.check_folders(results, runs, data_root)
    given = {} if preset is None else wanted.preset(preset)
    queue = RunQueue(wanted, _cells(wanted, grids or [], tuple(choose or ()), pairs or [], given), Results(results))
    limits = Limits(jobs or os.cpu_count() or 1, None if budget_minutes is None else 60 * budget_minutes)
    if dry_run:
        _show_plan(queue, runs, limits.jobs, as_json)
        if queue.open and (missing := wanted.missing_data(next(iter(queue.open.values())), Runtime(data_root))):
            console.print_note(f"{MISSING} {missing}")
        return
    if queue.open:
        console.make_folders(results / wanted.name, runs)
    pool = None
    if on is not None:
        pool, places = connect(on, runs)
        limits = Limits(jobs or places, limits.seconds)
    with sweep_progress() as listener:
        running = Sweep(queue, runs, Runtime(data_root), limits, listener, pool)
        ended = running.run()
    _show(running, ended, as_json)
    raise typer.Exit(130 if ended == "interrupted" else 1 if queue.failed else 0)


def _show_plan(queue: "RunQueue", runs: Path, jobs: int, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_facts(queue), ensure_ascii=False))
    else:
        print_sweep_plan(queue, runs, jobs)


def _show(sweep: "Sweep", ended: "StopReason", as_json: bool) -> None:
    """Print the outcome."""
    queue = sweep.queue
    if as_json:
        typer.echo(json.dumps(_facts(queue) | {"ended": ended}, ensure_ascii=False))
        return
    console.print_words(_summary(queue, ended))
    for key in list(queue.failed)[:1]:
        console.print_words(_failures(queue, sweep.error_file(queue.config(key))))
    if ended == "done":
        for line in _choices(queue):
            console.print_words(line)
    if ended == "done" and queue.records:
        console.print_words(_results_hint(queue))
        if drawn := _write_plots(queue):
            typer.echo(f"Drawn: {drawn}")


def _write_plots(queue: "RunQueue") -> Path | None:
    """Write the page with the plots of all results, if the recipe has plots and they can be drawn."""
    recipe = queue.recipe
    if recipe.plots is None:
        return None
    from uncollapse.lab.tables.table_page import write_page

    records = queue.results.all(recipe)
    try:
        path = queue.results.folder / recipe.name / PLOTS
        return write_page(next(iter(recipe.tables.values())), records, path, recipe.plots(records))
    except (ImportError, OSError):  # without matplotlib, or on a full disk: the results are saved anyway
        return None


def _cells(
    recipe: "Recipe", texts: list[str], choose: tuple[str, ...], pairs: list[str], preset: Mapping[str, Any]
) -> "list[GridCell]":
    """Return the cells of all grids. Fields of a grid and pairs override a preset."""
    fixed = fields.parse_pairs(recipe.config, pairs)
    choose = tuple(name.replace("-", "_") for name in choose)
    found: list[Grid] = []
    for text in texts:
        found += (_parse_grid(recipe, text, choose),) if "=" in text else recipe.grid(text)
    if not found:
        names = f"one of {', '.join(recipe.grids)}, or " if recipe.grids else ""
        raise UsageError(f"Say what to run with --grid: {names}fields with values, such as 'layers=2,4 seed=0-4'.")
    for name in choose:
        if name not in fields.config_fields(recipe.config):
            fields.parse_values(recipe.config, {name: ""})  # raises with the names that exist
        if not any(name in grid.choose for grid in found):
            raise UsageError(f"--choose {name}: no grid has several values of it; add it, such as '{name}=A,B'.")
    cells: list[GridCell] = []
    varied = fixed.keys() & {name for grid in found for name in grid.values}
    for grid in found:
        left = {name: value for name, value in preset.items() if name not in grid.values}
        if all(name in grid.values or _has_value(recipe.config, left, name, fixed[name]) for name in varied):
            cells += grid.cells(recipe.config, left | fixed)
    if not cells:
        raise UsageError(f"No experiment of the grid has {', '.join(pairs)}; leave out --set, or name a value it has.")
    return cells


def _has_value(config: type, given: Mapping[str, Any], name: str, value: Any) -> bool:
    """Return whether a field has a value where a grid leaves it open: by a preset, or by default."""
    return bool(getattr(fields.build(config, given), name) == value)


def _parse_grid(recipe: "Recipe", text: str, choose: tuple[str, ...]) -> "Grid":
    """Parse a grid such as "layers=2,4 seed=0-4"."""
    from uncollapse.lab.runs.grids import parse_grid

    if re.search(BLANKS, text) and not re.search("[\"']", text):  # inside quotes, spaces belong to a value
        raise UsageError(f"--grid {text!r}: leave out the spaces next to commas: {re.sub(BLANKS, ',', text)!r}.")
    return parse_grid(text, recipe.config, choose)


MOST = 10  # lines of a list
RESULTS = Path("results")  # where they are unless another folder is named


def print_sweep_plan(queue: "RunQueue", runs: Path, jobs: int) -> None:
    """Print the first runs, and the number and duration of all."""
    terminal = console.stdout_console()
    if queue.open:
        due = queue.list_missing()
        print_runs(terminal, [_planned_run(queue, config, runs) for config in due[:MOST]])
        if len(due) > MOST:
            console.print_paragraph(terminal, f"… and {len(due) - MOST} more.")
    console.print_paragraph(terminal, _plan_summary(queue, jobs))


def _planned_run(queue: "RunQueue", config: Any, runs: Path) -> PlannedRun:
    from uncollapse.lab.engine.runtime import Runtime
    from uncollapse.lab.runs.run_one import checkpoint_step, with_run_folder

    recipe = queue.recipe
    begun = checkpoint_step(with_run_folder(Runtime(), recipe, config, runs), recipe, config) is not None
    path = queue.results.path(recipe, config)
    return PlannedRun(queue.label(config), path, there=False, seconds=queue.seconds(config), begun=begun)


def _plan_summary(queue: "RunQueue", jobs: int) -> str:
    if not queue.open:
        return "The only run has a result." if queue.total == 1 else f"All {queue.total} runs have results."
    later = f", and {queue.later} more once the best values are known" if queue.later else ""
    seconds = queue.seconds_open()
    several = f" in {jobs} processes, {format_duration(seconds)} in one" if jobs > 1 else ""
    done, missing = _are(len(queue.records)), _are(len(queue.open))
    takes = "It takes" if len(queue.open) + queue.later == 1 else "They take"
    return (
        f"{_runs(queue.total)}: {done} done, {missing} missing{later}. "
        f"{takes} about {format_duration(seconds / jobs)}{several}. Nothing was run."
    )


def _are(count: int) -> str:
    return f"{count} {'is' if count == 1 else 'are'}"


def _runs(count: int) -> str:
    return f"{count} {'run' if count == 1 else 'runs'}"


def _summary(queue: "RunQueue", ended: "StopReason") -> str:
    """Return how many runs are done, and why not all."""
    done = len(queue.records)
    counts = f"{done} of {_runs(queue.total)} {'is' if done == 1 else 'are'} done, {done - queue.found} of them now."
    match ended:
        case "interrupted":
            return f"Interrupted. {counts} The same command continues from there."
        case "time":
            return f"The time limit was reached. {counts} The same command continues from there."
    return counts


def _failures(queue: "RunQueue", first: Path) -> str:
    """Return how many runs failed, and the file with the first error."""
    wait = "waits" if queue.later == 1 else "wait"
    later = f" {_runs(queue.later)} {wait} for what failed." if queue.later else ""
    verb = "failed; see" if len(queue.failed) == 1 else "failed; see, for the first,"
    return f"{_runs(len(queue.failed))} {verb} {first}.{later} The same command tries again."


def _choices(queue: "RunQueue") -> list[str]:
    """Return one line per cell with the chosen values. Cells are named by the settings in which they differ."""
    chosen = queue.choices()
    differing = [
        name for name in config_fields(queue.recipe.config) if len({getattr(one, name) for _, one in chosen}) > 1
    ]
    lines = [
        _choice(cell, best, [name for name in differing if name not in cell.choose], queue) for cell, best in chosen
    ]
    return lines[:MOST] + [f"… and {len(lines) - MOST} more."] * (len(lines) > MOST)


def _choice(cell: "GridCell", best: Any, names: list[str], queue: "RunQueue") -> str:
    where = f" for {_pairs(best, names)}" if names else ""
    metric = format_metric(cell.by, [queue.records[queue.key(best)]["figures"].get(cell.by)])
    return f"Chosen{where}: {_pairs(best, cell.choose)} ({cell.by} {metric})."


def _pairs(config: Any, names: list[str] | tuple[str, ...]) -> str:
    return " ".join(f"{name}={as_text(getattr(config, name))}" for name in names)


def _results_hint(queue: "RunQueue") -> str:
    """Return where the results are, and the command that shows them."""
    recipe, folder = queue.recipe, queue.results.folder
    words = ["uncollapse", "table", recipe.name, *(() if folder == RESULTS else ("--results", str(folder)))]
    table = f" To see them: {shlex.join(words)}" if recipe.tables else ""
    return f"Results are in {folder / recipe.name}.{table}"


def _facts(queue: "RunQueue") -> dict[str, Any]:
    """Return the outcome for JSON."""
    recipe = queue.recipe
    missing = [
        {
            "name": recipe.name_of(config),
            "file": str(queue.results.path(recipe, config)),
            "seconds": round(queue.seconds(config), 1),
        }
        for config in queue.list_missing()
    ]
    failed = [{"name": recipe.name_of(queue.config(key)), "error": why} for key, why in queue.failed.items()]
    counts = {"total": queue.total, "there": len(queue.records), "later": queue.later}
    seconds = round(queue.seconds_open(), 1)
    return {"recipe": recipe.name, **counts, "seconds": seconds, "missing": missing, "failed": failed}
