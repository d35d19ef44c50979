"""Loggers of other libraries, told apart by what they can do."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Sink = Callable[[int, Mapping[str, float]], None]  # called with the step and the named values


def sinks(log: Any) -> tuple[Sink, ...]:
    """One logger, or several in a list, as functions of a step and named values."""
    return tuple(map(_sink, log)) if isinstance(log, list | tuple) else (_sink(log),)


def _sink(logger: Any) -> Sink:
    if hasattr(logger, "add_scalar"):  # a SummaryWriter of TensorBoard
        return lambda step, values: _each(logger.add_scalar, step, values.items())
    if hasattr(logger, "log_metrics"):  # Lightning's loggers, the module mlflow
        return lambda step, values: logger.log_metrics(dict(values), step=step)
    if hasattr(logger, "log"):  # a run of Weights & Biases, an Accelerator
        return lambda step, values: logger.log(dict(values), step=step)
    if callable(logger):
        return lambda step, values: logger(step, dict(values))
    raise ValueError(
        "log takes a SummaryWriter, a W&B run, something with log_metrics(values, step=), a function of (step, values) "
        f"or a list of these, got {type(logger).__name__}."
    )


def _each(add_scalar: Callable[[str, float, int], Any], step: int, values: Iterable[tuple[str, float]]) -> None:
    for name, value in values:
        add_scalar(name, value, step)
