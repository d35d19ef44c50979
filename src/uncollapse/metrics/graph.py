"""Metrics of how far the nodes of a graph have been smoothed into each other. All are computed in float64."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from uncollapse.pairwise import all_ranks, check_pairs, numerics
from uncollapse.registry import metric

EDGES = 1 << 16  # edges whose differences are computed at once
TILE = 1 << 20  # distances that are computed at once

ENERGY = "A Note on Over-Smoothing for Graph Neural Networks, arXiv 2006.13318"
MAD = "Measuring and Relieving the Over-smoothing Problem for Graph Neural Networks, arXiv 1909.03211"
DGN = "Towards Deeper Graph Neural Networks with Differentiable Group Normalization, arXiv 2006.06972"


@metric(needs=("tokens", "edges"), better="higher", bounds=(0, None), paper=ENERGY)
def dirichlet_energy(
    x: Tensor, edge_index: Tensor, *, normalize: Literal["degree", "norm"] | None = "degree"
) -> Tensor:
    """Return the sum of squared differences along edges, each undirected edge once.

        "degree":  (1/n) Σ_{(i,j)} ‖x_i/√(1+d_i) − x_j/√(1+d_j)‖²
        None:      (1/n) Σ_{(i,j)} ‖x_i − x_j‖²
        "norm":    Σ_{(i,j)} ‖x_i − x_j‖² / ‖X‖_F² = tr(XᵀLX)/‖X‖_F²

    Cai & Wang, arXiv 2006.13318. Edges count once, whether `edge_index` holds one direction or both, and self-loops do
    not count; d_i is the number of neighbors.

    Args:
        x: nodes (n, d).
        edge_index: (2, E) integers.
        normalize: see above; only "norm" is independent of the scale of x.

    Returns:
        A scalar, in float32 or float64; 0 without edges, and for x = 0.

    >>> import torch
    >>> dirichlet_energy(torch.tensor([[1.0], [3.0]]), torch.tensor([[0, 1], [1, 0]]), normalize=None)
    tensor(2.)
    """
    if normalize not in ("degree", "norm", None):
        raise ValueError(f'normalize must be "degree", "norm" or None, got {normalize!r}.')
    nodes, edges = _graph(x, edge_index)
    size = float(max(1, len(nodes)))
    if normalize == "degree":
        nodes = nodes * (1 + _degrees(edges, len(nodes))).rsqrt()[:, None]
    energy = sum((_squared_differences(nodes, part) for part in _edge_chunks(edges)), nodes.new_zeros(()))
    if normalize == "norm":
        squared = nodes.square().sum()
        return (energy / torch.where(squared > 0, squared, 1)).to(numerics.full_dtype(x))
    return (energy / size).to(numerics.full_dtype(x))


@metric(needs=("tokens", "edges"), better="higher", bounds=(0, 2), paper=MAD)
def mean_average_distance(x: Tensor, edge_index: Tensor) -> Tensor:
    """Return the mean cosine distance of a node to its neighbors, averaged over the nodes that have any.

        mean_i (1/d_i) Σ_{j ∈ N(i)} (1 − cos(x_i, x_j))

    MAD of Chen et al., arXiv 1909.03211, over neighbors. Edges count in both directions, self-loops do not count.

    Args:
        x: nodes (n, d).
        edge_index: (2, E) integers.

    Returns:
        A scalar, in float32 or float64; 0 without edges. A zero node has cosine 0, so distance 1, to every other.

    >>> import torch
    >>> mean_average_distance(torch.eye(2), torch.tensor([[0], [1]]))
    tensor(1.)
    """
    nodes, edges = _graph(x, edge_index)
    unit, degrees = numerics.unit_rows(nodes), _degrees(edges, len(nodes))
    total = nodes.new_zeros(())
    for i, j in _edge_chunks(edges):
        share = 1 / degrees[i] + 1 / degrees[j]  # an edge counts at both of its ends
        total = total + (share * (1 - (unit[i] * unit[j]).sum(-1))).sum()
    return (total / (degrees > 0).sum().clamp(min=1)).to(numerics.full_dtype(x))


@metric(needs=("tokens", "labels"), better="higher", bounds=(0, None), paper=DGN)
def group_distance_ratio(x: Tensor, labels: Tensor, *, gather: bool = False) -> Tensor:
    """Return the mean distance between classes over the mean distance within classes.

        mean_{a<b} D_ab / mean_a D_aa,   D_ab = mean of ‖x_i − x_j‖ over i ∈ a, j ∈ b, i ≠ j

    Zhou et al., arXiv 2006.06972; the inner mean is over pairs of different nodes. Near 1 the classes cannot be
    distinguished. Memory is linear in n.

    Args:
        x: nodes (n, d).
        labels: (n,) integers with at least two classes, one of them with at least two nodes. Classes of a single node
            have no distance within and do not enter the lower mean.
        gather: take the rows (n, d) of all processes as one set; every process gets the value, without a gradient.

    Returns:
        A scalar, in float32 or float64. If all distances within classes are 0 it is inf, and 0 if those between them
        are 0 too.

    >>> import torch
    >>> group_distance_ratio(torch.tensor([[0.0], [1.0], [4.0], [5.0]]), torch.tensor([0, 0, 1, 1]))
    tensor(4.)
    """
    all_ranks.check_one_set(x, gather)
    nodes = _nodes(x)
    group, sizes = _number_classes(labels, len(nodes), gather)
    between, within = nodes.new_zeros(()), nodes.new_zeros(())
    for rows in _tiles(nodes, nodes):
        inputs = nodes[rows], group[rows], nodes, group, sizes
        sums = checkpoint(_distance_sums, *inputs, use_reentrant=False, preserve_rng_state=False)
        within, between = within + sums[0], between + sums[1]
    if all_ranks.spans_ranks(gather):
        within, between = _sums_over_ranks(nodes, group, sizes, within.detach(), between.detach())
    within, between = within / (sizes > 1).sum(), between / (len(sizes) * (len(sizes) - 1))
    apart = torch.where(between > 0, math.inf, 0.0)
    return torch.where(within > 0, between / torch.where(within > 0, within, 1), apart).to(numerics.full_dtype(x))


def _tiles(nodes: Tensor, others: Tensor) -> Iterator[slice]:
    """Yield slices of the nodes whose distances to the others fit in a tile."""
    height = max(1, TILE // max(1, len(others)))
    return (slice(start, start + height) for start in range(0, len(nodes), height))


def _sums_over_ranks(
    nodes: Tensor, group: Tensor, sizes: Tensor, within: Tensor, between: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `_distance_sums` over all processes, given those of the pairs within this one."""
    with torch.no_grad():
        others, their_group = all_ranks.other_rows(nodes), all_ranks.other_rows(group)
        for rows in _tiles(nodes, others):
            sums = _distance_sums(nodes[rows], group[rows], others, their_group, sizes)
            within, between = within + sums[0], between + sums[1]
        return all_ranks.total(within), all_ranks.total(between)


