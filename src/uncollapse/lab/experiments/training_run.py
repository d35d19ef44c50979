"""What the runs of all recipes share: their threads, and the record of a training.

A recipe that trains a model has this shape::

    @with_threads
    def train(config: Config, session: Session) -> tuple[nn.Module, dict[str, Any]]:
        data = load(config, session)
        ...
        history = fit(task, settings, session, experiment, vars(config))
        return model, training_record(NAME, config, history, LIBRARIES, data=..., figures=...)

    RECIPE = Recipe(name=NAME, run=record_of(train), ...)
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Protocol, TypeVar

from torch import nn

from uncollapse.lab.engine.runtime import Session
from uncollapse.lab.engine.task import History
from uncollapse.lab.engine.threads import threads
from uncollapse.lab.runs.records import record, short

Config = TypeVar("Config", contravariant=True)
Result = TypeVar("Result", covariant=True)


class Run(Protocol[Config, Result]):
    """A run of a recipe; without a session it has the defaults of `Session`."""

    def __call__(self, config: Config, session: Session | None = None) -> Result:
        """Run it."""
        ...


def with_threads(run: Callable[[Config, Session], Result]) -> Run[Config, Result]:
    """Decorate a run: it takes as many threads as its session says, and needs no session."""

    @wraps(run)
    def with_session(config: Config, session: Session | None = None) -> Result:
        session = session or Session()
        with threads(session.threads):
            return run(config, session)

    return with_session


def record_of(train: Run[Config, tuple[nn.Module, dict[str, Any]]]) -> Run[Config, dict[str, Any]]:
    """Return the `run` of a recipe whose `train` returns a trained model and its record."""

    def run(config: Config, session: Session | None = None) -> dict[str, Any]:
        return train(config, session)[1]

    return run


def training_record(
    recipe: str,
    config: Any,
    history: History,
    libraries: tuple[str, ...],
    *,
    data: Mapping[str, Any],
    figures: Mapping[str, float],
    **facts: Any,
) -> dict[str, Any]:
    """Return the record of a training, which is JSON-serializable.

    Args:
        recipe: Name of the recipe.
        config: Config of the run.
        history: What `fit` returned: the metrics of each epoch, the seconds, and why it ended.
        libraries: Packages whose versions matter, besides torch and this one.
        data: Name, fingerprint and sizes of the data.
        figures: Metrics of the trained model.
        facts: Further entries.
    """
    epochs = [short(each) for each in history.epochs]
    found = {"data": data, "figures": figures, "ended": history.ended, "epochs": epochs}
    return record(recipe, config, history.seconds, libraries, **found | facts)
