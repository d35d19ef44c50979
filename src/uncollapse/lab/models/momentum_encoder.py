"""MoCo (arXiv 1911.05722): an encoder, a moving average of it, and a queue of the average's earlier outputs."""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse import distributed
from uncollapse.errors import UsageError


class MomentumOutput(NamedTuple):
    """Outputs for a batch: x (b, d) of the encoder, y (b, d) of its follower, queue (K, d) before this batch."""

    x: Tensor
    y: Tensor
    queue: Tensor


class MomentumEncoder(nn.Module):
    """An encoder, its follower (an exponential moving average without gradients) and the queue of follower outputs.

    Queue and pointer are buffers, so checkpoints contain them. With several processes every queue gets the outputs of
    all ranks in the order of the whole batch, so all queues are equal. The encoder's BatchNorm sees the first views of
    a batch, the follower's the second ones. MoCo shuffles a batch among devices for the follower, so that the
    statistics of one device do not reveal which views belong together. Here, GPUs synchronize the statistics over the
    whole batch, as one process has them, and nothing needs to be shuffled. On CPUs, where torch cannot synchronize
    them, each process has its own statistics, and nothing is shuffled either.

    Args:
        encoder: Encoder with an attribute `dim`, which is trained.
        queue: Number of outputs in the queue. It starts with random ones.
        ema: Decay of the moving average in a step.
    """

    queue: Tensor
    pointer: Tensor

    def __init__(self, encoder: Any, queue: int, ema: float = 0.999) -> None:
        super().__init__()
        if queue < 1 or not 0 <= ema < 1:
            raise UsageError(f"queue must be at least 1 and ema in [0, 1), got {queue} and {ema}.")
        self.encoder, self.ema = encoder, ema
        self.follower = copy.deepcopy(encoder).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(queue, encoder.dim), dim=-1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))  # the oldest row, which is replaced next

    def forward(self, first: Tensor, second: Tensor) -> MomentumOutput:
        """Encode two views (b, 3, h, w) as unit rows. The follower is updated before it encodes, the queue after."""
        x = F.normalize(self.encoder(first).float(), dim=-1)
        with torch.no_grad():
            self.follow()
            y = F.normalize(self.follower(second).float(), dim=-1)
            before = self.queue.clone()  # the backward pass still needs the rows that are overwritten now
            self.enqueue(distributed.gather_rows(y))
        return MomentumOutput(x, y, before)

    @torch.no_grad()
    def follow(self) -> None:
        """Update the follower's weights. Its BatchNorm has statistics of its own."""
        for own, leading in zip(self.follower.parameters(), self.encoder.parameters(), strict=True):
            own.lerp_(leading, 1 - self.ema)

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        """Replace the oldest rows of the queue by rows (b, d); a queue shorter than the batch gets its last rows."""
        size = len(self.queue)
        kept = keys[-size:]
        skipped = len(keys) - len(kept)
        places = (self.pointer + skipped + torch.arange(len(kept), device=keys.device)) % size
        self.queue[places] = kept.to(self.queue.dtype)
        self.pointer.copy_((self.pointer + len(keys)) % size)


def add_mlp(encoder: Any) -> None:
    """Add a hidden layer before the output of an encoder, as in MoCo v2 (arXiv 2003.04297)."""
    hidden = nn.Linear(encoder.penultimate, encoder.penultimate)
    encoder.output = nn.Sequential(hidden, nn.ReLU(inplace=True), encoder.output)
