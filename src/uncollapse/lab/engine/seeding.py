"""Seed, save and restore the random states of Python, NumPy and torch."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor

STRIDE = 1_000_003  # between the seeds of two ranks


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch after the context."""
    python, arrays = random.getstate(), numpy.random.get_state()  # noqa: NPY002 - what other libraries draw from
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)  # noqa: NPY002


@contextmanager
def use_seed(seed: int, process: int = 0) -> Iterator[None]:
    """Seed Python, NumPy and torch inside the context, and restore their states afterwards.

    process: the rank; each has its own random numbers, and rank zero those of a single process.
    """
    seed += STRIDE * process
    with preserve_random_state():
        random.seed(seed)
        numpy.random.seed(seed % 2**32)  # noqa: NPY002
        torch.manual_seed(seed)
        yield


def get_random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the whole random state: tensors, and values for JSON."""
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda{number}": state for number, state in enumerate(torch.cuda.get_rng_state_all())}
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)  # noqa: NPY002
    tensors["numpy"] = torch.from_numpy(numpy.asarray(keys, dtype=numpy.int64))
    tensors["python"] = torch.tensor(numbers)
    return tensors, {"python": [version, gauss], "numpy": [name, int(position), int(has_gauss), float(cached)]}


def set_random_state(tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Restore a state of `get_random_state`."""
    torch.set_rng_state(tensors["cpu"])
    if torch.cuda.is_available():
        devices = [state for name, state in sorted(tensors.items()) if name.startswith("cuda")]
        torch.cuda.set_rng_state_all(devices)
    version, gauss = values["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    name, position, has_gauss, cached = values["numpy"]
    keys = tensors["numpy"].numpy().astype(numpy.uint32)
    numpy.random.set_state((name, keys, position, has_gauss, cached))  # noqa: NPY002
