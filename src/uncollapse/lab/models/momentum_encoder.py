"""MoCo (arXiv 1911.05722): an encoder, a copy that follows it slowly, and a queue of what the copy gave before."""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse import distributed
from uncollapse.errors import UsageError


class MomentumOutput(NamedTuple):
    """What a batch gave. x (b, d): of the encoder. y (b, d): of its follower. queue (K, d): before this batch."""

    x: Tensor
    y: Tensor
    queue: Tensor


class MomentumEncoder(nn.Module):
    """An encoder with a follower, which has no gradients, and the queue of the follower's outputs.

    Queue and pointer are buffers: a checkpoint holds them. Several processes remember the outputs of all, in the order
    of the whole batch: their queues are the same. The follower's BatchNorm sees the second views of the batch that the
    encoder's sees the first ones of. Where a batch is spread over several devices, MoCo shuffles it among them for the
    follower, so that the statistics of a device do not tell which views belong together. Here, several GPUs take the
    statistics of the whole batch, as one process does, and there is nothing to shuffle. On processors, where torch
    cannot do that, each process has statistics of its own, and nothing is shuffled either.

    Args:
        encoder: with `dim` features, which is trained.
        queue: how many outputs are remembered; it starts with random ones.
        ema: share of its own weights that the follower keeps in a step.
    """

    queue: Tensor
    pointer: Tensor

    def __init__(self, encoder: Any, queue: int, ema: float = 0.999) -> None:
        super().__init__()
        if queue < 1 or not 0 <= ema < 1:
            raise UsageError(f"A queue has 1 row or more and ema is from 0 to less than 1, got {queue} and {ema}.")
        self.encoder, self.ema = encoder, ema
        self.follower = copy.deepcopy(encoder).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(queue, encoder.dim), dim=-1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))  # the oldest row, which goes next

    def forward(self, first: Tensor, second: Tensor) -> MomentumOutput:
        """Two views (b, 3, h, w) -> rows of length one; the follower takes a step before it looks, the queue after."""
        x = F.normalize(self.encoder(first).float(), dim=-1)
        with torch.no_grad():
            self.follow()
            y = F.normalize(self.follower(second).float(), dim=-1)
            before = self.queue.clone()  # the backward pass still needs what is overwritten now
            self.enqueue(distributed.gather_rows(y))
        return MomentumOutput(x, y, before)

    @torch.no_grad()
    def follow(self) -> None:
        """Bring the follower's weights a step closer. Its BatchNorm has statistics of its own."""
        for own, leading in zip(self.follower.parameters(), self.encoder.parameters(), strict=True):
            own.lerp_(leading, 1 - self.ema)

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        """Put rows (b, d) in the place of the oldest ones. A queue shorter than a batch has the last of it."""
        size = len(self.queue)
        kept = keys[-size:]
        skipped = len(keys) - len(kept)
        places = (self.pointer + skipped + torch.arange(len(kept), device=keys.device)) % size
        self.queue[places] = kept.to(self.queue.dtype)
        self.pointer.copy_((self.pointer + len(keys)) % size)


def add_mlp(encoder: Any) -> None:
    """Give an encoder a hidden layer before its output, as MoCo v2 has (arXiv 2003.04297)."""
    hidden = nn.Linear(encoder.penultimate, encoder.penultimate)
    encoder.output = nn.Sequential(hidden, nn.ReLU(inplace=True), encoder.output)
