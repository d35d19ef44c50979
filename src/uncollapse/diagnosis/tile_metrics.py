"""Metrics of attention maps that are read tile by tile."""

import torch
from torch import Tensor

from uncollapse.backbones.attention_tiles import Tile, Tiles
from uncollapse.metrics.attention import RowSums
from uncollapse.pairwise import numerics


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
    for tile in tiles.each:
        rows = _sum_rows(tile, count, mask, prefix)
        sums[tile.first] = sums[tile.first] + rows if tile.first in sums else rows
    found = [part.metrics(count[first : first + len(part.pointing)].to(part.unit)) for first, part in sums.items()]
    return {name: torch.cat([part[name] for part in found]) for name in found[0]}


def _sum_rows(tile: Tile, count: Tensor, mask: Tensor | None, prefix: int) -> RowSums:
    maps = tile.maps[:, :, max(0, prefix - tile.row) :, prefix:]
    part, row = slice(tile.first, tile.first + len(maps)), max(0, tile.row - prefix)
    keys = None if mask is None else mask[part]
    rows = None if keys is None else keys[:, row : row + maps.shape[2]]
    return RowSums.of(maps, count[part].to(maps), keys, rows)
