"""Turn a diagnosis into curves over the layers, and log these as named scalars to loggers of other libraries."""

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from uncollapse.backbones.sites import OUTPUT
from uncollapse.diagnosis.measures import MEASURES
from uncollapse.diagnosis.result import Diagnosis
from uncollapse.errors import did_you_mean

Curves = Mapping[str, Mapping[str, float]]  # measure -> layer -> value


def check_measures(measures: Sequence[str]) -> None:
    """Raise ValueError for a measure that does not exist."""
    unknown = [name for name in measures if name not in MEASURES]
    if unknown:
        hint = did_you_mean(unknown[0], MEASURES)
        raise ValueError(f"No measure is named {unknown[0]!r}.{hint} There are: {', '.join(MEASURES)}.")


def layer_values(diagnosis: Diagnosis) -> dict[str, dict[str, float]]:
    """Return every measure of every layer: layer -> measure -> value."""
    return {layer.label: {name: layer[name] for name in layer.measures} for layer in diagnosis.layers}


def curves(diagnosis: Diagnosis, measures: Sequence[str]) -> Curves:
    """Return the given measures over the layers that have them."""
    found = {
        name: {layer.label: layer[name] for layer in diagnosis.layers if name in layer.measures} for name in measures
    }
    missing = [name for name, curve in found.items() if not curve]
    if missing:
        taken = sorted({name for layer in diagnosis.layers for name in layer.measures})
        raise ValueError(
            f"measures names {missing[0]!r}, which was not taken in {diagnosis.architecture}. "
            f"There are: {', '.join(taken)}; attention measures need attention=True."
        )
    return found


def scalars(diagnosis: Diagnosis, chosen: Curves) -> dict[str, float]:
    """Return names and values for a logger: `collapse/effective_rank/block_09`, and a few for the whole model."""
    named = {
        f"collapse/{measure}/{_slug(layer)}": value
        for measure, curve in chosen.items()
        for layer, value in curve.items()
    }
    ranks = [layer["effective_rank"] for layer in diagnosis.layers if layer.place == OUTPUT]
    lowest = min((rank for rank in ranks if not math.isnan(rank)), default=None)
    if lowest is not None:
        named["collapse/lowest_effective_rank"] = lowest
    return named | {"collapse/verdict": float(diagnosis.verdict.collapsed)}


def _slug(layer: str) -> str:
    """Return a layer's name for the name of a scalar; block numbers have two digits, so that loggers sort them."""
    padded = re.sub(r"(?<= )\d+", lambda number: number[0].zfill(2), layer)
    return re.sub(r"[^\w.]+", "_", padded).strip("_")


Sink = Callable[[int, Mapping[str, float]], None]  # called with the step and the named values


def make_sinks(log: Any) -> tuple[Sink, ...]:
    """Return one logger, or a list of several, as functions of a step and named values."""
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


Alert = Callable[[str, str], None]  # called with a title and a sentence


Table = Callable[[int, Diagnosis], None]


def make_alerts(loggers: Any) -> tuple[Alert, ...]:
    """Return those of the loggers that can alert: Trackio and Weights & Biases, as runs or as modules."""
    there = loggers if isinstance(loggers, list | tuple) else (loggers,)
    return tuple(partial(_alert, logger) for logger in there if callable(getattr(logger, "alert", None)))


def _alert(logger: Any, title: str, text: str) -> None:
    logger.alert(title=title, text=text)


def make_tables(loggers: Any) -> tuple[Table, ...]:
    """Return those of the loggers that show tables: Trackio and Weights & Biases, as runs or as modules."""
    there = loggers if isinstance(loggers, list | tuple) else (loggers,)
    libraries = [
        sys.modules.get((getattr(each, "__name__", "") or type(each).__module__).partition(".")[0]) for each in there
    ]
    return tuple(
        partial(_log_table, logger, library.Table)
        for logger, library in zip(there, libraries, strict=True)
        if library is not None and library.__name__ in ("trackio", "wandb")
    )


def _log_table(logger: Any, kind: Any, step: int, diagnosis: Diagnosis) -> None:
    """Log all measures of all layers as one table."""
    names = list(dict.fromkeys(name for layer in diagnosis.layers for name in layer.measures))
    rows = [[layer.label, *(layer[name] for name in names)] for layer in diagnosis.layers]
    logger.log({"collapse/layers": kind(columns=["layer", *names], data=rows)}, step=step)
