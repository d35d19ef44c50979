"""The grid of pairs: those that count, tiles that fit the cache, and what the passes over the tiles exchange."""

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from uncollapse.pairwise import products

TILE = {"cpu": (1024, 1 << 20)}  # largest number of queries and of elements of a tile: fits the cache
TILE_ELSEWHERE = (4096, 1 << 24)  # enough to fill a GPU
ABSENT = -1e30  # the logit of an excluded pair: finite, see `walk`
LOG2E = math.log2(math.e)
DOMINANCE = 1.5  # a key dominates its row if 1.5 times its weight exceeds the sum: it has 2/3, no other key has 1/2
PLAIN, DOMINATED, SYMMETRIC = 0, 1, 2  # how a row was computed: plainly, with a dominant key, by `symmetric`


@dataclass(frozen=True)
class Pairs:
    """Which pairs (query i, key j) count.

    Args:
        offset: count only j ≤ i + offset (causal); None counts all.
        no_self: exclude i = j.
        excluded: further excluded pairs (2, E), sorted by query.
        mirrored: for each excluded (i, j) the pair (j, i) is excluded too.
        row_group, key_group: ascending group numbers of queries and keys; only pairs within a group count.
    """

    offset: int | None = None
    no_self: bool = False
    excluded: Tensor | None = None
    mirrored: bool = True
    row_group: Tensor | None = None
    key_group: Tensor | None = None

    def transpose(self) -> "Pairs":
        """Return the same pairs with queries and keys swapped; not for causal pairs."""
        excluded = None if self.excluded is None else sort_by_query(self.excluded.flip(0))
        return replace(self, excluded=excluded, row_group=self.key_group, key_group=self.row_group)


def sort_by_query(excluded: Tensor) -> Tensor:
    """Return pairs (2, E) in the order of their queries."""
    return excluded[:, excluded[0].argsort()]


@dataclass(frozen=True)
class Tile:
    """Queries [a, b) against keys [lo, hi), and the excluded pairs among them."""

    a: int
    b: int
    lo: int
    hi: int
    no_self: bool
    drop: Tensor | None  # flat indices into the (b−a)·(hi−lo) pairs
    block: Tensor | None  # (b−a, hi−lo) bool: True = excluded
    first: int  # the first key that its queries see in any tile

    @property
    def rows(self) -> slice:
        """The queries of the tile."""
        return slice(self.a, self.b)

    @property
    def keys(self) -> slice:
        """The keys of the tile."""
        return slice(self.lo, self.hi)

    def fill_absent(self, tile: Tensor, value: float) -> None:
        """Overwrite the excluded pairs of `tile` (batch, b−a, hi−lo) in place."""
        if self.no_self:
            tile.diagonal(self.a - self.lo, -2, -1).fill_(value)
        if self.drop is not None:
            tile.view(tile.shape[0], -1).index_fill_(1, self.drop, value)
        if self.block is not None:
            tile.masked_fill_(self.block, value)


