"""How many threads a run takes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def use_threads(count: int = 1) -> Iterator[None]:
    """So many threads within, as many as before afterwards.

    Models of a few dozen features gain next to nothing from a second thread, and are many times slower with it when
    the machine is busy: threads then wait for each other in every small operation. And the figures no longer depend on
    the number of cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
