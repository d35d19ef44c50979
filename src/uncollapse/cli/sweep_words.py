"""What a sweep would do and what it did, in words."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uncollapse.cli import output
from uncollapse.cli.outcomes import Planned, duration, plan_table, shown
from uncollapse.lab.config.field_types import as_text
from uncollapse.lab.config.fields import settings

if TYPE_CHECKING:
    from uncollapse.lab.runs.grids import Cell
    from uncollapse.lab.runs.run_queue import Agenda
    from uncollapse.lab.runs.sweep import Ended

MOST = 10  # lines of a list
RESULTS = Path("results")  # where they are unless another folder is named


def show_plan(agenda: "Agenda", runs: Path, jobs: int) -> None:
    """The runs that come first, and how many and how long they all are."""
    terminal = output.console()
    if agenda.open:
        due = agenda.missing()
        terminal.print(plan_table([_planned(agenda, config, runs) for config in due[:MOST]]))
        if len(due) > MOST:
            output.paragraph(terminal, f"… and {len(due) - MOST} more.")
    output.paragraph(terminal, _plan(agenda, jobs))


def _planned(agenda: "Agenda", config: Any, runs: Path) -> Planned:
    from uncollapse.lab.engine.runtime import Session
    from uncollapse.lab.runs.run_one import placed, step_of

    recipe = agenda.recipe
    begun = step_of(placed(Session(), recipe, config, runs), recipe, config) is not None
    path = agenda.results.path(recipe, config)
    return Planned(agenda.label(config), path, there=False, seconds=agenda.seconds(config), begun=begun)


def _plan(agenda: "Agenda", jobs: int) -> str:
    if not agenda.open:
        return "The only run is there." if agenda.total == 1 else f"All {agenda.total} runs are there."
    later = f", and {agenda.later} more once it is known which values are best" if agenda.later else ""
    seconds = agenda.seconds_open()
    several = f" in {jobs} processes, {duration(seconds)} in one" if jobs > 1 else ""
    there, missing = _are(len(agenda.records)), _are(len(agenda.open))
    takes = "It takes" if len(agenda.open) + agenda.later == 1 else "They take"
    return (
        f"{_runs(agenda.total)}: {there} there, {missing} missing{later}. "
        f"{takes} about {duration(seconds / jobs)}{several}. Nothing was run."
    )


def _are(count: int) -> str:
    return f"{count} {'is' if count == 1 else 'are'}"


def _runs(count: int) -> str:
    return f"{count} {'run' if count == 1 else 'runs'}"


def summary(agenda: "Agenda", ended: "Ended") -> str:
    """How many runs are done, and why not all are."""
    done = len(agenda.records)
    counts = f"{done} of {_runs(agenda.total)} {'is' if done == 1 else 'are'} done, {done - agenda.found} of them now."
    match ended:
        case "interrupted":
            return f"Interrupted. {counts} The same command goes on from there."
        case "time":
            return f"The time is over. {counts} The same command goes on from there."
    return counts


def failures(agenda: "Agenda", first: Path) -> str:
    """How many failed, and where one of them says why."""
    wait = "waits" if agenda.later == 1 else "wait"
    later = f" {_runs(agenda.later)} {wait} for what failed." if agenda.later else ""
    verb = "failed; see" if len(agenda.failed) == 1 else "failed; see, for the first,"
    return f"{_runs(len(agenda.failed))} {verb} {first}.{later} The same command tries again."


def choices(agenda: "Agenda") -> list[str]:
    """Which values were chosen, a line a cell; cells are told apart by the settings in which they differ."""
    chosen = agenda.chosen()
    differing = [name for name in settings(agenda.recipe.config) if len({getattr(one, name) for _, one in chosen}) > 1]
    lines = [
        _choice(cell, best, [name for name in differing if name not in cell.choose], agenda) for cell, best in chosen
    ]
    return lines[:MOST] + [f"… and {len(lines) - MOST} more."] * (len(lines) > MOST)


def _choice(cell: "Cell", best: Any, names: list[str], agenda: "Agenda") -> str:
    where = f" for {_pairs(best, names)}" if names else ""
    figure = shown(cell.by, [agenda.records[agenda.key(best)]["figures"].get(cell.by)])
    return f"Chosen{where}: {_pairs(best, cell.choose)} ({cell.by} {figure})."


def _pairs(config: Any, names: list[str] | tuple[str, ...]) -> str:
    return " ".join(f"{name}={as_text(getattr(config, name))}" for name in names)


def where(agenda: "Agenda") -> str:
    """Where the results are, and what shows them."""
    recipe, folder = agenda.recipe, agenda.results.folder
    words = ["uncollapse", "table", recipe.name, *(() if folder == RESULTS else ("--results", str(folder)))]
    table = f" To see them: {shlex.join(words)}" if recipe.tables else ""
    return f"Results are in {folder / recipe.name}.{table}"


def facts(agenda: "Agenda") -> dict[str, Any]:
    """All of it for JSON."""
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
