"""Time as the median ratio of interleaved runs; memory as the growth of a fresh process."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

MEMORY = """
import torch
torch.set_default_device("{device}")
{setup}
def run(n):
{body}
def peak():  # of this process alone: getrusage would start from the parent's
    if "{device}" == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
run({small})
before = peak()
run({large})
print(peak() - before)
"""

NEIGHBOUR = """
import os
parent = os.getppid()
while os.getppid() == parent:  # it must not outlive a run that was killed
    pass
"""


def speed_ratio(plain: Callable[[], object], ours: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Median of plain/ours over rounds that run both, and the medians of both in seconds."""
    plain(), ours()
    wait()
    times: list[tuple[float, float]] = []
    for i in range(rounds):
        pair = [0.0, 0.0]
        for which in ((0, 1), (1, 0))[i % 2]:
            start = time.perf_counter()
            (plain, ours)[which]()
            wait()
            pair[which] = time.perf_counter() - start
        times.append((pair[0], pair[1]))
    ratio = statistics.median(a / b for a, b in times)
    return ratio, statistics.median(a for a, _ in times), statistics.median(b for _, b in times)


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """Let another process compute all the time, as other users of a machine do."""
    neighbour = subprocess.Popen([sys.executable, "-c", NEIGHBOUR])
    try:
        yield
    finally:
        neighbour.kill()
        neighbour.wait()


def best(work: Callable[[], object], times: int = 9) -> float:
    """The least time of a few: what the machine does besides only ever adds to it."""
    found = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)


def wait() -> None:
    """Wait for what a GPU was told to do; a processor is done already."""
    if torch.get_default_device().type == "cuda":
        torch.cuda.synchronize()


def training_step(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], None]:
    """Forward and backward of `function`, with a fixed incoming gradient."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    gradient = torch.randn(function(*inputs).shape)

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward(function(*leaves), gradient)

    return step


def peak_memory(setup: str, body: str, small: int, large: int) -> float:
    """MiB by which run(large) raises the peak of a fresh process over that of run(small). Linux only."""
    return printed_and_peak(setup, body, small, large)[-1]


def printed_and_peak(setup: str, body: str, small: int, large: int) -> list[float]:
    """The numbers that run(small) and run(large) print in that process, and last, the peak of the memory."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    device = torch.get_default_device().type
    code = MEMORY.format(device=device, setup=setup, body=lines, small=small, large=large)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [float(number) for number in done.stdout.split()]
