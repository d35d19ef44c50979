"""What `train --keep` says of trained models."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from uncollapse.cli.outcomes import Outcome

if TYPE_CHECKING:
    from uncollapse.lab.engine.runtime import Session

MODEL = "model"


def folder(session: "Session") -> Path | None:
    """Where the model of a run goes: into the folder of the run."""
    return None if session.checkpoints is None else session.checkpoints / MODEL


def words(folder: Path, outcome: Outcome) -> str:
    """What was kept and where, or why nothing was."""
    seed, there = outcome.record["seed"], folder.is_dir()
    if not outcome.new:
        if there and not _of_an_earlier_run(folder, outcome):
            return f"The model of seed {seed} was kept before: {folder}."
        if there:
            return f"The model in {folder} is of an earlier run than this result; --again runs it and keeps that one."
        return f"The model of seed {seed} was not kept, as its result was there already; --again runs it and keeps it."
    if not outcome.record["figures"]:
        return f"The model of seed {seed} was not kept: {outcome.record.get('ended')}"
    if not there:
        return f"The model of seed {seed} was not kept: {outcome.record['recipe']} keeps none."
    return f"Kept: {folder}."


def _of_an_earlier_run(folder: Path, outcome: Outcome) -> bool:
    """Whether a model was kept before the run of a result began."""
    record = outcome.record
    began = datetime.fromisoformat(record["date"]).timestamp() - float(record["seconds"])
    return folder.stat().st_mtime < began - 1
