"""How many threads small models run on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread within, as many as before afterwards.

    Models of a few dozen features gain next to nothing from a second thread, and are many times slower with it when
    the machine is busy: threads then wait for each other in every small operation. And the figures no longer depend on
    the number of cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
