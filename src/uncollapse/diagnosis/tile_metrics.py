"""Metrics of attention maps that are read tile by tile."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from uncollapse.backbones.attention_calls import Tile, Tiles
from uncollapse.metrics.attention import RowSums
from uncollapse.pairwise import numerics
from uncollapse.pairwise.threads import run_side_by_side


def measure_tiles(tiles: Tiles, mask: Tensor | None, prefix: int) -> dict[str, Tensor]:
    """Return the metrics (b,) of maps (b, heads, n, n), as the metrics of their names do for whole maps.

    mask: (b, n) bool, True = real. prefix: leading tokens that are dropped.
    """
    sets, _, _, n = tiles.shape
    if mask is not None:
        numerics.check_mask(mask, torch.Size((sets, n)))
        mask = None if bool(mask.all()) else mask.expand(sets, n)[:, prefix:]
    count = torch.full((sets,), n - prefix) if mask is None else mask.sum(-1)
    sums: dict[int, RowSums] = {}
    for first, rows in run_side_by_side(partial(_sum_rows, each, count, mask, prefix) for each in tiles.each):
        sums[first] = sums[first] + rows if first in sums else rows
    found = [part.metrics(count[first : first + len(part.pointing)].to(part.unit)) for first, part in sums.items()]
    return {name: torch.cat([part[name] for part in found]) for name in found[0]}


def _sum_rows(compute: Callable[[], Tile], count: Tensor, mask: Tensor | None, prefix: int) -> tuple[int, RowSums]:
    """Return the number of the first map of a tile, and the sums of its rows."""
    tile = compute()
    maps = tile.maps[:, :, max(0, prefix - tile.row) :, prefix:]
    part, row = slice(tile.first, tile.first + len(maps)), max(0, tile.row - prefix)
    keys = None if mask is None else mask[part]
    rows = None if keys is None else keys[:, row : row + maps.shape[2]]
    return tile.first, RowSums.of(maps, count[part].to(maps), keys, rows)
