"""The command `uncollapse train`: run one experiment of a recipe."""

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
from uncollapse.cli import console, options, recipe_flags, run_tables
from uncollapse.cli.console import error_sentence
from uncollapse.cli.options import OUTPUT, flag, option
from uncollapse.cli.progress import ProgressBar
from uncollapse.cli.run_tables import Outcome, PlannedRun
from uncollapse.errors import UsageError
from uncollapse.lab.config import fields

if TYPE_CHECKING:  # the libraries of a recipe are imported when it is run
    from uncollapse.lab.engine.runtime import AlarmError, Runtime
    from uncollapse.lab.recipe import Recipe
    from uncollapse.lab.runs.results import Results

FILES, RUN = "Experiment from files", "Run"  # panels of the help
HELP = "Run an experiment: train a model as a recipe describes, and save the result to a file."
MODEL = "model"  # folder of the saved model, inside the folder of the run


@dataclass(frozen=True)
class TrainOptions:
    """The options of `train` that are not part of the experiment; its fields are flags.

    All recipes have them, except `workers`: only recipes that read images have it.
    """

    config: Annotated[
        list[Path] | None, option("FILE", "YAML or JSON with settings; repeatable. Flags override it.", FILES)
    ] = None
    pairs: Annotated[
        list[str] | None, option("KEY=VALUE", "One setting; repeatable. Overrides files.", FILES, "--set")
    ] = None
    seeds: Annotated[int, option("N", "Number of seeds to run, starting from --seed.", RUN, min=1)] = 1
    data_root: Annotated[Path | None, option("DIR", "Folder with the datasets.", RUN)] = None
    device: Annotated[str | None, option("DEVICE", "cpu, cuda or mps; the best available if not given.", RUN)] = None
    threads: Annotated[int, option("N", "CPU threads; the published results used 1.", RUN, min=1)] = 1
    workers: Annotated[
        int | None, option("N", "Processes that load images; one per free core if not given.", RUN, min=0)
    ] = None
    resume: Annotated[bool, flag("--resume/--no-resume", "Continue an interrupted run.", RUN)] = True
    again: Annotated[bool, flag("--again", "Run even if a result exists, and replace it.", RUN)] = False
    early_alarm: Annotated[
        bool, flag("--early-alarm", "Stop after 5 % of the steps, with code 3, if it is likely to fail.", RUN)
    ] = False
    dry_run: Annotated[bool, flag("--dry-run", "Only print what would run and how long it takes.", RUN)] = False
    results: Annotated[Path, option("DIR", "Folder of all results.", OUTPUT)] = Path("results")
    runs: Annotated[Path, option("DIR", "Folder for checkpoints and trackers.", OUTPUT)] = Path("runs")
    save: Annotated[
        bool, flag("--save", "Also save the trained model, in the folder of the run below --runs.", OUTPUT)
    ] = False
    track: Annotated[str, option("NAMES", "Log to jsonl, tensorboard, wandb, trackio (comma-separated).", OUTPUT)] = ""
    as_json: Annotated[bool, flag("--json", "Print the records as JSON and nothing else.", OUTPUT)] = False


class RecipeCommands(TyperGroup):
    """One command per recipe, built when it is called."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete the names of the recipes without importing any of them."""
        names = TyperGroup(name=self.name, commands={name: TyperCommand(name) for name in options.complete_recipe("")})
        return names.shell_complete(type(ctx)(names, parent=ctx.parent), incomplete)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all parameters."""
        return options.without_flag_types(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the recipes."""
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
        return self.build(recipe)

    def build(self, recipe: "Recipe") -> Any:
        """Build the command of a recipe; its flags are the fields of the recipe's configuration."""

        def run(**given: Any) -> None:
            names = [field.name for field in dataclasses.fields(TrainOptions)]
            asked = TrainOptions(**{name: given[name] for name in names if name in given})
            named = recipe_flags.named_settings(recipe, given.get("preset"), given.get("quick", False))
            config = recipe_flags.read_config(given["ctx"], recipe.config, named, asked.config or [], asked.pairs or [])
            _train(recipe, [dataclasses.replace(config, seed=config.seed + n) for n in range(asked.seeds)], asked)

        without = () if recipe.reads_images else ("workers",)
        return recipe_flags.build_command(recipe, TrainOptions, run, FILES, without=without)


train = typer.Typer(
    cls=RecipeCommands, help=HELP, no_args_is_help=True, options_metavar="", subcommand_metavar="RECIPE [OPTIONS]"
)


