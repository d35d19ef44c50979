"""Predictions as the server of GLUE takes them: a file for each test part of a task.

A file has the header `index<TAB>prediction` and a line for every row of the test file, in its order, counted from 0.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from uncollapse.errors import UsageError
from uncollapse.io.files import write
from uncollapse.lab.data.text import glue
from uncollapse.lab.data.text.glue import OWN, Examples, Glue

FOLDER = "predictions"
HEADER = "index\tprediction"


def parts_of(task: Glue, root: Path | None) -> dict[str, Examples]:
    """The test parts of a task that are there, by their names; of one that is not, a warning says why."""
    found = {}
    for part, name in task.answers.items():
        try:
            found[part] = glue.load(task, part, root)
        except UsageError as error:
            warnings.warn(f"There will be no predictions for {name}. {error}", stacklevel=2)
    return found


def text(task: Glue, answers: Sequence[float]) -> str:
    """The file of a part. answers: numbers of classes, or scores, one for each row of the test file.

    >>> print(text(glue.TASKS["rte"], [1, 0]), end="")
    index	prediction
    0	not_entailment
    1	entailment
    """
    lines = (f"{number}\t{_word(task, answer)}" for number, answer in enumerate(answers))
    return "\n".join([HEADER, *lines]) + "\n"


def write_all(folder: Path, task: Glue, answers: Mapping[str, Sequence[float]]) -> list[Path]:
    """Write `predictions/<NAME>.tsv` for each test part; returns the files. answers: by part, see `text`."""
    return [write(folder / FOLDER / f"{task.answers[part]}.tsv", text(task, found)) for part, found in answers.items()]


def _word(task: Glue, answer: float) -> str:
    if task.scores:
        least, most = task.bounds
        return f"{min(most, max(least, answer)):{'.6g' if task.name == OWN else '.3f'}}"  # own scores have any size
    return task.labels[int(answer)]
