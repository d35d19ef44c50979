"""Chunks of a batch in threads of their own: the same values and gradients, in every mode, also in a forked process."""

import multiprocessing
import os
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import uncollapse as uc
from uncollapse.pairwise import threads


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Two threads, of which each chunk notes the name of its own."""
    before, seen = torch.get_num_threads(), []
    monkeypatch.setattr(threads, "LEAST", 0)
    plain = threads.Grid.chunks

    def chunks(self: threads.Grid, batch: int, count: int = 1) -> list[slice]:
        seen.append(f"{count} of {torch.get_num_threads()}")
        return plain(self, batch, count)

    monkeypatch.setattr(threads.Grid, "chunks", chunks)
    torch.set_num_threads(2)
    yield seen
    torch.set_num_threads(before)


def rows(batch: int = 5) -> Tensor:
    return torch.randn(batch, 12, 7, generator=torch.Generator().manual_seed(0))


def step(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = uc.contra_norm(x, 0.5, mask=torch.arange(12).expand(len(x), 12) < 10)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    return y.detach(), gradient


def test_values_and_gradients_are_those_of_one_thread(two_threads: list[str]) -> None:
    found = step(rows())
    assert two_threads == ["2 of 2", "2 of 2"]
    torch.set_num_threads(1)
    for ours, alone in zip(found, step(rows()), strict=True):
        torch.testing.assert_close(ours, alone, rtol=1e-6, atol=1e-6)


def test_threads_outside_keep_their_number(two_threads: list[str]) -> None:
    step(rows())
    seen: list[int] = []
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert [torch.get_num_threads(), *seen] == [2, 2]


def test_inference_mode_and_no_grad(two_threads: list[str]) -> None:
    expected = step(rows())[0]
    for mode in (torch.inference_mode(), torch.no_grad()):
        with mode:
            found = uc.contra_norm(rows(), 0.5, mask=torch.arange(12).expand(5, 12) < 10)
        torch.testing.assert_close(found, expected)
        assert not found.requires_grad


def test_errors_reach_the_caller(two_threads: list[str]) -> None:
    def fail(c: slice) -> None:
        raise RuntimeError(f"chunk {c.start}")

    inputs = threads.Inputs(rows(), rows(), rows(), None, 1.0)
    with pytest.raises(RuntimeError, match="chunk"):
        threads.for_each_chunk(fail, threads.Grid(uc.pairwise.Pairs(), 12, 12, torch.device("cpu")), inputs)


def test_fewer_sets_than_threads_are_not_divided(two_threads: list[str]) -> None:
    step(rows(batch=1))
    assert set(two_threads) == {"1 of 2"}


def _in_child(queue: "multiprocessing.Queue[bool]", expected: Tensor) -> None:
    torch.set_num_threads(1)  # as in a worker of a DataLoader
    queue.put(torch.allclose(step(rows())[0], expected, atol=1e-6))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_wait_for_threads_of_its_parent(two_threads: list[str]) -> None:
    expected = step(rows())[0]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue, expected))
    child.start()
    assert queue.get(timeout=60)
    child.join(60)
