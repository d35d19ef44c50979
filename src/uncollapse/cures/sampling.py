"""ContraNorm's mean from a random sample of the keys."""

import torch
from torch import Tensor

from uncollapse.pairwise import Pairs, all_pairs, by_query


def sampled_mean(
    unit: Tensor, value: Tensor, temperature: float | Tensor, mask: Tensor | None, pairs: Pairs, sample: int
) -> Tensor:
    """The softmax mean with the sums over other rows estimated from `sample` random real rows of each sequence.

    unit and value (..., n, d). All sequences are laid in one row of groups without their padding.
    """
    n, rows = unit.shape[-2], unit.shape[:-1].numel()
    sequences = torch.arange(rows // max(1, n), device=unit.device)
    group = pairs.row_group if pairs.row_group is not None else sequences.repeat_interleave(n)
    excluded = pairs.excluded
    if excluded is not None:
        excluded = (excluded[:, None] + n * sequences[:, None]).reshape(2, -1)
    flat_unit, flat_value = unit.reshape(rows, -1), value.reshape(rows, -1)
    if mask is None:
        return _mean(flat_unit, flat_value, temperature, group, excluded, pairs.no_self, sample).reshape(value.shape)
    real = mask.expand(unit.shape[:-1]).reshape(-1).nonzero().squeeze(1)
    if excluded is not None:
        place = _places(real, rows)[excluded]
        excluded = place[:, (place >= 0).all(0)]
    mean = _mean(flat_unit[real], flat_value[real], temperature, group[real], excluded, pairs.no_self, sample)
    return torch.zeros_like(flat_value).index_copy(0, real, mean).reshape(value.shape)


def _mean(
    unit: Tensor,
    value: Tensor,
    temperature: float | Tensor,
    group: Tensor,
    excluded: Tensor | None,
    no_self: bool,
    sample: int,
) -> Tensor:
    """For rows (n, d) in ascending groups; the row's own term is not left to chance."""
    chosen = _choose(group, sample)
    place = _places(chosen, len(unit))
    absent = torch.stack([chosen, place[chosen]])  # a sampled key is not its own query
    if excluded is not None:
        i, j = excluded[0], place[excluded[1]]
        absent = torch.cat([absent, torch.stack([i, j])[:, j >= 0]], 1)
    few = Pairs(excluded=by_query(absent), mirrored=False, row_group=group, key_group=group[chosen])
    mean, log_sum = all_pairs(unit, unit[chosen], value[chosen], temperature, few)
    if no_self:
        return mean
    others = _count(group, group) - 1
    taken = _count(group[chosen], group) - (place >= 0).to(others.dtype)
    log_sum = log_sum + (others.clamp(min=1) / taken.clamp(min=1)).log()  # as if all others had been summed
    own = torch.sigmoid(unit.square().sum(-1) / temperature - log_sum).unsqueeze(-1)  # (n, 1): the row's own weight
    return own * value + (1 - own) * mean


def _choose(group: Tensor, sample: int) -> Tensor:
    """Positions of so many random rows of each group, ascending."""
    order = torch.randperm(len(group), device=group.device)
    order = order[group[order].argsort(stable=True)]  # groups in order, random within each
    rank = torch.arange(len(group), device=group.device) - torch.searchsorted(group, group)
    return order[rank < sample].sort().values


def _places(chosen: Tensor, n: int) -> Tensor:
    """For each of n positions its place among the chosen ones, or −1."""
    places = torch.full((n,), -1, device=chosen.device)
    return places.scatter_(0, chosen, torch.arange(len(chosen), device=chosen.device))


def _count(members: Tensor, group: Tensor) -> Tensor:
    """For each row of `group` how many of the ascending `members` share its group."""
    return torch.searchsorted(members, group, right=True) - torch.searchsorted(members, group)