def _train(recipe: "Recipe", configs: list[Any], asked: TrainOptions) -> None:
    from uncollapse.lab.runs.results import Results

    console.check_folders(asked.results, asked.runs, asked.data_root)
    results = Results(asked.results)
    if not _takes_part(recipe, asked):
        return
    if asked.dry_run:
        plan = [_plan_run(recipe, config, results, asked) for config in configs]
        if any(run.due for run in plan):  # seeds share their data
            missing = recipe.missing_data(configs[0], _runtime(recipe, configs[0], asked))
            plan = [dataclasses.replace(run, missing=missing) for run in plan]
        run_tables.print_plan(plan, as_json=asked.as_json)
        return
    done: list[Outcome] = []
    try:
        with ProgressBar() as bar:
            for number, config in enumerate(configs, 1):
                words = f"Seed {config.seed}" + (f" ({number} of {len(configs)})" if len(configs) > 1 else "")
                done.append(_run(recipe, config, results, asked, bar, words))
    except typer.Exit:  # interrupted
        if done and not asked.as_json and distributed.is_launch_rank_zero():
            run_tables.print_outcomes(_title(recipe, configs[0]), done)
        raise
    _print(_title(recipe, configs[0]), done, asked)


def _takes_part(recipe: "Recipe", asked: TrainOptions) -> bool:
    """Return whether this process has something to do. If a launcher started several, they join a group."""
    count = distributed.launch_size()
    if count == 1 or asked.dry_run:
        return distributed.is_launch_rank_zero()
    if not recipe.single_process:
        distributed.join_group(asked.device)
        return True
    if distributed.is_launch_rank_zero():
        console.print_note(
            f"{recipe.name} cannot be split over {count} processes: rank 0 runs it, and the others wait. "
            "`uncollapse sweep --jobs` runs several experiments at the same time."
        )
    return not distributed.wait_for_rank_zero()


def _print(title: str, done: list[Outcome], asked: TrainOptions) -> None:
    if not distributed.is_launch_rank_zero():
        return
    if existing := sum(not outcome.new for outcome in done):
        them = "it" if existing == 1 else "them"
        have = "has a result" if existing == 1 else "have results"
        console.print_note(f"{existing} of {len(done)} already {have} and did not run; --again runs {them} again.")
    if asked.as_json:
        typer.echo(json.dumps([outcome.record for outcome in done], ensure_ascii=False))
    else:
        run_tables.print_outcomes(title, done)


def _title(recipe: "Recipe", config: Any) -> str:
    """Return what all the runs share: the recipe and its settings, without the seed."""
    first = dataclasses.replace(config, seed=recipe.config().seed)
    return fields.command_line(recipe.name, first).removeprefix("uncollapse train ")


def _plan_run(recipe: "Recipe", config: Any, results: "Results", asked: TrainOptions) -> PlannedRun:
    from uncollapse.lab.runs.run_one import checkpoint_step

    path, there = results.path(recipe, config), results.find(recipe, config) is not None
    begun = checkpoint_step(_runtime(recipe, config, asked), recipe, config) is not None
    return PlannedRun(recipe.name_of(config), path, there, recipe.cost(config), begun, asked.again)


def _runtime(recipe: "Recipe", config: Any, asked: TrainOptions) -> "Runtime":
    from uncollapse.lab.engine.runtime import Runtime, spare_cores
    from uncollapse.lab.engine.trackers import check_names
    from uncollapse.lab.runs.run_one import with_run_folder

    trackers = tuple(name.strip() for name in asked.track.split(",") if name.strip())
    check_names(trackers)
    workers = spare_cores(asked.threads) if asked.workers is None else asked.workers
    runtime = Runtime(
        asked.data_root,
        resume=asked.resume,
        device=asked.device,
        threads=asked.threads,
        trackers=trackers,
        workers=workers if recipe.reads_images else 0,
        alarm=asked.early_alarm,
    )
    runtime = with_run_folder(runtime, recipe, config, asked.runs)
    if not asked.save or runtime.checkpoints is None:
        return runtime
    return dataclasses.replace(runtime, save_to=runtime.checkpoints / MODEL)


