"""The command `uncollapse tune`: search for the best cure, place and strength of a recipe."""

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uncollapse.cli import console, recipe_flags
from uncollapse.cli.options import OUTPUT, flag, option
from uncollapse.cli.run_tables import MISSING, format_duration, format_metric
from uncollapse.cli.train import FILES, RUN, RecipeCommands
from uncollapse.distributed import launch_size
from uncollapse.errors import UsageError
from uncollapse.lab.config import fields

if TYPE_CHECKING:
    from uncollapse.lab.recipe import Recipe
    from uncollapse.lab.search.tune_recipe import Outcome
    from uncollapse.lab.search.variables import SearchPlan
    from uncollapse.tuning.trial_result import TrialResult

SEARCH = "Search"  # panel of the help
HELP = "Search for the cure, place and strength that are best on validation; settings that you give stay fixed."
TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|sec|min|m|h|d)?")
SECONDS = {"s": 1, "sec": 1, "min": 60, "m": 60, None: 60, "h": 3600, "d": 86_400}
VARY = "A field to vary, on top of the recipe's own: scale=0.01..2, norm=pair_norm,contra_norm; repeatable."


@dataclass(frozen=True)
class Order:
    """The options of `tune` that are not part of the experiment; its fields are flags."""

    config: Annotated[list[Path] | None, option("FILE", "YAML or JSON with fixed settings; repeatable.", FILES)] = None
    pairs: Annotated[list[str] | None, option("KEY=VALUE", "One fixed setting; repeatable.", FILES, "--set")] = None
    vary: Annotated[list[str] | None, option("FIELD=…", VARY, SEARCH)] = None
    trials: Annotated[
        int, option("N", "Trials in total, including existing ones; a larger number continues.", SEARCH, min=1)
    ] = 20
    budget: Annotated[
        str | None, option("TIME", "Stop after this time, such as 45min or 2h; the same command continues.", SEARCH)
    ] = None
    pruner: Annotated[str, option("NAME", "Stops bad trials early: median, hyperband, or none.", SEARCH)] = "median"
    jobs: Annotated[int, option("N", "Processes, one thread each.", RUN, min=1)] = 1
    data_root: Annotated[Path | None, option("DIR", "Folder with the datasets.", RUN)] = None
    dry_run: Annotated[bool, flag("--dry-run", "Only print what varies and how long it takes.", RUN)] = False
    study: Annotated[
        Path | None, option("DIR", "Folder of the study; studies/RECIPE if not given.", OUTPUT, show_default=False)
    ] = None
    as_json: Annotated[bool, flag("--json", "Print the findings as JSON and nothing else.", OUTPUT)] = False


class TuneCommands(RecipeCommands):
    """One command per recipe, built when it is called; the help lists those that can be tuned."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the recipes that have a search space."""
        return _tunable()

    def build(self, recipe: "Recipe") -> Any:
        """Build the command of a recipe."""

        def run(**given: Any) -> None:
            order = Order(**{field.name: given[field.name] for field in dataclasses.fields(Order)})
            named = recipe_flags.named_settings(recipe, given.get("preset"), given.get("quick", False))
            settings = recipe_flags.given_settings(given["ctx"], recipe.config, order.config or [], order.pairs or [])
            _tune(recipe, {**named, **settings}, list(settings), order)

        return recipe_flags.build_command(recipe, Order, run, FILES)


tune = typer.Typer(
    cls=TuneCommands, help=HELP, no_args_is_help=True, options_metavar="", subcommand_metavar="RECIPE [OPTIONS]"
)