def _distance_sums(
    nodes: Tensor, group: Tensor, others: Tensor, their_group: Tensor, sizes: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what nodes add to Σ_a D_aa and Σ_{a≠b} D_ab: each distance over the number of pairs of its two classes."""
    distance = torch.cdist(nodes, others, compute_mode="donot_use_mm_for_euclid_dist")
    same, size, their_size = group[:, None] == their_group, sizes[group].double(), sizes[their_group].double()
    pairs_within = (size * (size - 1)).clamp(min=1)  # 0 for a class of one node, which has no distance within
    within = ((distance * same).sum(-1) / pairs_within).sum()
    between = ((distance.masked_fill(same, 0) / their_size).sum(-1) / size).sum()
    return within, between


def _number_classes(labels: Tensor, n: int, gather: bool) -> tuple[Tensor, Tensor]:
    """Return the class of each node, counted from 0, and the size of each class over all processes."""
    if labels.shape != (n,) or labels.is_floating_point() or labels.is_complex():
        raise ValueError(f"labels must be integers of shape ({n},), got {labels.dtype} of shape {tuple(labels.shape)}.")
    names, group, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
    if all_ranks.spans_ranks(gather):
        counts: Counter[int] = Counter()
        for some, sizes_there in all_ranks.gather_objects((names.tolist(), sizes.tolist())):
            counts.update(dict(zip(some, sizes_there, strict=True)))
        place = {name: number for number, name in enumerate(sorted(counts))}
        group = torch.tensor([place[name] for name in names.tolist()], device=labels.device, dtype=torch.int64)[group]
        sizes = torch.tensor([counts[name] for name in place], device=labels.device)
    if len(sizes) < 2 or int(sizes.max()) < 2:
        raise ValueError(
            f"labels must have at least two classes, one of them with at least two nodes, got {len(sizes)} classes of "
            f"{int(sizes.sum())} nodes: there is no distance within or between classes to compare."
        )
    return group, sizes


def _nodes(x: Tensor) -> Tensor:
    """Check x and return it in float64."""
    if x.dim() != 2:
        raise ValueError(f"x must have shape (n, d), the nodes of one graph, got {tuple(x.shape)}.")
    return numerics.prepare_tokens(x, None).double()


def _graph(x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
    """Check x and return it in float64, with each undirected edge once and without self-loops (2, E)."""
    nodes, n = _nodes(x), len(x)
    edges = check_pairs(edge_index, n, n, "edge_index")
    low, high = edges.amin(0), edges.amax(0)
    key = torch.unique((low * n + high)[low != high])
    return nodes, torch.stack([key // max(1, n), key % max(1, n)])


def _edge_chunks(edges: Tensor) -> Iterator[Tensor]:
    return (edges[:, start : start + EDGES] for start in range(0, edges.shape[1], EDGES))


def _degrees(edges: Tensor, n: int) -> Tensor:
    return torch.bincount(edges.flatten(), minlength=n).double()


def _squared_differences(nodes: Tensor, edges: Tensor) -> Tensor:
    return (nodes[edges[0]] - nodes[edges[1]]).square().sum()
