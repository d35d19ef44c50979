"""Draw a uniform sample of a stream of vectors, for measures that are not moments."""

import math
from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from uncollapse.diagnosis.stats.streaming import (
    check_keys,
    check_single,
    chunks,
    flat_rows,
    read_integer,
    read_tensor,
)
from uncollapse.pairwise.numerics import check_positive

SEEDS = 2**32  # torch's CPU generator reads 32 bits of its seed


class Reservoir:
    """A uniform sample of at most `size` rows of a stream, for measures such as uniformity; samples can be merged.

    Each real row draws a random priority in the order of the stream, and the `size` rows of smallest priority stay: a
    sample without replacement in which every set of `size` rows is equally likely (bottom-k sampling). The same seed
    and the same stream give the same sample, whatever the batch sizes. Samples that will be merged need different
    seeds: with the same seed they would have the same priorities.

    Args:
        size: the number of rows to keep. Memory is `size` rows and one chunk of 1,024.
        dim: the number of features d.
        seed: of the priorities, 0 ≤ seed < 2³².

    Attributes:
        count: the number of real rows seen. rows: (m, d) float32 on the CPU, m = min(size, count), in random order.
        seeds: those of all merged samples.

    >>> import torch
    >>> stream = torch.arange(100.0).reshape(50, 2)
    >>> sample = Reservoir(size=8, dim=2, seed=1)
    >>> for batch in stream.split(7):
    ...     sample.update(batch)
    >>> sample
    Reservoir(size=8, dim=2, count=50)
    >>> sample.rows.shape
    torch.Size([8, 2])
    """

    def __init__(self, size: int, dim: int, seed: int = 0) -> None:
        check_positive(size, "size")
        check_positive(dim, "dim")
        if not 0 <= seed < SEEDS:
            raise ValueError(f"seed must be at least 0 and below 2**32, got {seed}.")
        self.size = size
        self.dim = dim
        self.seeds = frozenset([seed])
        self.count = 0
        self.rows = torch.zeros(0, dim)
        self._priorities = torch.zeros(0, dtype=torch.float64)  # (m,) ascending, one per row
        self._generator = torch.Generator().manual_seed(seed)

    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Add the real rows of x to the stream.

        Real rows with NaN, infinity or values beyond the range of float32 raise ValueError, and nothing is changed.

        Args:
            x: (..., d) of any float dtype, on any device, with any number of rows.
            mask: (...) bool, True = real. Other rows may hold anything and draw no priority.
        """
        flat = flat_rows(x, mask, self.dim)
        check_single(flat)
        for rows in chunks(flat):
            priorities = torch.rand(rows.shape[0], generator=self._generator, dtype=torch.float64)
            bar = self._priorities[-1] if len(self.rows) == self.size else math.inf
            entering = (priorities < bar).nonzero().squeeze(-1)
            self.count += rows.shape[0]
            if len(entering) > 0:
                self._keep_smallest(rows[entering.to(rows.device)].to("cpu", torch.float32), priorities[entering])

    def merge(self, other: "Reservoir") -> "Reservoir":
        """Return a uniform sample of both streams, as a new object: the smallest priorities of the union.

        Any order and nesting of merges gives the same sample. Later updates draw from the smallest seed's generator.
        ValueError for another size or dim, or a seed that occurs on both sides.
        """
        if (self.size, self.dim) != (other.size, other.dim):
            raise ValueError(f"Reservoirs to merge need the same size and dim, got {self} and {other}.")
        if shared := self.seeds & other.seeds:
            raise ValueError(
                f"Reservoirs to merge need different seeds, got {min(shared)} on both sides: their priorities are the "
                "same, so the union would not be a uniform sample. Give each sample its own seed."
            )
        first = self if min(self.seeds) < min(other.seeds) else other
        merged = Reservoir(self.size, self.dim)
        merged._generator.set_state(first._generator.get_state())
        merged.seeds = self.seeds | other.seeds
        merged.count = self.count + other.count
        merged._keep_smallest(self.rows, self._priorities)
        merged._keep_smallest(other.rows, other._priorities)
        return merged

    def __repr__(self) -> str:
        return f"Reservoir(size={self.size}, dim={self.dim}, count={self.count})"

    def state(self) -> dict[str, Tensor | int]:
        """Return a copy of everything, for storage, including the state of the generator."""
        return {
            "size": self.size,
            "count": self.count,
            "rows": self.rows.clone(),
            "priorities": self._priorities.clone(),
            "seeds": torch.tensor(sorted(self.seeds)),
            "generator": self._generator.get_state(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor | int]) -> Self:
        """Return the reservoir that `state()` described, to be continued. ValueError if it is invalid."""
        check_keys(state, ("size", "count", "rows", "priorities", "seeds", "generator"))
        size, count = read_integer(state, "size"), read_integer(state, "count")
        check_positive(size, "size")
        seeds = frozenset(read_tensor(state, "seeds", torch.int64, (None,)).tolist())
        if not seeds or min(seeds) < 0 or max(seeds) >= SEEDS:
            raise ValueError(f"seeds must hold at least one number from 0 to below 2**32, got {sorted(seeds)}.")
        rows = read_tensor(state, "rows", torch.float32, (min(size, count), None))
        priorities = read_tensor(state, "priorities", torch.float64, (len(rows),))
        if bool(((priorities < 0) | (priorities >= 1)).any()):
            raise ValueError("priorities must be from 0 to below 1: this is not a state of a Reservoir.")
        reservoir = cls(size, rows.shape[1], min(seeds))
        reservoir.seeds, reservoir.count = seeds, count
        reservoir._keep_smallest(rows, priorities)
        try:
            reservoir._generator.set_state(read_tensor(state, "generator", torch.uint8, (None,)).clone())
        except RuntimeError as error:
            raise ValueError(
                "generator is not a state of torch's CPU generator: this is not a state of a Reservoir."
            ) from error
        return reservoir

    def _keep_smallest(self, rows: Tensor, priorities: Tensor) -> None:
        with torch.inference_mode(False):  # so that the sample can be used outside of inference mode
            union = torch.cat([self._priorities, priorities])
            self._priorities, order = union.sort(stable=True)
            self._priorities, order = self._priorities[: self.size].clone(), order[: self.size]
            self.rows = torch.cat([self.rows, rows])[order]
