"""Threads of a run, and signals: the first waits for the end of a step, the second acts at once."""

import signal

import pytest
import torch

from uncollapse import distributed
from uncollapse.lab.engine import runtime
from uncollapse.lab.engine.runtime import Interrupts, use_threads


def test_the_second_signal_acts_at_once() -> None:
    with Interrupts() as heard:
        signal.raise_signal(signal.SIGTERM)
        assert heard.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_an_echo_of_a_launcher_is_no_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.5, 10.0 + runtime.ECHO])
    monkeypatch.setattr(runtime.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(distributed, "launch_size", lambda: 2)
    told: list[str] = []
    with Interrupts(told.append) as heard:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert heard.asked
        assert len(told) == 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


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
