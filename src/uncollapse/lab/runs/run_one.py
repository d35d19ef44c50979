"""One run: look for its result, else run it and keep what it gave."""

import dataclasses
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uncollapse import distributed
from uncollapse.errors import NotFiniteError, UsageError
from uncollapse.io.files import try_lock
from uncollapse.lab.config.fields import command_line, identity
from uncollapse.lab.engine.checkpoints import Checkpoints
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.runs import records
from uncollapse.lab.runs.results import Results, run_name

if TYPE_CHECKING:  # recipes may use what runs them
    from uncollapse.lab.recipe import Recipe


def run_folder(recipe: "Recipe", config: Any, runs: Path) -> Path:
    """Where a run keeps its checkpoints and what its trackers write: `runs/<recipe>/<name>--<hash>`."""
    return runs / recipe.name / run_name(recipe, config)


def run_lock(recipe: "Recipe", config: Any, results: Results) -> Path:
    """The file that a process holds while it runs this; it lies beside the result."""
    return results.path(recipe, config).with_suffix(".lock")


def with_run_folder(runtime: Runtime, recipe: "Recipe", config: Any, runs: Path) -> Runtime:
    """The runtime with the folder of this run."""
    folder = run_folder(recipe, config, runs)
    return dataclasses.replace(runtime, checkpoints=folder, tracker_folder=folder)


def run_one(
    recipe: "Recipe", config: Any, results: Results, runtime: Runtime, again: bool = False
) -> tuple[dict[str, Any], bool]:
    """The record of a run, and whether it is new.

    A result that is there is not run again, unless `again` asks for it; the old one then stays until the new one is
    complete. Once the result is saved, the checkpoints of the run go. A run whose loss does not stay finite has a
    record without figures, which says so. Several processes all call this: the first one looks and writes.

    Args:
        recipe: the experiment.
        config: its configuration.
        results: where its result is, or goes.
        runtime: with the folder of this run, see `placed`.
        again: run it even if there is a result.
    """

    def look() -> dict[str, Any] | None:
        found = None if again else find_result(recipe, config, results, runtime)
        if found is not None:
            remove_checkpoints(runtime.checkpoints, recipe, config)
        else:
            check_writable(results.path(recipe, config).parent)
        return found

    found = distributed.on_rank_zero(look, "Looking for the result")
    if found is not None:
        return found, False
    runtime = runtime if distributed.is_rank_zero() else runtime.without_output()
    try:
        record = recipe.run(config, runtime)
    except NotFiniteError as error:  # that it diverges is a result as well: the worst
        record = records.build_record(recipe.name, config, 0.0, (), figures={}, ended=str(error))
    record |= {"command": command_line(recipe.name, config)}

    def keep() -> dict[str, Any]:
        results.save(recipe, config, record)
        remove_checkpoints(runtime.checkpoints, recipe, config)
        return results.find(recipe, config) or record

    return distributed.on_rank_zero(keep, "Keeping the result"), True


def find_result(recipe: "Recipe", config: Any, results: Results, runtime: Runtime) -> dict[str, Any] | None:
    """The result of a run that need not be run again; a UsageError if there is one that is of other data."""
    found = results.find(recipe, config)
    if found is not None and not recipe.same_data(config, runtime, found):
        raise UsageError(
            f"{results.path(recipe, config)} has a result of the same settings, but of other data than there is now. "
            "Keep this one elsewhere with --results DIR, or replace that one with --again."
        )
    return found


def remove_leftovers(recipe: "Recipe", config: Any, results: Results, folder: Path | None) -> None:
    """Remove what a run has left that was killed after its result was written: checkpoints in its folder, its lock."""
    lock = run_lock(recipe, config, results)
    if not lock.exists() and (folder is None or not any(folder.glob("*step-*"))):
        return
    with suppress(OSError), try_lock(lock) as ours:  # in a folder that may only be read it stays
        if ours:  # else another process runs it again
            remove_checkpoints(folder, recipe, config)


def checkpoint_step(runtime: Runtime, recipe: "Recipe", config: Any) -> int | None:
    """The step that the run goes on from, as an earlier one was interrupted; None if it begins anew."""
    if runtime.checkpoints is None or not runtime.resume:
        return None
    return _checkpoints(runtime.checkpoints, recipe, config).newest()


def check_writable(folder: Path, what: str = "Results") -> None:
    """Raise now what would only be found out after the training. what: will go there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{what} cannot go to {folder}: {error.strerror}. Name another folder.") from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{what} cannot go to {folder}: it is not writable. Name another folder.")


def remove_checkpoints(folder: Path | None, recipe: "Recipe", config: Any) -> None:
    """Remove the checkpoints of a run. Its result counts, also where they cannot be removed."""
    if folder is None or not folder.exists():
        return
    try:
        _checkpoints(folder, recipe, config).clear()
    except OSError as error:
        warnings.warn(f"Checkpoints in {folder} cannot be removed: {error.strerror}. Remove them.", stacklevel=3)


def _checkpoints(folder: Path, recipe: "Recipe", config: Any) -> Checkpoints:
    """Those of a run, whatever its data is: a recipe may add that to the identity."""
    return Checkpoints(folder, identity(recipe.name, config), exact=False)
