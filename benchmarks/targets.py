"""Every target of the library beside what is measured here."""

import os
import pickle
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import uncollapse as uc
from benchmarks import plain
from benchmarks.measure import best, busy_neighbour, peak_memory, speed_ratio, training_step

SETUP = "import uncollapse as uc; from benchmarks import plain; torch.manual_seed(0)"
BATCHED = ((64, 197, 192), (64, 197, 384), (32, 128, 768))  # sequences, tokens, features


@dataclass(frozen=True)
class Result:
    """One line of the table; `at_least` tells on which side of the target, if any, the measured value should lie."""

    name: str
    target: float | None
    measured: float
    unit: str
    at_least: bool
    detail: str

    @property
    def bound(self) -> str:
        return "–" if self.target is None else f"{'≥' if self.at_least else '≤'} {self.target:g}"

    @property
    def reached(self) -> bool | None:
        if self.target is None:
            return None
        return self.measured >= self.target if self.at_least else self.measured <= self.target


def faster(
    name: str, target: float | None, base: Callable[[], object], ours: Callable[[], object], rounds: int
) -> Result:
    ratio, before, after = speed_ratio(base, ours, rounds)
    return Result(name, target, ratio, "× as fast", True, f"{before * 1e3:.1f} ms plain, {after * 1e3:.1f} ms ours")


def slower(
    name: str, most: float | None, base: Callable[[], object], cured: Callable[[], object], rounds: int
) -> Result:
    ratio, before, after = speed_ratio(base, cured, rounds)
    return Result(name, most, 1 / ratio, "× the time", False, f"{before:.2f} s plain, {after:.2f} s with it")


def smaller(name: str, target: float, base: str, ours: str, small: int, large: int) -> Result:
    before, after = (peak_memory(SETUP, body, small, large) for body in (base, ours))
    return Result(name, target, after / before, "of the memory", False, f"{before:.0f} MiB plain, {after:.0f} MiB ours")


