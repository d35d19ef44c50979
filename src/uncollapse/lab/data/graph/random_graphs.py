"""Draw random graphs with classes: a contextual stochastic block model, and a graph shaped like ogbn-arxiv."""

import torch
from torch import Tensor

from uncollapse.errors import UsageError


def csbm(
    nodes: int = 600,
    classes: int = 3,
    *,
    degree: float = 8.0,
    homophily: float = 0.7,
    features: int = 32,
    signal: float = 1.5,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a graph: features (nodes, features), edges (2, E) in one direction, and classes (nodes,).

    Classes have the same size, within one node. Nodes have `degree` edges on average, a share of `homophily` of them
    within their class; a few are self-loops or duplicates. Features are x = μ_y + ε, with standard normal ε and a mean
    μ of length `signal` for each class, in a random direction. Time and memory are linear in nodes and edges.

    With the defaults and 20 labels per class, features alone give about 70 % accuracy, with those of neighbors 90 %. A
    plain GCN is best with two or four layers, and at chance with sixteen.

    Deshpande et al., Contextual stochastic block models (NeurIPS 2018), for any number of classes.

    >>> x, edges, y = csbm(1000, 4, degree=6)
    >>> x.shape, edges.shape, y.bincount()
    (torch.Size([1000, 32]), torch.Size([2, 3000]), tensor([250, 250, 250, 250]))
    """
    _check("csbm", nodes, classes, degree, homophily, features)
    random = torch.Generator().manual_seed(seed)
    x, y = _features(nodes, classes, features, signal, random)
    start, goal = _citing(y, classes, degree, homophily, random)
    return x, torch.stack([start, _members(y, goal, random)]), y


def arxiv_like(
    nodes: int = 2000,
    classes: int = 40,
    *,
    degree: float = 2 * 1_166_243 / 169_343,
    homophily: float = 0.65,
    features: int = 128,
    signal: float = 1.0,
    tail: float = 2.5,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a citation graph shaped like ogbn-arxiv: features (nodes, features), edges (2, E), and classes (nodes,).

    The mean degree, the number of classes and that of features are ogbn-arxiv's (169,343 nodes, 1,166,243 edges, 40
    classes, 128 features). Edges go from the citing to the cited paper. All papers cite equally often on average, and
    they are cited in proportion to a popularity w with density ∝ (1 + w)^−tail: in-degrees have a power-law tail with
    that exponent, many papers are never cited, and the largest in-degree grows as nodes^(1/(tail − 1)). The exponent,
    the homophily and the signal are assumptions, not measured on ogbn-arxiv. Otherwise it is `csbm`. Time and memory
    are linear in nodes and edges, up to a logarithm.

    >>> x, edges, y = arxiv_like(4000)
    >>> x.shape, edges.shape, y.bincount().unique()
    (torch.Size([4000, 128]), torch.Size([2, 27547]), tensor([100]))
    """
    _check("arxiv_like", nodes, classes, degree, homophily, features)
    if not 2.0 < tail < float("inf"):
        raise UsageError(f"arxiv_like needs a tail above 2, so that citations have a mean, got {tail}.")
    random = torch.Generator().manual_seed(seed)
    x, y = _features(nodes, classes, features, signal, random)
    start, goal = _citing(y, classes, degree, homophily, random)
    uniform = 1.0 - torch.rand(nodes, generator=random, dtype=torch.float64)  # above 0
    popularity = uniform.pow(-1.0 / (tail - 1.0)) - 1.0
    return x, torch.stack([start, _popular_members(y, goal, popularity, random)]), y


def _features(nodes: int, classes: int, features: int, signal: float, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return features (nodes, features) around the mean of their class, and classes (nodes,) of equal size."""
    y = (torch.arange(nodes) % classes)[torch.randperm(nodes, generator=random)]
    means = torch.nn.functional.normalize(torch.randn(classes, features, generator=random), dim=1) * signal
    return torch.randn(nodes, features, generator=random).add_(means[y]), y


def _citing(y: Tensor, classes: int, degree: float, homophily: float, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the start of each edge, and the class of its end."""
    start = torch.randint(len(y), (round(len(y) * degree / 2),), generator=random)
    inside = torch.rand(len(start), generator=random) < homophily
    step = torch.randint(1, max(2, classes), (len(start),), generator=random)
    return start, torch.where(inside, y[start], (y[start] + step) % classes)


def _members(y: Tensor, goal: Tensor, random: torch.Generator) -> Tensor:
    """Return a random node of each wanted class."""
    order = y.argsort(stable=True)  # nodes of class 0, then of class 1, and so on
    counts = y.bincount()
    place = (torch.rand(len(goal), generator=random, dtype=torch.float64) * counts[goal]).long()
    return order[(counts.cumsum(0) - counts)[goal] + place]


def _popular_members(y: Tensor, goal: Tensor, popularity: Tensor, random: torch.Generator) -> Tensor:
    """Return a random node of each wanted class, in proportion to its popularity."""
    order = y.argsort(stable=True)
    last = y.bincount().cumsum(0) - 1  # of each class, in that order
    upto = popularity[order].cumsum(0)
    below = torch.cat([upto.new_zeros(1), upto[last[:-1]]])
    drawn = torch.rand(len(goal), generator=random, dtype=torch.float64) * (upto[last] - below)[goal] + below[goal]
    first = torch.cat([last.new_zeros(1), last[:-1] + 1])
    return order[torch.searchsorted(upto, drawn, right=True).clamp(first[goal], last[goal])]


def _check(name: str, nodes: int, classes: int, degree: float, homophily: float, features: int) -> None:
    if not 1 <= classes <= nodes or features < 1:
        raise UsageError(
            f"{name} needs at least one feature, one class and a node for each class, got {features} features, "
            f"{classes} classes and {nodes} nodes."
        )
    if not 0.0 <= homophily <= 1.0 or not 0.0 <= degree < float("inf"):
        raise UsageError(
            f"{name} needs a homophily between 0 and 1 and a degree of 0 or more, got {homophily}, {degree}."
        )
