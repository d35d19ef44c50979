"""The shape that the runs of all recipes share: threads of a run, and the record of a training.

A recipe that trains a model has this shape::

    @with_threads
    def train(config: Config, runtime: Runtime) -> tuple[nn.Module, dict[str, Any]]:
        data = load(config, runtime)
        ...
        history = fit(task, settings, runtime, experiment, vars(config))
        return model, training_record(NAME, config, history, LIBRARIES, data=..., figures=...)

    RECIPE = Recipe(name=NAME, run=record_of(train), ...)
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Protocol, TypeVar

from torch import nn

from uncollapse.lab.engine.runtime import Runtime, use_threads
from uncollapse.lab.engine.task import History
from uncollapse.lab.runs.results import build_record, round_metrics

Config = TypeVar("Config", contravariant=True)
Result = TypeVar("Result", covariant=True)


class Run(Protocol[Config, Result]):
    """A run of a recipe; without a runtime it has the defaults of `Runtime`."""

    def __call__(self, config: Config, runtime: Runtime | None = None) -> Result:
        """Run it."""
        ...


def with_threads(run: Callable[[Config, Runtime], Result]) -> Run[Config, Result]:
    """Decorate a run: it takes as many threads as its runtime says, and needs no runtime."""

    @wraps(run)
    def with_runtime(config: Config, runtime: Runtime | None = None) -> Result:
        runtime = runtime or Runtime()
        with use_threads(runtime.threads):
            return run(config, runtime)

    return with_runtime


def record_of(train: Run[Config, tuple[nn.Module, dict[str, Any]]]) -> Run[Config, dict[str, Any]]:
    """Return the `run` of a recipe whose `train` returns a trained model and its record."""

    def run(config: Config, runtime: Runtime | None = None) -> dict[str, Any]:
        return train(config, runtime)[1]

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
    epochs = [round_metrics(each) for each in history.epochs]
    found = {"data": data, "figures": figures, "ended": history.ended, "epochs": epochs}
    return build_record(recipe, config, history.seconds, libraries, **found | facts)
