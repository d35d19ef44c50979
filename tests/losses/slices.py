"""Rows, and the random directions that losses on slices of them draw."""

import torch
from torch import Tensor

SLICES = 6


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def directions(d: int) -> Tensor:
    drawn = torch.randn(d, SLICES, generator=seeded()).double()
    return drawn / drawn.norm(dim=0)