def _run(
    recipe: "Recipe", config: Any, results: "Results", asked: TrainOptions, bar: ProgressBar, words: str
) -> Outcome:
    """Run one seed, or find its result. words: how the progress bar calls it."""
    from uncollapse.lab.engine.runtime import AlarmError

    runtime = _runtime(recipe, config, asked)
    found = distributed.on_rank_zero(lambda: _find_result(recipe, config, results, asked, runtime, bar))
    if found is not None:
        done = Outcome(found, results.path(recipe, config), new=False)
    else:
        runtime = dataclasses.replace(runtime, progress=bar.start_training(words), on_stage=bar.substage(words))
        try:
            done = _run_locked(recipe, config, results, runtime, asked.again)
        except AlarmError as alarm:
            bar.end()  # the alarm is printed on stdout
            _print_alarm(alarm, config.seed, asked.as_json)
            raise typer.Exit(console.COLLAPSED) from None
        except KeyboardInterrupt as interrupt:
            if not interrupt.args and distributed.world_size() > 1:  # the other processes do not stop by themselves
                raise
            bar.note(_interrupt_note(interrupt, config.seed, runtime.checkpoints, asked))
            raise typer.Exit(130) from None
    if runtime.save_to is not None:
        bar.note(_saved_model_note(runtime.save_to, done))
    return done


def _print_alarm(alarm: "AlarmError", seed: int, as_json: bool) -> None:
    """Print why a run was stopped, and what to try."""
    if not distributed.is_launch_rank_zero():
        return
    if as_json:
        typer.echo(json.dumps({"alarm": {"seed": seed, **alarm.facts}}, ensure_ascii=False))
        return
    console.print_words(f"{alarm} The run with seed {seed} has no result.")
    for code in alarm.facts["advice"]:
        console.print_paragraph(console.stdout_console(), code, bullet=" → ")


def _find_result(
    recipe: "Recipe", config: Any, results: "Results", asked: TrainOptions, runtime: "Runtime", bar: ProgressBar
) -> dict[str, Any] | None:
    """Return the existing result. If there is none, make the folders and report a checkpoint to continue from."""
    from uncollapse.lab.runs.run_one import checkpoint_step, find_result, remove_leftovers

    found = None if asked.again else find_result(recipe, config, results, runtime)
    if found is not None:
        remove_leftovers(recipe, config, results, runtime.checkpoints)
        return found
    console.make_folders(results.path(recipe, config).parent, asked.runs)
    if (step := checkpoint_step(runtime, recipe, config)) is not None:
        bar.note(f"Seed {config.seed} continues from step {step}.")
    return None


def _run_locked(recipe: "Recipe", config: Any, results: "Results", runtime: "Runtime", again: bool) -> Outcome:
    """Run an experiment unless another process is running it, such as a sweep."""
    from uncollapse.io.files import try_lock
    from uncollapse.lab.runs.run_one import run_lock, run_one

    path = results.path(recipe, config)
    with try_lock(run_lock(recipe, config, results)) if distributed.is_rank_zero() else nullcontext(False) as locked:
        if not distributed.on_rank_zero(lambda: locked):
            raise UsageError(f"Another process is currently running {recipe.name_of(config)}. Wait for its result.")
        record, new = run_one(recipe, config, results, runtime, again)
    return Outcome(record, path, new)


def _interrupt_note(interrupt: KeyboardInterrupt, seed: int, folder: Path | None, asked: TrainOptions) -> str:
    """Return what was interrupted, and how to continue if a checkpoint was saved."""
    which = [f"with seed {seed}"] if asked.seeds > 1 else []
    where = " ".join(["Interrupted", *which, *map(str, interrupt.args)]) + "."
    if folder is None or not any(folder.glob("step-*")):
        return where
    return f"{where} The same command{'' if asked.resume else ' without --no-resume'} continues from there."


def _saved_model_note(folder: Path, outcome: Outcome) -> str:
    """Return where the model was saved, or why it was not."""
    seed, there = outcome.record["seed"], folder.is_dir()
    if not outcome.new:
        if there and not _is_of_earlier_run(folder, outcome):
            return f"The model of seed {seed} was saved before: {folder}."
        if there:
            return f"The model in {folder} is from an earlier run than this result; --again runs it and saves that one."
        return f"The model of seed {seed} was not saved, as its result already exists; --again runs and saves it."
    if not outcome.record["figures"]:
        return f"The model of seed {seed} was not saved: {outcome.record.get('ended')}"
    if not there:
        return f"The model of seed {seed} was not saved: {outcome.record['recipe']} does not save models."
    return f"Saved: {folder}."


def _is_of_earlier_run(folder: Path, outcome: Outcome) -> bool:
    """Return whether a model was saved before the run of this result began."""
    record = outcome.record
    began = datetime.fromisoformat(record["date"]).timestamp() - float(record["seconds"])
    return folder.stat().st_mtime < began - 1
