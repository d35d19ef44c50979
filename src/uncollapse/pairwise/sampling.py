"""ContraNorm's mean from a random sample of the keys."""

import torch
from torch import Tensor

from uncollapse.pairwise import Pairs, all_pairs
from uncollapse.pairwise.numerics import sum_pairs


def sampled_mean(
    unit: Tensor, value: Tensor, temperature: float | Tensor, mask: Tensor | None, pairs: Pairs, sample: int
) -> Tensor:
    """The softmax mean with the sums over other rows estimated from `sample` random real rows of each sequence.

    unit and value (..., n, d). Where the weights of a mean are alike, most of the error of a sample is that of its
    plain mean, which all rows share and which deep networks amplify from layer to layer. So it is taken out: the plain
    mean over all keys is known exactly, at the cost of a sum, and only the difference of the softmax mean from it is
    estimated. All sequences are laid in one row of groups without their padding.
    """
    n, rows = unit.shape[-2], unit.shape[:-1].numel()
    sequences = torch.arange(rows // max(1, n), device=unit.device)
    group = pairs.row_group
    if group is None and (len(sequences) != 1 or mask is not None):
        group = sequences.repeat_interleave(n)
    excluded = pairs.excluded
    if excluded is not None:
        excluded = torch.unique(excluded, dim=1) if torch.compiler.is_compiling() else excluded  # else it is so already
        excluded = (excluded[:, None] + n * sequences[:, None]).reshape(2, -1)
    flat_unit, flat_value = unit.reshape(rows, -1), value.reshape(rows, -1)
    if mask is None:
        return _mean(flat_unit, flat_value, temperature, group, excluded, pairs.no_self, sample).reshape(value.shape)
    real = mask.expand(unit.shape[:-1]).reshape(-1).nonzero().squeeze(1)
    if excluded is not None:
        place = _places(real, rows)[excluded]
        excluded = place[:, (place >= 0).all(0)]
    group = None if group is None else group[real]
    mean = _mean(flat_unit[real], flat_value[real], temperature, group, excluded, pairs.no_self, sample)
    return torch.zeros_like(flat_value).index_copy(0, real, mean).reshape(value.shape)


def _mean(
    unit: Tensor,
    value: Tensor,
    temperature: float | Tensor,
    group: Tensor | None,
    excluded: Tensor | None,
    no_self: bool,
    sample: int,
) -> Tensor:
    """For rows (n, d) in ascending groups, or in one; the row's own term is not left to chance."""
    n = len(unit)
    chosen = _choose(n, group, sample, unit.device)
    missed = _missed(n, chosen, excluded)
    keys = None if group is None else group[chosen]
    few = Pairs(excluded=missed, mirrored=False, row_group=group, key_group=keys)
    mean, log_sum = all_pairs(unit, unit[chosen], value[chosen], temperature, few)
    whole, others = _sum(value, group, group, excluded, n)
    whole, others = whole - value, others - 1  # without the row itself
    part, taken = _sum(value[chosen], keys, group, missed, n)
    mean = mean + whole / others.clamp(min=1).unsqueeze(1) - part / taken.clamp(min=1).unsqueeze(1)
    if no_self:
        return mean
    log_sum = log_sum + (others.clamp(min=1) / taken.clamp(min=1)).log()  # as if all others had been summed
    own = torch.sigmoid(unit.square().sum(-1) / temperature - log_sum).unsqueeze(-1)  # (n, 1): the row's own weight
    return own * value + (1 - own) * mean


def _missed(n: int, chosen: Tensor, excluded: Tensor | None) -> Tensor:
    """Pairs (row, place among the chosen) that do not count, sorted: excluded ones, and a row with itself."""
    own = torch.stack([chosen, torch.arange(len(chosen), device=chosen.device)])
    if excluded is None:
        return own
    i, j = excluded[0], _places(chosen, n)[excluded[1]]
    codes = torch.cat([own, torch.stack([i, j])[:, j >= 0]], 1)
    return codes[:, (codes[0] * len(chosen) + codes[1]).argsort()]


def _sum(
    value: Tensor, keys: Tensor | None, queries: Tensor | None, absent: Tensor | None, n: int
) -> tuple[Tensor, Tensor]:
    """For each of n queries the sum of the values (m, e) of its group without absent pairs, and their number (n,)."""
    if keys is None or queries is None:
        total, count = value.sum(0, keepdim=True), torch.full((n,), len(value), device=value.device)
    else:
        groups = int(queries[-1]) + 1 if n else 0
        total = value.new_zeros(groups, value.shape[1]).index_add(0, keys, value)[queries]
        count = torch.bincount(keys, minlength=groups)[queries]
    if absent is None:
        return total, count
    return total - sum_pairs(absent, value, n), count - torch.bincount(absent[0], minlength=n)


def _choose(n: int, group: Tensor | None, sample: int, device: torch.device) -> Tensor:
    """Positions of so many random rows of each group, ascending."""
    order = torch.randperm(n, device=device)
    if group is None:
        return order[:sample].sort().values
    order = order[group[order].argsort(stable=True)]  # groups in order, random within each
    rank = torch.arange(n, device=device) - torch.searchsorted(group, group)
    return order[rank < sample].sort().values


def _places(chosen: Tensor, n: int) -> Tensor:
    """For each of n positions its place among the chosen ones, or −1."""
    places = torch.full((n,), -1, device=chosen.device)
    return places.scatter_(0, chosen, torch.arange(len(chosen), device=chosen.device))
