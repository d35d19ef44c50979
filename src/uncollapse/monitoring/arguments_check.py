"""What a monitor is made of, checked when it is made."""

import copy
import inspect
import random
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from uncollapse.diagnosis.measures import MEASURES
from uncollapse.diagnosis.result import Diagnosis
from uncollapse.diagnosis.run import diagnose
from uncollapse.errors import did_you_mean
from uncollapse.monitoring.layer_curves import curves, values
from uncollapse.monitoring.rules import Rule

OURS = {"model", "batches", "pairs", "max_batches", "baseline", "progress", "example"}  # not passed on to `diagnose`
OPTIONS = [name for name in inspect.signature(diagnose).parameters if name not in OURS]


def check_plan(every: int | None, measures: Sequence[str], rules: Sequence[Rule], max_share: float | None) -> None:
    """Raise if what is to be measured and when makes no sense."""
    if every is not None and every < 1:
        raise ValueError(f"every must be at least 1, or None for evaluations only, got {every}.")
    unknown = [name for name in measures if name not in MEASURES]
    if unknown:
        hint = did_you_mean(unknown[0], MEASURES)
        raise ValueError(f"No measure is named {unknown[0]!r}.{hint} There are: {', '.join(MEASURES)}.")
    wrong = next((rule for rule in rules if not isinstance(rule, Rule)), None)
    if wrong is not None:
        raise ValueError(f"rules must be a list of uc.Rule, got {type(wrong).__name__} in it.")
    names = [rule.name for rule in rules]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"A rule is given twice: {twice[0]}. Leave one out.")
    if max_share is not None and not 0 < max_share <= 1:
        raise ValueError(f"max_share is a share of the time between 0 and 1, got {max_share}.")


def check_options(options: Mapping[str, Any]) -> None:
    """Raise if `diagnose` does not have these options, or a monitor does not pass them on."""
    strange = [name for name in options if name not in OPTIONS]
    if strange:
        hint = did_you_mean(strange[0], OPTIONS)
        raise TypeError(f"Monitor has no option {strange[0]!r}.{hint} Those of diagnose are: {', '.join(OPTIONS)}.")


def held(batches: Iterable[Any], most: int) -> list[Any]:
    """Copies of the batches to measure on; drawing them does not move the random states of the training."""
    if most < 1:
        raise ValueError(f"max_batches must be at least 1, got {most}.")
    if isinstance(batches, Tensor | Mapping) or hasattr(type(batches), "edge_index"):
        raise ValueError(
            f"batches must be a list or a loader of batches, got one {type(batches).__name__}; pass [batch]."
        )
    with random_kept():
        held = [copied(batch) for batch in islice(iter(batches), most)]
    if not held:
        raise ValueError("There are no batches: the monitor needs at least one to measure on.")
    return held


@contextmanager
def random_kept() -> Iterator[None]:
    """The random states of PyTorch (on the CPU), Python and numpy are afterwards as they were."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002  trainings draw from it
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


def copied(batch: Any) -> Any:
    """A batch with tensors and arrays of its own: a loader may fill the same ones again."""
    if isinstance(batch, Tensor):
        return batch.detach().clone()
    if isinstance(batch, np.ndarray):
        return batch.copy()
    if hasattr(batch, "clone"):  # PyG data
        return batch.clone()
    if isinstance(batch, MutableMapping):
        own = copy.copy(batch)  # HuggingFace encodings keep their type
        for key, value in batch.items():
            own[key] = copied(value)
        return own
    if isinstance(batch, tuple | list):
        parts = [copied(value) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def check_fit(
    found: Diagnosis, rules: Sequence[Rule], measures: Sequence[str], reference: Mapping[str, Mapping[str, float]]
) -> None:
    """Raise if rules or measures do not fit the model, or the model does not fit the run that is taken up."""
    for rule in rules:
        rule.chosen(found.layers)
    curves(found, measures)
    other = values(found).keys() ^ reference.keys() if reference else set()
    if other:
        raise ValueError(
            f"The run that is taken up was of other layers: {min(other)} is not in both. "
            "Give another folder, or the options of that run."
        )
