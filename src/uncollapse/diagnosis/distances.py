"""Histograms of the distances between embeddings, next to those of random points on the sphere."""

import math

import torch
from torch import Tensor

from uncollapse.pairwise import numerics

BINS = 40  # of distances between unit rows, from 0 to 2
SHIFTS = 32  # partners of each row: enough for a histogram, without all pairs
COLUMNS = 256  # features of all rows that fit into the cache of a processor
STEPS = 2**16  # angles at which the density of random points is summed


def row_distances(rows: Tensor) -> tuple[float, ...]:
    """Return the shares per bin of the distances ‖x − y‖ of two different rows (n, d), which are normalised.

    Each row is compared with up to 32 others, spread evenly over all.
    """
    unit = numerics.unit_rows(rows.double())
    count = min(len(unit) - 1, SHIFTS)
    shifts = [1 + number * (len(unit) - 1) // count for number in range(count)]
    squares = torch.zeros(count, len(unit), dtype=torch.float64)
    for part in torch.split(unit, COLUMNS, -1):
        squares += torch.stack([(part - part.roll(shift, 0)).square().sum(-1) for shift in shifts])
    return bin_shares(squares.sqrt().flatten())


def bin_shares(distances: Tensor) -> tuple[float, ...]:
    """Return the shares of distances (m,) in each of 40 bins from 0 to 2."""
    counts = torch.histc(distances.double().clamp(0, 2), BINS, 0, 2)
    return tuple((counts / counts.sum()).tolist())


def uniform_distances(dim: int) -> tuple[float, ...]:
    """Return the expected shares of the distances of two independent uniform points on the unit sphere in `dim` dims.

    The density of the angle θ between them is proportional to sinᵈ⁻²θ, and their distance is 2 sin(θ/2).
    """
    if dim == 1:  # two points
        return (0.5, *[0.0] * (BINS - 2), 0.5)
    angles = torch.linspace(0, math.pi, STEPS + 1, dtype=torch.float64)
    middle = (angles[1:] + angles[:-1]) / 2
    logs = (dim - 2) * middle.sin().log()
    weights = (logs - logs.max()).exp()
    places = (2 * (middle / 2).sin() * BINS / 2).long().clamp(max=BINS - 1)
    shares = torch.zeros(BINS, dtype=torch.float64).index_add_(0, places, weights / weights.sum())
    return tuple(shares.tolist())