def start() -> Iterator[Result]:
    """How long new processes take."""
    python = best(lambda: subprocess.run([sys.executable, "-c", "pass"], check=True))
    for name, most, arguments in (
        ("import uncollapse", 0.1, ["-c", "import uncollapse"]),
        ("uncollapse --help", 0.3, ["-m", "uncollapse", "--help"]),
    ):
        seconds = best(partial(subprocess.run, [sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL))
        yield Result(name, most, seconds, "s", False, f"with the start of Python, {python:.2f} s")


def kernel() -> Iterator[Result]:
    torch.manual_seed(0)
    for batch, n, d in BATCHED:
        x = torch.randn(batch, n, d)
        yield faster(f"contra_norm {batch}×{n}×{d}", 1.4, *_contra_norm(x), rounds=21)
    x, edges, source = torch.randn(2708, 32), *graph()
    adjacency = torch.sparse_coo_tensor(*_with_loops(edges), (2708, 2708), check_invariants=True).coalesce()
    base = training_step(lambda x: plain.graph_contra_norm(x, adjacency), x)
    ours = training_step(lambda x: uc.contra_norm(x, 0.5, identity=True, edge_index=edges), x)
    yield faster(f"contra_norm 2708×32, neighbours excluded ({source})", 2.5, base, ours, rounds=21)
    yield faster("contra_norm 8192×64", 3.3, *_contra_norm(torch.randn(8192, 64)), rounds=7)
    yield faster("contra_norm 19717×32", 6.0, *_contra_norm(torch.randn(19717, 32)), rounds=3)


def neighbour() -> Iterator[Result]:
    """The same with one other process that wants a core."""
    torch.manual_seed(0)
    with busy_neighbour():
        for batch, n, d in BATCHED:
            name = f"contra_norm {batch}×{n}×{d}, beside a busy process"
            yield faster(name, 1.0, *_contra_norm(torch.randn(batch, n, d)), rounds=41)


def kernel_memory() -> Iterator[Result]:
    body = "x = torch.randn(n, 64, requires_grad=True); {}.sum().backward()"
    base, ours = body.format("plain.contra_norm(x)"), body.format("uc.contra_norm(x, 0.1)")
    yield smaller("contra_norm 8192×64", 0.1, base, ours, 256, 8192)
    for name, key in (("the same tensor", "x"), ("different tensors", "torch.randn(n, 64, requires_grad=True)")):
        body = (
            f"x = torch.randn(n, 64, requires_grad=True); k = {key}\nuc.pairwise.softmax_mean(x, k, x, temperature=8.0)"
        )
        added = peak_memory(SETUP, body + ".sum().backward()", 256, 65_536)
        detail = "forward and backward; one dense matrix takes 16,384 MiB"
        yield Result(f"softmax_mean 65536×64, q and k {name}", 1024, added, "MiB", False, detail)


def metrics() -> Iterator[Result]:
    torch.manual_seed(0)
    x = torch.randn(32, 128, 768)
    rank = (lambda: plain.effective_rank(x)), (lambda: uc.effective_rank(x))
    yield faster("effective_rank 32×128×768", 4, *rank, rounds=7)
    for shape, target in (((32, 128, 768), 4), ((8192, 64), 15)):
        y = torch.randn(*shape)
        cosine = (lambda y=y: plain.mean_cosine(y)), (lambda y=y: uc.mean_cosine(y))
        yield faster(f"mean_cosine {'×'.join(map(str, shape))}", target, *cosine, rounds=15)


def losses() -> Iterator[Result]:
    torch.manual_seed(0)
    for n, target, rounds in ((768, 3.0, 41), (8192, 3.0, 5)):
        x = torch.randn(n, 128)
        steps = training_step(plain.uniform_loss, x), training_step(uc.uniform_loss, x)
        yield faster(f"uniform_loss {n}×128", target, *steps, rounds=rounds)
    x, y = torch.randn(16_384, 128), torch.randn(16_384, 128)
    steps = training_step(plain.info_nce, x, y), training_step(uc.info_nce, x, y)
    yield faster("info_nce 16384×128", 1.5, *steps, rounds=3)
    x, y = torch.randn(8192, 128), torch.randn(8192, 128)
    steps = training_step(plain.nt_xent, x, y), training_step(lambda x, y: uc.info_nce(x, y, negatives="both"), x, y)
    yield faster("info_nce 2×8192×128, negatives='both'", 1.5, *steps, rounds=3)
    body = "x, y = (torch.randn(n, 128, requires_grad=True) for _ in range(2)); {}(x, y).backward()"
    yield smaller("info_nce 16384×128", 0.1, body.format("plain.info_nce"), body.format("uc.info_nce"), 256, 16_384)


def _contra_norm(x: Tensor) -> tuple[Callable[[], None], Callable[[], None]]:
    return training_step(plain.contra_norm, x), training_step(lambda x: uc.contra_norm(x, 0.1), x)


def _with_loops(edges: Tensor) -> tuple[Tensor, Tensor]:
    loops = torch.arange(2708).expand(2, -1)
    index = torch.cat([edges, loops], 1)
    return index, torch.ones(index.shape[1])


def graph() -> tuple[Tensor, str]:
    """Cora's edges from the folder named by UNCOLLAPSE_DATA, else a random graph of its size."""
    raw = Path(os.environ.get("UNCOLLAPSE_DATA", "")) / "planetoid/Cora/raw/ind.cora.graph"
    if not raw.is_file():
        drawn = torch.randint(0, 2708, (2, 5278), generator=torch.Generator().manual_seed(0), device="cpu")
        a, b = drawn.to(torch.get_default_device())
        return torch.stack([torch.cat([a, b]), torch.cat([b, a])]), "a random graph of Cora's size"
    with raw.open("rb") as file:
        neighbours = ListsOnly(file, encoding="latin1").load()
    pairs = {(i, j) for i, row in neighbours.items() for j in row if i != j}
    pairs |= {(j, i) for i, j in pairs}
    return torch.tensor(sorted(pairs)).T.contiguous(), "Cora's edges"


class ListsOnly(pickle.Unpickler):
    """Reads a dictionary of lists and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        known = {("collections", "defaultdict"): defaultdict, ("__builtin__", "list"): list, ("builtins", "list"): list}
        if (module, name) in known:
            return known[module, name]
        raise pickle.UnpicklingError(f"{module}.{name} has no place in an adjacency list.")
