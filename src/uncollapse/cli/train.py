"""uncollapse train."""

import dataclasses
import json
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from uncollapse import distributed
from uncollapse.cli import console, options, outcomes, recipe_flags
from uncollapse.cli.failures import error_sentence
from uncollapse.cli.options import OUTPUT, flag, option
from uncollapse.cli.outcomes import Outcome, PlannedRun
from uncollapse.cli.progress import ProgressBar
from uncollapse.errors import UsageError
from uncollapse.lab.config import fields

if TYPE_CHECKING:
    from uncollapse.lab.engine.runtime import Runtime
    from uncollapse.lab.recipe import Recipe
    from uncollapse.lab.runs.results import Results

FILES, RUN = "Experiment from files", "Run"  # panels of the help
HELP = "Run an experiment: train a model as a recipe says, and keep the result in a file."


@dataclass(frozen=True)
class Order:
    """What `train` is told besides the experiment; its fields are flags.

    All recipes have them but for `workers`, which only those have that read images.
    """

    config: Annotated[
        list[Path] | None, option("FILE", "YAML or JSON with settings; repeatable, flags count more.", FILES)
    ] = None
    pairs: Annotated[
        list[str] | None, option("KEY=VALUE", "A setting; repeatable, counts more than a file.", FILES, "--set")
    ] = None
    seeds: Annotated[int, option("N", "Run so many seeds, counted from --seed.", RUN, min=1)] = 1
    data_root: Annotated[Path | None, option("DIR", "Folder that has the data sets.", RUN)] = None
    device: Annotated[str | None, option("DEVICE", "cpu, cuda or mps; the best there is if not given.", RUN)] = None
    threads: Annotated[int, option("N", "Threads of the processor; figures were made with 1.", RUN, min=1)] = 1
    workers: Annotated[
        int | None, option("N", "Processes that read images ahead; one a free core if not given.", RUN, min=0)
    ] = None
    resume: Annotated[bool, flag("--resume/--no-resume", "Go on where an earlier run was interrupted.", RUN)] = True
    again: Annotated[bool, flag("--again", "Run it even if there is a result, and replace that.", RUN)] = False
    dry_run: Annotated[bool, flag("--dry-run", "Only say what would be run and how long it takes.", RUN)] = False
    results: Annotated[Path, option("DIR", "Folder of all results.", OUTPUT)] = Path("results")
    runs: Annotated[Path, option("DIR", "Folder of checkpoints and trackers.", OUTPUT)] = Path("runs")
    keep: Annotated[
        bool, flag("--keep", "Also keep the trained model, in the folder of the run below --runs.", OUTPUT)
    ] = False
    track: Annotated[str, option("NAMES", "Log to jsonl, tensorboard, wandb; with commas between.", OUTPUT)] = ""
    as_json: Annotated[bool, flag("--json", "Print the records as JSON and nothing else.", OUTPUT)] = False


