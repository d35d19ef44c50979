"""The losses on the sphere beside those of lightly and pytorch-metric-learning, and beside the plain formulas.

The unit of work is a product of all pairs: n rows by n others, d features. NT-Xent has n = 2B rows. With a matrix in
memory it takes one unit forward and two backward. In linear memory the logits are made twice, but being symmetric by
half each time, and both gradients are one product: two units. InfoNCE both ways, n = B, takes three units with a matrix
in memory, and four in linear memory.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import uncollapse as uc
from benchmarks import contrasting, plain
from benchmarks.measure import peak_memory, training_step
from benchmarks.peers import load
from benchmarks.targets import SETUP, Result, faster

Loss = Callable[[Tensor, Tensor], Tensor]
ROUNDS = {1024: 15, 4096: 3}  # by batch
DIM, TEMPERATURE, FEW = 128, 0.5, 256
CUBIC = 128  # a batch at which pytorch-metric-learning's NTXentLoss takes only a few hundred MiB
STEP = """
from benchmarks import hypersphere
hypersphere.{}(*(x.requires_grad_() for x in hypersphere.pairs(n))).backward()
"""


def training() -> Iterator[Result]:
    for batch in ROUNDS:
        yield from nt_xent(batch)
        yield from plain_formulas(batch)
    yield from beside_cubic()
    yield from longer()
    yield from contrasting.shares()


def nt_xent(batch: int) -> Iterator[Result]:
    """All of them divide rows by their length first."""
    name = f"NT-Xent {batch}×{DIM}"
    if load("pytorch_metric_learning.losses") is not None:
        yield from beside(f"{name}, pytorch-metric-learning's SupConLoss, the same for two views", both, metric, batch)
    if load("lightly.loss") is None:
        return
    yield from beside(f"{name}, lightly", both, lightly, batch)
    unit = [F.normalize(x, dim=-1) for x in pairs(batch)]
    steps = training_step(lightly, *unit), training_step(already_unit, *unit)
    yield _theirs(faster(f"{name}, lightly, rows of length one and normalize=False", None, *steps, ROUNDS[batch]))


def plain_formulas(batch: int) -> Iterator[Result]:
    yield from beside(f"InfoNCE {batch}×{DIM} both ways, a cross entropy of x yᵀ", cross, dense_cross, batch)
    yield from beside(f"uniform_loss of two views {batch}×{DIM}, the authors' pdist", uniform, pdist, batch)
    yield from beside(f"koleo_loss {batch}×{DIM}, the matrix of all dot products", koleo, dense_koleo, batch)
    yield from beside(f"dispersion_loss {batch}×{DIM}, the matrix of all angles", disperse, dense_disperse, batch)


def beside(name: str, ours: Loss, theirs: Loss, batch: int) -> Iterator[Result]:
    """Forward and backward: times as fast, and share of the memory."""
    check_the_same(ours, theirs, batch)
    steps = training_step(theirs, *pairs(batch)), training_step(ours, *pairs(batch))
    yield _theirs(faster(name, 1.0, *steps, ROUNDS.get(batch, 15)))
    before, after = memory(theirs, batch), memory(ours, batch)
    detail = f"{before:.0f} MiB theirs, {after:.0f} MiB ours"
    yield Result("  its memory", 1.0, after / before, "of the memory", False, detail)


def _theirs(result: Result) -> Result:
    return replace(result, detail=result.detail.replace("plain", "theirs"))


def beside_cubic() -> Iterator[Result]:
    """NTXentLoss of pytorch-metric-learning holds a matrix of all positive by all negative pairs of the batch."""
    if load("pytorch_metric_learning.losses") is None:
        return
    name = f"NT-Xent {CUBIC}×{DIM}, pytorch-metric-learning's NTXentLoss"
    yield from beside(name, both, cubic, CUBIC)
    for batch in ROUNDS:
        rows = 2 * batch
        needed, after = rows * rows * (rows - 2) * 4 / 2**20, memory(both, batch)
        detail = f"not run: one of its matrices takes {needed:,.0f} MiB; {after:.0f} MiB ours"
        yield Result(f"  its memory at {batch}, computed", 1.0, after / needed, "of the memory", False, detail)


def longer(batch: int = 4096, times: int = 4) -> Iterator[Result]:
    """Linear memory: with so many times the rows it takes so many times the memory, and a matrix its square."""
    for name, loss in (("NT-Xent", both), ("InfoNCE both ways", cross)):
        short, long = memory(loss, batch), memory(loss, times * batch)
        detail = f"{short:.0f} MiB and {long:.0f} MiB"
        yield Result(
            f"memory of {name}, {times * batch} rows over {batch}", times + 1, long / short, "×", False, detail
        )


def memory(loss: Loss, batch: int) -> float:
    """MiB that forward and backward of one of the losses below take, in a process of its own."""
    return peak_memory(SETUP, STEP.format(loss.__name__), FEW if batch > FEW else 2, batch)


@torch.no_grad()
def check_the_same(ours: Loss, theirs: Loss, batch: int) -> None:
    """Or times side by side would say nothing."""
    torch.testing.assert_close(ours(*pairs(batch)), theirs(*pairs(batch)), rtol=1e-5, atol=1e-5)


def pairs(batch: int) -> Sequence[Tensor]:
    """Two views (batch, DIM), near each other as those of a trained encoder."""
    x, noise = torch.randn(2, batch, DIM, generator=torch.Generator().manual_seed(0))
    return x, x + 0.5 * noise


def both(x: Tensor, y: Tensor) -> Tensor:
    return uc.info_nce(x, y, temperature=TEMPERATURE, negatives="both")


def already_unit(x: Tensor, y: Tensor) -> Tensor:
    return uc.info_nce(x, y, temperature=TEMPERATURE, negatives="both", normalize=False)


def cross(x: Tensor, y: Tensor) -> Tensor:
    return uc.info_nce(x, y, temperature=TEMPERATURE, symmetric=True)


def uniform(x: Tensor, y: Tensor) -> Tensor:
    return uc.uniform_loss(x, y=y)


def koleo(x: Tensor, y: Tensor) -> Tensor:
    return uc.koleo_loss(x) + 0 * y.sum()


def dense_koleo(x: Tensor, y: Tensor) -> Tensor:
    """The nearest neighbour of each row from one matrix."""
    unit = F.normalize(x, dim=-1)
    with torch.no_grad():
        nearest = (unit @ unit.T).fill_diagonal_(-2).argmax(1)
    distances: Tensor = (unit - unit[nearest]).norm(dim=-1)
    return -(distances + 1e-8).log().mean() + 0 * y.sum()


def disperse(x: Tensor, y: Tensor) -> Tensor:
    return uc.dispersion_loss(x) + 0 * y.sum()


def dense_disperse(x: Tensor, y: Tensor) -> Tensor:
    """All angles of one sequence in one matrix."""
    unit = F.normalize(x, dim=-1)
    angle = (unit @ unit.T).clamp(-0.999, 0.999).arccos() / torch.pi
    logits = (-angle).masked_fill(torch.eye(len(x), dtype=torch.bool), -torch.inf)
    return logits.flatten().logsumexp(0) - math.log(len(x) * (len(x) - 1)) + 0 * y.sum()


def dense_cross(x: Tensor, y: Tensor) -> Tensor:
    """One matrix for both directions."""
    logits = F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).T / TEMPERATURE
    partner = torch.arange(len(x))
    return (F.cross_entropy(logits, partner) + F.cross_entropy(logits.T, partner)) / 2


def pdist(x: Tensor, y: Tensor) -> Tensor:
    return (plain.uniform_loss(x) + plain.uniform_loss(y)) / 2


def lightly(x: Tensor, y: Tensor) -> Tensor:
    return _peer("lightly.loss", "NTXentLoss")(x, y)


def metric(x: Tensor, y: Tensor) -> Tensor:
    return _peer("pytorch_metric_learning.losses", "SupConLoss")(x, y)


def cubic(x: Tensor, y: Tensor) -> Tensor:
    return _peer("pytorch_metric_learning.losses", "NTXentLoss")(x, y)


@cache
def _peer(module: str, name: str) -> Loss:
    """The loss of a library, for two views."""
    losses = load(module)
    made: Any = getattr(losses, name)(temperature=TEMPERATURE)
    loss: Loss = made if module.startswith("lightly") else losses.SelfSupervisedLoss(made)
    return loss