def _tune(recipe: "Recipe", values: dict[str, Any], given: list[str], order: Order) -> None:
    from uncollapse.cli.progress import tune_progress
    from uncollapse.lab.engine.runtime import Runtime
    from uncollapse.lab.runs.sweep import Limits
    from uncollapse.lab.search.trials import TrialLimits
    from uncollapse.lab.search.tune_recipe import PAGE, RUNS
    from uncollapse.lab.search.tune_recipe import tune_recipe as search

    if (count := launch_size()) > 1:
        raise UsageError(
            f"tune starts its own processes with --jobs, got {count} from a launcher. Start it without a launcher."
        )
    plan = _build_plan(recipe, values, given, order)
    folder = order.study or Path("studies") / recipe.name
    console.check_folders(folder, folder / RUNS, order.data_root)
    if order.dry_run:
        _show_plan(recipe, plan, folder, order)
        return
    console.make_folders(folder, folder / RUNS)
    limits, pruner = (
        Limits(order.jobs, None if order.budget is None else seconds_of(order.budget)),
        _pruner(order.pruner),
    )
    with tune_progress() as listener:
        outcome = search(
            recipe, plan, folder, Runtime(order.data_root), listener,
            trial_limits=TrialLimits(order.trials), limits=limits, pruning=pruner,
        )  # fmt: skip
    written = _page(outcome, folder / PAGE)
    _show(outcome, folder, written, order)
    raise typer.Exit(130 if outcome.ended == "interrupted" else 1 if outcome.failed else 0)


def seconds_of(text: str) -> float:
    """Return the seconds of a time; minutes if no unit is given.

    >>> seconds_of("90s"), seconds_of("45min"), seconds_of("1.5 h"), seconds_of("10")
    (90.0, 2700.0, 5400.0, 600.0)
    """
    found = TIME.fullmatch(text.strip().lower())
    if found is None:
        raise UsageError(f"--budget takes a time such as 90s, 45min or 2h, got {text!r}.")
    return float(found[1]) * SECONDS[found[2]]


def _pruner(name: str) -> Any:
    from uncollapse.tuning.study import PRUNERS

    if name not in PRUNERS:
        raise UsageError(f"--pruner must be one of {', '.join(PRUNERS)}, got {name!r}.")
    return name


def _build_plan(recipe: "Recipe", values: dict[str, Any], given: list[str], order: Order) -> "SearchPlan":
    from uncollapse.lab.search.variables import build_search

    if recipe.search is None:
        there = ", ".join(_tunable())
        raise UsageError(f"{recipe.name} has no search space. Recipes that can be tuned: {there}.")
    return build_search(recipe.search, fields.build(recipe.config, values), given, order.vary or [])


def _tunable() -> list[str]:
    from uncollapse.lab.recipe import RECIPES

    return [name for name in RECIPES if RECIPES[name].search is not None]


def _show_plan(recipe: "Recipe", plan: "SearchPlan", folder: Path, order: Order) -> None:
    from uncollapse.lab.engine.runtime import Runtime
    from uncollapse.lab.search.tune_recipe import OUTCOME, check_outcome, estimate_seconds

    path = folder / OUTCOME
    try:
        known = json.loads(path.read_bytes())
        there = sum(trial["state"] != "open" and not trial["idle"] for trial in known["trials"])
    except (OSError, ValueError, KeyError, TypeError):  # no study yet, or a damaged file: the study itself counts
        there = 0
    else:
        check_outcome(path, known, recipe, plan)
    seconds = estimate_seconds(recipe, plan, order.trials)
    if order.as_json:
        space = [dimension.describe() for dimension in plan.space]
        typer.echo(json.dumps({"recipe": recipe.name, "there": there, "seconds": seconds, "space": space}))
        return
    for line in _plan_lines(plan, order.trials, there, seconds, order.jobs):
        console.print_words(line)
    if there < order.trials and (missing := recipe.missing_data(plan.config, Runtime(order.data_root))):
        console.print_note(f"{MISSING} {missing}")


def _page(outcome: "Outcome", path: Path) -> Path | None:
    """Write the page with plots; None if it cannot be drawn."""
    if outcome.best is None:
        return None
    try:
        from uncollapse.tuning.search_page import SearchReport, write_search_page

        title = f"Tuning {outcome.recipe.name}"
        by, space = outcome.plan.search.by, outcome.facts()["space"]
        sentences = tuple(_findings(outcome))
        line = outcome.line or outcome.command or ""
        return write_search_page(
            SearchReport(title, by, "higher", outcome.trials, space, outcome.shares, line, sentences), path
        )
    except ImportError as error:
        console.print_note(f"No page was written: {error}")
        return None