class Grid:
    """The tiles of all pairs that count, row by row. `upper`: only tiles on and above the diagonal."""

    def __init__(self, pairs: Pairs, n: int, m: int, device: torch.device, upper: bool = False) -> None:
        self.pairs, self.n, self.m, self.device, self.upper = pairs, n, m, device, upper
        self.height, self.area = TILE.get(device.type, TILE_ELSEWHERE)
        self.starts: list[int] = []
        if pairs.excluded is not None:
            edges = torch.arange(n + 1, device=device)
            self.starts = torch.searchsorted(pairs.excluded[0].contiguous(), edges).tolist()
        self.ranges: tuple[list[int], list[int]] | None = None
        if pairs.row_group is not None and pairs.key_group is not None:
            first = torch.searchsorted(pairs.key_group, pairs.row_group)
            behind = torch.searchsorted(pairs.key_group, pairs.row_group, right=True)
            self.ranges = first.tolist(), behind.tolist()

    @property
    def single(self) -> bool:
        """Return whether one tile holds all pairs of a batch element."""
        return self.n <= self.height and self.n * self.m <= self.area

    @property
    def whole(self) -> bool:
        """Return whether one tile covers every query and key, so that results can be written instead of added."""
        return self.single and self.n > 0 and self.m > 0 and self._keys(0, self.n) == (0, self.m)

    def chunks(self, batch: int, workers: int = 1) -> list[slice]:
        """Return batch elements to process together: about half a tile, which measured fastest.

        workers: how many process a chunk each; the number of chunks is a multiple of theirs. One uses all threads.
        """
        threads = torch.get_num_threads() if workers == 1 and self.single and self.device.type == "cpu" else 1
        fit = max(1, self.area // max(1, self.n * self.m))
        step = min(fit, max(1, fit // 2 // threads) * threads)
        if workers > 1:
            step = -(-batch // (workers * -(-batch // (workers * step))))
        return [slice(c, min(batch, c + step)) for c in range(0, batch, step)]

    def __iter__(self) -> Iterator[Tile]:
        for a in range(0, self.n, self.height):
            b = min(self.n, a + self.height)
            first, behind = self._keys(a, b)
            width = max(b - a, self.area // (b - a))
            for lo in range(first, behind, width):
                hi = min(behind, lo + width)
                no_self = self.pairs.no_self and max(a, lo) < min(b, hi)
                yield Tile(a, b, lo, hi, no_self, self._drop(a, b, lo, hi), self._block(a, b, lo, hi), first)

    def _keys(self, a: int, b: int) -> tuple[int, int]:
        first, behind = 0, self.m
        if self.ranges is not None:
            first, behind = self.ranges[0][a], self.ranges[1][b - 1]
        if self.pairs.offset is not None:
            behind = min(behind, b + self.pairs.offset)
        return (a if self.upper else first), behind

    def _drop(self, a: int, b: int, lo: int, hi: int) -> Tensor | None:
        if self.pairs.excluded is None:
            return None
        i, j = self.pairs.excluded[:, self.starts[a] : self.starts[b]]
        inside = (j >= lo) & (j < hi)
        flat: Tensor = (i - a) * (hi - lo) + (j - lo)
        return flat[inside]

    def _block(self, a: int, b: int, lo: int, hi: int) -> Tensor | None:
        block = None
        if self.pairs.offset is not None and hi > a + self.pairs.offset + 1:
            i, j = torch.arange(a, b, device=self.device), torch.arange(lo, hi, device=self.device)
            block = j > i[:, None] + self.pairs.offset  # (b−a, hi−lo)
        if self.pairs.row_group is not None and self.pairs.key_group is not None:
            across = self.pairs.row_group[a:b, None] != self.pairs.key_group[lo:hi]
            block = across if block is None else block | across
        return block


def keeps_weights(pairs: Pairs, n: int, m: int, width: int, device: torch.device) -> bool:
    """Return whether to keep the weights of all pairs for the backward pass instead of recomputing them.

    They are kept if they need no more memory than the means, whose rows have `width` entries, and fit one tile.
    """
    height, area = TILE.get(device.type, TILE_ELSEWHERE)
    plain = pairs.offset is None and pairs.row_group is None
    return plain and 0 < n <= height and 0 < m <= width and n * m <= area


class Memory(threading.local):
    """Memory for the tiles. Reused on the CPU, a few megabytes per thread: new pages cost as much as arithmetic."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, torch.dtype], Tensor] = {}

    def product(self, name: str, left: Tensor, right: Tensor, scale: float = 1.0, into: Tensor | None = None) -> Tensor:
        """Return scale · left (b, r, d) times right (b, m, d) transposed, in the block `name` or in `into`.

        Without `into` it may also be in memory of its own.
        """
        if into is None and products.pays(left, right.shape[1]):
            return products.linear(left[0] * scale, right[0])[None]
        out = self._block(name, left, right.shape[1]) if into is None else into
        return products.multiply(left, right, scale, out)

    def sums(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """Return left_i + right_j for left (b, r) and right (b, m), in the block `name`."""
        return torch.add(left[..., None], right[:, None], out=self._block(name, left, right.shape[1]))

    def _block(self, name: str, left: Tensor, columns: int) -> Tensor:
        """Return memory (b, r, columns) for left (b, r, ...), of its dtype, with arbitrary contents."""
        shape = left.shape[0], left.shape[1], columns
        size = math.prod(shape)
        block = self.blocks.get((name, left.dtype))
        if block is None or block.numel() < size or block.device != left.device:
            with torch.inference_mode(False):  # a tensor created in inference mode cannot be written to outside of it
                block = left.new_empty(size)
            if type(left) is Tensor and left.device.type == "cpu" and size <= 2 * TILE["cpu"][1]:
                self.blocks[name, left.dtype] = block
        return block[:size].view(shape)


memory = Memory()


class Inputs(NamedTuple):
    """Queries (b, n, d), keys (b, m, d), values (b, m, e), log-weights of the keys (b, m), and τ.

    All are finite except the log-weights, which are −inf for excluded keys.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    temperature: float

    def chunk(self, c: slice) -> "Inputs":
        """Return the batch elements c."""
        bias = None if self.bias is None else self.bias[c]
        return Inputs(self.q[c], self.k[c], self.v[c], bias, self.temperature)


class Outputs(NamedTuple):
    """Means (b, n, e), log₂ of the sums (b, n), how each row was computed (b, n), and the softmax weights (b, n, m).

    The weights are empty unless `keeps_weights` says to keep them; they are then recomputed when needed.
    """

    mean: Tensor
    log2sum: Tensor
    kind: Tensor
    weight: Tensor


class OutputGradients(NamedTuple):
    """Gradients of the means (b, n, e) and of the logarithms of the sums (b, n)."""

    mean: Tensor
    log: Tensor


class InputGradients(NamedTuple):
    """Gradients of q, k, v and bias, filled in place; with k = q the first two are one tensor."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
