"""ContraNorm's mean from a random sample of the keys."""

import torch
from torch import Tensor

from uncollapse._kernel.grid import Pairs, by_query
from uncollapse.pairwise import all_pairs, log_weight


def sampled_mean(
    unit: Tensor, value: Tensor, temperature: float, mask: Tensor | None, pairs: Pairs, sample: int
) -> Tensor:
    """The mean with the sums over other rows estimated from random keys; the row's own term is not left to chance."""
    n = unit.shape[-2]
    chosen = _choose(n, sample, pairs.row_group, unit.device)  # positions, ascending
    place = torch.full((n,), -1, device=unit.device).scatter_(0, chosen, torch.arange(len(chosen), device=unit.device))
    absent = torch.stack([chosen, place[chosen]])  # a sampled key is not its own query
    if pairs.excluded is not None:
        i, j = pairs.excluded
        absent = torch.cat([absent, torch.stack([i, place[j]])[:, place[j] >= 0]], 1)
    group = None if pairs.key_group is None else pairs.key_group[chosen]
    bias = log_weight(mask, unit)
    bias = None if bias is None else bias[..., chosen]
    few = Pairs(None, excluded=by_query(absent), mirrored=False, row_group=pairs.row_group, key_group=group)
    mean, log_sum = all_pairs(unit, unit[..., chosen, :], value[..., chosen, :], temperature, few, bias)
    if pairs.no_self:
        return mean
    real = torch.ones(unit.shape[:-1], dtype=torch.bool, device=unit.device) if mask is None else mask
    there, taken = _others(real, chosen, pairs.row_group)
    log_sum = log_sum + (there.clamp(min=1) / taken.clamp(min=1)).log()
    own = torch.sigmoid(unit.square().sum(-1) / temperature - log_sum).unsqueeze(-1)  # (..., n, 1) the row's own weight
    return own * value + (1 - own) * mean


def _choose(n: int, sample: int, group: Tensor | None, device: torch.device) -> Tensor:
    """Positions of `sample` random rows, or so many of each group, ascending."""
    if group is None:
        return torch.randperm(n, device=device)[:sample].sort().values
    order = torch.randperm(n, device=device)
    order = order[group[order].argsort(stable=True)]  # groups in order, random within each
    rank = torch.arange(n, device=device) - torch.searchsorted(group, group)
    return order[rank < sample].sort().values


def _others(real: Tensor, chosen: Tensor, group: Tensor | None) -> tuple[Tensor, Tensor]:
    """For each row how many other real rows there are (in its group), and how many of them were chosen."""
    taken = torch.zeros_like(real)
    taken[..., chosen] = real[..., chosen]
    counts = []
    for flag in (real, taken):
        number = flag.to(torch.float32)
        if group is None:
            total = number.sum(-1, keepdim=True).expand_as(number)
        else:
            total = torch.zeros(int(group[-1]) + 1, device=group.device).index_add_(0, group, number)[group]
        counts.append(total - number)
    return counts[0], counts[1]