def _show(outcome: "Outcome", folder: Path, page: Path | None, order: Order) -> None:
    from uncollapse.lab.search.tune_recipe import OUTCOME, RUNS

    if order.as_json:
        typer.echo(json.dumps(outcome.facts(), ensure_ascii=False))
        return
    for words in (_summary(outcome, order.trials), *_findings(outcome)):
        console.print_words(words)
    for line in _copy_lines(outcome):  # whole, so that it can be copied
        typer.echo(line)
    if outcome.failed:
        console.print_words(_failures(outcome, folder / RUNS))
    places = [str(folder / OUTCOME), *([] if page is None else [str(page)])]
    console.print_written(places)


STATES = {"done": "done", "pruned": "stopped early", "failed": "failed", "open": "not done"}


def _plan_lines(plan: "SearchPlan", trials: int, there: int, seconds: float, jobs: int) -> list[str]:
    """Return what varies, and how long it takes. there: trials that are done."""
    lines = ["These settings vary:", *(f"  {dimension.describe()}" for dimension in plan.space)]
    left = max(0, trials - there)
    many = f" in {jobs} processes" if jobs > 1 else ""
    takes = format_duration(seconds * left / max(1, trials) / jobs)
    counts = f"{trials} trials: {there} done, {left} missing."
    return [*lines, f"{counts} They take about {takes}{many}, less where some are stopped early. Nothing was run."]


def _summary(outcome: "Outcome", trials: int) -> str:
    """Return how many trials there are, how they ended, and what they cost."""
    ran = [trial for trial in outcome.trials if not trial.idle]
    counts = [f"{count} {word}" for state, word in STATES.items() if (count := _count(ran, state))]
    cost = f"They cost as much as {outcome.trainings:.1f} full trainings, {format_duration(outcome.seconds)}."
    why = {"interrupted": "Interrupted. ", "time": "The time limit was reached. "}.get(outcome.ended, "")
    on = " The same command continues from there." if why else ""
    over = " There is nothing else to try." if outcome.used_up else ""
    finished = sum(trial.state != "open" for trial in ran)
    return f"{why}{finished} of {trials} trials: {', '.join(counts) or 'none done'}. {cost}{on}{over}"


def _findings(outcome: "Outcome") -> list[str]:
    """Return the best trial next to the one without a cure, and what mattered; nothing before a trial is done."""
    best, base, by = outcome.best, outcome.baseline, outcome.plan.search.by
    if best is None:
        return []
    without = "" if base is None else f" Without a cure: {format_metric(by, [base.value])}."
    if best.number == 0:
        lines = [f"No cure was better than none: {by} {format_metric(by, [best.value])}."]
    else:
        lines = [f"Best: trial {best.number}, {best.describe()}: {by} {format_metric(by, [best.value])}.{without}"]
    metrics = outcome.unseen_metrics(best) if outcome.ended == "done" else {}  # only when the search is over
    unseen = [f"{name} {format_metric(name, [value])}{_without_cure(outcome, name)}" for name, value in metrics.items()]
    lines += [f"Not used by the search: {', '.join(unseen)}."] if unseen else []
    shares = [f"{name} {100 * share:.0f} %" for name, share in outcome.shares.items()]
    return lines + ([f"What mattered: {', '.join(shares)} of the differences."] if shares else [])


def _copy_lines(outcome: "Outcome") -> list[str]:
    """Return the lines to copy."""
    lines = [] if outcome.line is None else [f"In your own code:  {outcome.line}"]
    return lines if outcome.command is None else [*lines, f"The same run:      {outcome.command}"]


def _failures(outcome: "Outcome", folder: Path) -> str:
    """Return how many trials failed, and why the first did."""
    label, why = next(iter(outcome.failed.items()))
    one = len(outcome.failed) == 1
    count = "1 trial" if one else f"{len(outcome.failed)} trials"
    return (
        f"{count} failed; {'it' if one else 'the first'} was {label}: {why} See {folder}. The same command tries again."
    )


def _without_cure(outcome: "Outcome", name: str) -> str:
    """Return the same metric of the run without a cure, if that is another run."""
    base = outcome.baseline
    value = None if base is None or base is outcome.best else outcome.unseen_metrics(base).get(name)
    return "" if value is None else f" (without a cure {format_metric(name, [value])})"


def _count(trials: Sequence["TrialResult"], state: str) -> int:
    return sum(trial.state == state for trial in trials)
