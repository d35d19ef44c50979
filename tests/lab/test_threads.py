"""How many threads small models run on."""

import torch

from uncollapse.lab.threads import one_thread


def test_threads_are_left_as_found() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
