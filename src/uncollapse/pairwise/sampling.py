"""The softmax mean over all rows, estimated from a random sample of the keys."""

import torch
from torch import Tensor

from uncollapse.pairwise import Pairs, all_pairs
from uncollapse.pairwise.numerics import sum_pairs


def sampled_mean(
    unit: Tensor, value: Tensor, temperature: float | Tensor, mask: Tensor | None, pairs: Pairs, sample: int
) -> Tensor:
    """Return the softmax mean with the sums over other rows estimated from `sample` random real rows per sequence.

    If the weights of a mean are similar, most of the error of a sample is that of its plain mean, which all rows share
    and which deep networks amplify from layer to layer. The plain mean over all keys is known exactly, at the cost of
    one sum, so only the difference between the softmax mean and the plain mean is estimated. The sequences are
    concatenated as groups, without their padding.

    Args:
        unit: unit rows (..., n, d), both queries and keys.
        value: rows (..., n, d) that are averaged.
        temperature: τ of the softmax.
        mask: (..., n) bool, True = real.
        pairs: which pairs count.
        sample: number of keys per sequence, or per group of `pairs`.
    """
    n, rows = unit.shape[-2], unit.shape[:-1].numel()
    sequences = torch.arange(rows // max(1, n), device=unit.device)
    group = pairs.row_group
    if group is None and (len(sequences) != 1 or mask is not None):
        group = sequences.repeat_interleave(n)
    excluded = pairs.excluded
    if excluded is not None:
        if torch.compiler.is_compiling():  # otherwise pairs are unique already
            excluded = torch.unique(excluded, dim=1)
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
    """Estimate the mean for rows (n, d) in ascending groups, or in one group; the row's own term stays exact."""
    n = len(unit)
    chosen = _choose(n, group, sample, unit.device)
    absent = _excluded_among(n, chosen, excluded)
    keys = None if group is None else group[chosen]
    few = Pairs(excluded=absent, mirrored=False, row_group=group, key_group=keys)
    mean, log_sum = all_pairs(unit, unit[chosen], value[chosen], temperature, few)
    whole, others = _sum(value, group, group, excluded, n)
    whole, others = whole - value, others - 1  # without the row itself
    part, taken = _sum(value[chosen], keys, group, absent, n)
    mean = mean + whole / others.clamp(min=1).unsqueeze(1) - part / taken.clamp(min=1).unsqueeze(1)
    if no_self:
        return mean
    log_sum = log_sum + (others.clamp(min=1) / taken.clamp(min=1)).log()  # scaled up to all other rows
    own = torch.sigmoid(unit.square().sum(-1) / temperature - log_sum).unsqueeze(-1)  # (n, 1): the row's own weight
    return own * value + (1 - own) * mean


def _excluded_among(n: int, chosen: Tensor, excluded: Tensor | None) -> Tensor:
    """Return the pairs (row, position among the chosen) to exclude, sorted: excluded ones, and each row with itself."""
    own = torch.stack([chosen, torch.arange(len(chosen), device=chosen.device)])
    if excluded is None:
        return own
    i, j = excluded[0], _places(chosen, n)[excluded[1]]
    codes = torch.cat([own, torch.stack([i, j])[:, j >= 0]], 1)
    return codes[:, (codes[0] * len(chosen) + codes[1]).argsort()]


def _sum(
    value: Tensor, keys: Tensor | None, queries: Tensor | None, absent: Tensor | None, n: int
) -> tuple[Tensor, Tensor]:
    """Return for each of n queries the sum of the values (m, e) of its group, and how many (n,); no absent pairs."""
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
    """Return the positions of `sample` random rows of each group, ascending."""
    order = torch.randperm(n, device=device)
    if group is None:
        return order[:sample].sort().values
    order = order[group[order].argsort(stable=True)]  # groups in order, random within each
    rank = torch.arange(n, device=device) - torch.searchsorted(group, group)
    return order[rank < sample].sort().values


def _places(chosen: Tensor, n: int) -> Tensor:
    """Return for each of n positions its index among the chosen ones, or −1."""
    places = torch.full((n,), -1, device=chosen.device)
    return places.scatter_(0, chosen, torch.arange(len(chosen), device=chosen.device))