class RecipeCommands(TyperGroup):
    """A command for each recipe, which is built when it is asked for."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """The names of the recipes, none of which is imported for that."""
        names = TyperGroup(name=self.name, commands={name: TyperCommand(name) for name in options.complete_recipe("")})
        return names.shell_complete(type(ctx)(names, parent=ctx.parent), incomplete)

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of the recipes."""
        from uncollapse.lab.recipe import RECIPES

        return list(RECIPES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a recipe; without its flags while the shell completes, since they would need torch."""
        from uncollapse.lab.recipe import RECIPES

        if ctx is not None and ctx.resilient_parsing:
            return TyperCommand(cmd_name)
        try:
            recipe = RECIPES[cmd_name]
        except KeyError as error:
            raise UsageError(error_sentence(error)) from error
        return self.built(recipe)

    def built(self, recipe: "Recipe") -> Any:
        """The command of a recipe, from what the recipe says."""
        return _command(recipe)


train = typer.Typer(
    cls=RecipeCommands, help=HELP, no_args_is_help=True, options_metavar="", subcommand_metavar="RECIPE [OPTIONS]"
)


def _command(recipe: "Recipe") -> Any:
    """The command whose flags are the fields of the recipe's configuration."""

    def run(**given: Any) -> None:
        order = Order(**{field.name: given[field.name] for field in dataclasses.fields(Order) if field.name in given})
        named = recipe_flags.named_settings(recipe, given.get("preset"), given.get("quick", False))
        config = recipe_flags.read_config(given["ctx"], recipe.config, named, order.config or [], order.pairs or [])
        _train(recipe, [dataclasses.replace(config, seed=config.seed + n) for n in range(order.seeds)], order)

    return recipe_flags.build_command(recipe, Order, run, FILES, without=() if recipe.reads_images else ("workers",))


def _train(recipe: "Recipe", wanted: list[Any], order: Order) -> None:
    from uncollapse.lab.runs.results import Results

    console.check_folders(order.results, order.runs, order.data_root)
    results = Results(order.results)
    if not _takes_part(recipe, order):
        return
    if order.dry_run:
        outcomes.print_plan([_plan_run(recipe, config, results, order) for config in wanted], as_json=order.as_json)
        return
    done: list[Outcome] = []
    try:
        with ProgressBar() as waiting:
            for number, config in enumerate(wanted, 1):
                words = f"Seed {config.seed}" + (f" ({number} of {len(wanted)})" if len(wanted) > 1 else "")
                done.append(_run(recipe, config, results, order, waiting, words))
    except typer.Exit:  # interrupted
        if done and not order.as_json and distributed.is_launch_rank_zero():
            outcomes.print_outcomes(_title(recipe, wanted[0]), done)
        raise
    _show(_title(recipe, wanted[0]), done, order)


def _takes_part(recipe: "Recipe", order: Order) -> bool:
    """Whether this process has something to do, if a launcher started several; they then know each other."""
    count = distributed.launch_size()
    if count == 1 or order.dry_run:
        return distributed.is_launch_rank_zero()
    if not recipe.single_process:
        distributed.join_group(order.device)
        return True
    if distributed.is_launch_rank_zero():
        console.print_note(
            f"{recipe.name} cannot be shared by {count} processes: the first one runs it, and the others wait. "
            "`uncollapse sweep --jobs` runs several at a time."
        )
    return not distributed.wait_for_rank_zero()


def _show(title: str, done: list[Outcome], order: Order) -> None:
    if not distributed.is_launch_rank_zero():
        return
    if there := sum(not outcome.new for outcome in done):
        were, them = ("was", "it") if there == 1 else ("were", "them")
        console.print_note(
            f"{there} of {len(done)} {were} there already and {were} not run; --again runs {them} again."
        )
    if order.as_json:
        typer.echo(json.dumps([outcome.record for outcome in done], ensure_ascii=False))
    else:
        outcomes.print_outcomes(title, done)


def _title(recipe: "Recipe", config: Any) -> str:
    """What all the runs share: the recipe and its settings but for the seed."""
    first = dataclasses.replace(config, seed=recipe.config().seed)
    return fields.command_line(recipe.name, first).removeprefix("uncollapse train ")


def _plan_run(recipe: "Recipe", config: Any, results: "Results", order: Order) -> PlannedRun:
    from uncollapse.lab.runs.run_one import checkpoint_step

    path, there = results.path(recipe, config), results.find(recipe, config) is not None
    begun = checkpoint_step(_session(recipe, config, order), recipe, config) is not None
    return PlannedRun(recipe.name_of(config), path, there, recipe.cost(config), begun, order.again)


def _session(recipe: "Recipe", config: Any, order: Order) -> "Runtime":
    from uncollapse.lab.engine.runtime import Runtime, spare_cores
    from uncollapse.lab.runs.run_one import with_run_folder

    trackers = tuple(name.strip() for name in order.track.split(",") if name.strip())
    workers = spare_cores(order.threads) if order.workers is None else order.workers
    runtime = Runtime(
        order.data_root,
        resume=order.resume,
        device=order.device,
        threads=order.threads,
        trackers=trackers,
        workers=workers if recipe.reads_images else 0,
    )
    runtime = with_run_folder(runtime, recipe, config, order.runs)
    return dataclasses.replace(runtime, save_to=model_folder(runtime)) if order.keep else runtime


def _run(recipe: "Recipe", config: Any, results: "Results", order: Order, waiting: ProgressBar, words: str) -> Outcome:

    runtime = _session(recipe, config, order)
    found = distributed.on_rank_zero(lambda: _find_result(recipe, config, results, order, runtime, waiting))
    if found is not None:
        done = Outcome(found, results.path(recipe, config), new=False)
    else:
        runtime = dataclasses.replace(runtime, progress=waiting.training(words), on_stage=waiting.within(words))
        try:
            done = _run_locked(recipe, config, results, runtime, order.again)
        except KeyboardInterrupt as interrupt:
            if (
                not interrupt.args and distributed.world_size() > 1
            ):  # one process alone: the others do not stop by themselves
                raise
            waiting.note(_interrupt_note(interrupt, config.seed, runtime.checkpoints, order))
            raise typer.Exit(130) from None
    if runtime.save_to is not None:
        waiting.note(saved_model_note(runtime.save_to, done))
    return done


def _find_result(
    recipe: "Recipe", config: Any, results: "Results", order: Order, runtime: "Runtime", waiting: ProgressBar
) -> dict[str, Any] | None:
    """The result, if it need not be run; else there are folders for it, and a word if it goes on."""
    from uncollapse.lab.runs.run_one import checkpoint_step, find_result, remove_leftovers

    found = None if order.again else find_result(recipe, config, results, runtime)
    if found is not None:
        remove_leftovers(recipe, config, results, runtime.checkpoints)
        return found
    console.make_folders(results.path(recipe, config).parent, order.runs)
    if (step := checkpoint_step(runtime, recipe, config)) is not None:
        waiting.note(f"Seed {config.seed} goes on from step {step}.")
    return None


def _run_locked(recipe: "Recipe", config: Any, results: "Results", runtime: "Runtime", again: bool) -> Outcome:
    """Run it while no other command does: a sweep, or this one in another window."""
    from uncollapse.io.files import try_lock
    from uncollapse.lab.runs.run_one import run_lock, run_one

    path = results.path(recipe, config)
    with try_lock(run_lock(recipe, config, results)) if distributed.is_rank_zero() else nullcontext(False) as ours:
        if not distributed.on_rank_zero(lambda: ours):
            raise UsageError(f"Another process is running {recipe.name_of(config)} just now. Wait for its result.")
        record, new = run_one(recipe, config, results, runtime, again)
    return Outcome(record, path, new)


def _interrupt_note(interrupt: KeyboardInterrupt, seed: int, folder: Path | None, order: Order) -> str:
    """What was interrupted, and how to go on if something was saved."""
    whom = [f"with seed {seed}"] if order.seeds > 1 else []
    where = " ".join(["Interrupted", *whom, *map(str, interrupt.args)]) + "."
    if folder is None or not any(folder.glob("step-*")):
        return where
    return f"{where} The same command{'' if order.resume else ' without --no-resume'} goes on from there."


MODEL = "model"


def model_folder(runtime: "Runtime") -> Path | None:
    """Where the model of a run goes: into the folder of the run."""
    return None if runtime.checkpoints is None else runtime.checkpoints / MODEL


def saved_model_note(folder: Path, outcome: Outcome) -> str:
    """What was kept and where, or why nothing was."""
    seed, there = outcome.record["seed"], folder.is_dir()
    if not outcome.new:
        if there and not _is_of_earlier_run(folder, outcome):
            return f"The model of seed {seed} was kept before: {folder}."
        if there:
            return f"The model in {folder} is of an earlier run than this result; --again runs it and keeps that one."
        return f"The model of seed {seed} was not kept, as its result was there already; --again runs it and keeps it."
    if not outcome.record["figures"]:
        return f"The model of seed {seed} was not kept: {outcome.record.get('ended')}"
    if not there:
        return f"The model of seed {seed} was not kept: {outcome.record['recipe']} keeps none."
    return f"Kept: {folder}."


def _is_of_earlier_run(folder: Path, outcome: Outcome) -> bool:
    """Whether a model was kept before the run of a result began."""
    record = outcome.record
    began = datetime.fromisoformat(record["date"]).timestamp() - float(record["seconds"])
    return folder.stat().st_mtime < began - 1
