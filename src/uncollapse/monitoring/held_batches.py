"""Hold the batches that a monitor measures on, without moving the random states of the training."""

import copy
import random
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from uncollapse.backbones.forward import group_texts
from uncollapse.diagnosis.run import check_batches


def hold_batches(batches: Iterable[Any], most: int) -> list[Any]:
    """Return copies of the first batches; reading them does not change the random states of the training."""
    if most < 1:
        raise ValueError(f"max_batches must be at least 1, got {most}.")
    if isinstance(batches, Tensor):
        raise ValueError("batches must be a list or a loader of batches, got one Tensor; pass [batch].")
    check_batches(batches)
    with preserve_random_states():
        copies = [copy_batch(batch) for batch in islice(group_texts(batches), most)]
    if not copies:
        raise ValueError("There are no batches: the monitor needs at least one to measure on.")
    return copies


@contextmanager
def preserve_random_states() -> Iterator[None]:
    """Restore the random states of PyTorch (on the CPU), Python and numpy afterwards."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002  trainings use it
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


def copy_batch(batch: Any) -> Any:
    """Return a batch with its own tensors and arrays: a loader may reuse its own."""
    if isinstance(batch, Tensor):
        return batch.detach().clone()
    if isinstance(batch, np.ndarray):
        return batch.copy()
    if hasattr(batch, "clone"):  # PyG data
        return batch.clone()
    if isinstance(batch, MutableMapping):
        own = copy.copy(batch)  # HuggingFace encodings keep their type
        for key, value in batch.items():
            own[key] = copy_batch(value)
        return own
    if isinstance(batch, tuple | list):
        parts = [copy_batch(value) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
