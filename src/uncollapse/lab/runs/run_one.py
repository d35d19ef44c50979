"""One run: find its result, else train and save the result."""

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
from uncollapse.lab.runs.results import Results, build_record, run_name

if TYPE_CHECKING:  # recipes may use what runs them
    from uncollapse.lab.recipe import Recipe


def run_folder(recipe: "Recipe", config: Any, runs: Path) -> Path:
    """Return the folder of a run's checkpoints and trackers: `runs/<recipe>/<name>--<hash>`."""
    return runs / recipe.name / run_name(recipe, config)


def run_lock(recipe: "Recipe", config: Any, results: Results) -> Path:
    """Return the file that a process locks during a run; it is next to the result."""
    return results.path(recipe, config).with_suffix(".lock")


def with_run_folder(runtime: Runtime, recipe: "Recipe", config: Any, runs: Path) -> Runtime:
    """Return the runtime with the folder of this run."""
    folder = run_folder(recipe, config, runs)
    return dataclasses.replace(runtime, checkpoints=folder, tracker_folder=folder)


def run_one(
    recipe: "Recipe", config: Any, results: Results, runtime: Runtime, again: bool = False
) -> tuple[dict[str, Any], bool]:
    """Return the record of a run, and whether it is new.

    A run that has a result is not repeated unless `again` is set; the old result then stays until the new one is
    complete. The checkpoints of the run are removed when its result is saved. A run whose loss does not stay finite has
    a record without metrics. Several processes all call this: rank zero reads and writes.

    Args:
        recipe: The experiment.
        config: Its configuration.
        results: Where its result is, or will be.
        runtime: With the folder of this run, see `with_run_folder`.
        again: Run it even if there is a result.
    """

    def find() -> dict[str, Any] | None:
        found = None if again else find_result(recipe, config, results, runtime)
        if found is not None:
            remove_checkpoints(runtime.checkpoints, recipe, config)
        else:
            check_writable(results.path(recipe, config).parent)
        return found

    found = distributed.on_rank_zero(find, "Looking for the result")
    if found is not None:
        return found, False
    runtime = runtime if distributed.is_rank_zero() else runtime.without_output()
    try:
        record = recipe.run(config, runtime)
    except NotFiniteError as error:  # divergence is a result too: the worst one
        record = build_record(recipe.name, config, 0.0, (), figures={}, ended=str(error))
    record |= {"command": command_line(recipe.name, config)}

    def save() -> dict[str, Any]:
        results.save(recipe, config, record)
        remove_checkpoints(runtime.checkpoints, recipe, config)
        return results.find(recipe, config) or record

    return distributed.on_rank_zero(save, "Saving the result"), True


def find_result(recipe: "Recipe", config: Any, results: Results, runtime: Runtime) -> dict[str, Any] | None:
    """Return the result of a run, or None; UsageError if the result is of other data."""
    found = results.find(recipe, config)
    if found is not None and not recipe.same_data(config, runtime, found):
        raise UsageError(
            f"{results.path(recipe, config)} is a result of the same settings on other data than the current one. "
            "Save this one elsewhere with --results DIR, or replace that one with --again."
        )
    return found


def remove_leftovers(recipe: "Recipe", config: Any, results: Results, folder: Path | None) -> None:
    """Remove the checkpoints and the lock of a run that was killed after its result was written."""
    lock = run_lock(recipe, config, results)
    if not lock.exists() and (folder is None or not any(folder.glob("*step-*"))):
        return
    with suppress(OSError), try_lock(lock) as ours:  # in a read-only folder they stay
        if ours:  # else another process runs it again
            remove_checkpoints(folder, recipe, config)


def checkpoint_step(runtime: Runtime, recipe: "Recipe", config: Any) -> int | None:
    """Return the step from which an interrupted run resumes; None if it starts from the beginning."""
    if runtime.checkpoints is None or not runtime.resume:
        return None
    return _checkpoints(runtime.checkpoints, recipe, config).newest()


def check_writable(folder: Path, what: str = "Results") -> None:
    """Raise before the training if its output could not be written. what: will be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{what} cannot go to {folder}: {error.strerror}. Name another folder.") from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{what} cannot go to {folder}: it is not writable. Name another folder.")


def remove_checkpoints(folder: Path | None, recipe: "Recipe", config: Any) -> None:
    """Remove the checkpoints of a run; only warn where that fails, because its result is there."""
    if folder is None or not folder.exists():
        return
    try:
        _checkpoints(folder, recipe, config).clear()
    except OSError as error:
        warnings.warn(f"Checkpoints in {folder} cannot be removed: {error.strerror}. Remove them.", stacklevel=3)


def _checkpoints(folder: Path, recipe: "Recipe", config: Any) -> Checkpoints:
    """Return the checkpoints of a run whatever its data is: a recipe may add the data to the identity."""
    return Checkpoints(folder, identity(recipe.name, config), exact=False)
