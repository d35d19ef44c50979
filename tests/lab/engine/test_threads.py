"""How many threads a run takes."""

import torch

from uncollapse.lab.engine.runtime import use_threads


def test_threads_are_left_as_found() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with use_threads(1):
            assert torch.get_num_threads() == 1
            with use_threads(3):
                assert torch.get_num_threads() == 3
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
