"""Measures of one layer that are not registered metrics: of sets of tokens, of all tokens, of attention in tiles."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from uncollapse import metrics
from uncollapse.backbones.attention_calls import Tile, Tiles
from uncollapse.diagnosis.stats.moments import Moments
from uncollapse.metrics import robust
from uncollapse.metrics.attention import RowSums
from uncollapse.metrics.spectrum import gram_spectrum, rank_from_singular_values
from uncollapse.pairwise import numerics
from uncollapse.pairwise.threads import run_side_by_side

WIDEST = 1536  # features up to which moments of all tokens are kept: 36 MiB per layer there, 9 at 768
SAMPLE = 1024  # tokens sampled for measures that are not moments
NUMBERS = 2**24  # in a sample: 1,024 tokens up to 16,384 features, and fewer of wider ones
FEATURES = 8192  # features that are compared with each other at most, in time quadratic in their number
CURVE = 256  # singular values that a diagnosis stores
SIDE = 48  # tokens on each side of a heat map


def first_token_norm(x: Tensor, mask: Tensor) -> Tensor:
    """Return the norm of the first real token over the median norm of the others, (b, n, d) -> (b,)."""
    norms = torch.linalg.vector_norm(x.double(), dim=-1)
    others = robust.drop_first_token(mask)
    first = norms.masked_fill(~(mask & ~others), 0).sum(-1)
    median = norms.masked_fill(~others, torch.nan).nanmedian(-1).values
    return torch.where(median > 0, first / median, 1.0)


def massive_activation(x: Tensor, mask: Tensor) -> Tensor:
    """Return the largest |activation| of the real tokens over the median one, (b, n, d) -> (b,); 1 where that is 0.

    Sun et al., Massive Activations in Large Language Models, arXiv 2402.17762.
    """
    sizes = x.abs().float().masked_fill(~mask[..., None], torch.nan).flatten(1)
    median = sizes.nanmedian(-1).values
    return torch.where(median > 0, sizes.nan_to_num(0).amax(-1) / median, 1.0)


def token_norm(x: Tensor, mask: Tensor) -> Tensor:
    """Return the median norm of the real tokens without the first, (b, n, d) -> (b,)."""
    norms = torch.linalg.vector_norm(x.double(), dim=-1)
    found: Tensor = norms.masked_fill(~robust.drop_first_token(mask), torch.nan).nanmedian(-1).values
    return found.nan_to_num(0)


def cosine_map(x: Tensor, mask: Tensor | None) -> tuple[tuple[float, ...], ...]:
    """Return cosines between at most 48 evenly spaced real tokens of one set (n, d), to two digits."""
    rows = (x if mask is None else x[mask])[spaced_tokens(len(x) if mask is None else int(mask.sum()))]
    unit = numerics.unit_rows(rows.float())
    return tuple(tuple(round(value, 2) for value in row) for row in (unit @ unit.mT).tolist())


def spaced_tokens(n: int) -> list[int]:
    """Return the positions, among n real tokens, of those in a heat map."""
    return torch.linspace(0, n - 1, min(n, SIDE)).round().long().tolist() if n else []


def thin_spectrum(sigma: Tensor) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return singular values over their sum, at most 256 of them, and their ranks from 1."""
    total = float(sigma.sum()) or 1.0
    ranks = torch.linspace(0, len(sigma) - 1, min(len(sigma), CURVE)).round().long()
    return tuple(float(f"{value:.6g}") for value in (sigma[ranks] / total).tolist()), tuple((ranks + 1).tolist())


def sample_size(dim: int) -> int:
    """Return how many tokens with so many features are sampled."""
    return min(SAMPLE, max(64, NUMBERS // max(1, dim)))


def dataset_spectrum(moments: Moments | None, rows: Tensor) -> Tensor:
    """Return the singular values of all tokens minus their mean, or of a sample if they are too wide for moments."""
    return moments.spectrum(center=True) if moments else gram_spectrum(numerics.center(rows.double(), None))


def dataset_measures(moments: Moments | None, rows: Tensor, sigma: Tensor, t: float) -> dict[str, Tensor]:
    """Return measures of all tokens. rows: a sample of them. sigma: their singular values, which take most time."""
    found = {"dataset_rank_share": robust.sample_rank_share(rows)}
    found["uniformity"] = metrics.uniformity(rows, t)
    found["dataset_rank"] = rank_from_singular_values(sigma)
    if moments is None:  # too wide for moments: use the sample
        features = torch.randperm(rows.shape[-1], generator=torch.Generator().manual_seed(0))[:FEATURES]
        some = rows if rows.shape[-1] <= FEATURES else rows[:, features.sort().values]
        found["feature_correlation"] = metrics.feature_correlation(some)
        found["outlier_share"] = metrics.outlier_share(rows)
    else:
        found["feature_correlation"] = moments.feature_correlation()
        found["outlier_share"] = moments.outlier_share()
    return found


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
