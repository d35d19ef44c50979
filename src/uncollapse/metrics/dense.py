"""Metrics of dense features, the patches of images: their structure, and its drift from an earlier checkpoint.

Dense tasks such as segmentation can get worse while a model still gets better at whole images. Ranks do not show it.
"""

import math

import torch
from torch import Tensor

from uncollapse.metrics.spectrum import gram_spectrum, rank_from_singular_values
from uncollapse.pairwise import all_ranks, numerics
from uncollapse.pairwise.pair_means import reduce_pairs
from uncollapse.registry import metric

DSE = "Exploring Structural Degradation in Dense Representations for Self-supervised Learning, arXiv 2510.17299"
DINOV3 = "DINOv3, arXiv 2508.10104"
STEPS, MOVED = 20, 1e-4  # of k-means: the most steps, and the movement of the centres that ends it; the authors'


@metric(needs=("patches",), better="higher", paper=DSE)
def dense_structure(
    x: Tensor, *, local_clusters: int = 3, global_clusters: int = 24, images: int = 8, rank: float = 1.0, seed: int = 0
) -> Tensor:
    """Return the dense representation structure estimator (DSE): separate clusters of patches, and many dimensions.

        M_inter − (M_image + M_group)/2 + λ M_dim

        M_inter   mean distance of a patch to the nearest centre of another cluster, in groups of images
        M_image   mean over clusters of the patches of an image of σ, M_group over those of groups of images
        M_dim     effective rank of one random patch of each image, over min(b, d); mean over the n draws

    with σ = Σ_k σ_k / √max(m − 1, d) of the m centered rows of a cluster, found by k-means. Dai et al., arXiv
    2510.17299, as in the authors' code: rows are divided by their norm, and the first three terms by the mean distance
    to the mean.

    Higher is better among checkpoints of one training run: the authors choose checkpoints for segmentation by it. They
    found that `rankme`, `alpha_req` and `lidar` correlate negatively with the results of dense tasks. It says nothing
    about whole images. Compare values only for the same images, clusters and seed.

    Args:
        x: patches (b, n, d) of b images, without class tokens.
        local_clusters: clusters per image.
        global_clusters: clusters per group of images.
        images: number of images in a group.
        rank: λ. The authors scale it by the standard deviations of both parts over the checkpoints; `rank=0` gives the
            first part alone.
        seed: of the first centres (k-means++) and of the draws.

    Returns:
        A scalar in float32 or float64; λ/min(b, d) for equal patches, 0 for zeros. Clusters get no gradient, distances
        and singular values do.

    >>> import torch
    >>> patches = torch.eye(3).repeat(4, 5, 1)  # each image has the same three kinds of patches
    >>> dense_structure(patches, global_clusters=3, rank=0.0)  # √2 apart, √(2/3) from the mean
    tensor(1.7321)
    """
    if x.dim() != 3 or 0 in x.shape:
        raise ValueError(f"x must have shape (b, n, d), the patches of at least one image, got {tuple(x.shape)}.")
    for name, value in (("local_clusters", local_clusters), ("global_clusters", global_clusters), ("images", images)):
        numerics.check_positive(value, name)
    rows = numerics.unit_rows(numerics.prepare_tokens(x, None).double())
    generator = torch.Generator(device=x.device).manual_seed(seed)
    alone = [_structure(image, local_clusters, generator) for image in rows]
    groups = [_structure(group.flatten(0, 1), global_clusters, generator) for group in torch.split(rows, images)]
    inter = torch.stack([distance for distance, _ in groups]).mean()
    intra = torch.stack([_mean(spreads, rows) for _, spreads in alone]).mean()
    intra = intra + _mean([spread for _, spreads in groups for spread in spreads], rows)
    scale = torch.linalg.vector_norm(rows - rows.mean((0, 1)), dim=-1).mean()
    separate = (inter - intra / 2) / torch.where(scale > 1e-9, scale, 1)  # rows have norm 1: the rest is rounding
    return (separate + rank * _dimensions(rows, generator)).to(numerics.full_dtype(x))


@metric(needs=("tokens", "pairs"), better=None, bounds=(0, 4), paper=DINOV3)
def gram_drift(x: Tensor, y: Tensor, *, mask: Tensor | None = None, gather: bool = False) -> Tensor:
    """Return how far the similarities of patches have moved from those of another checkpoint.

        mean over i, j of (cos(x_i, x_j) − cos(y_i, y_j))²

    The quantity that Gram anchoring holds small (DINOv3, arXiv 2508.10104), see `gram_anchor_loss`. A rotation of all
    features does not change it. Neither direction is better: early in training a model must drift from its start. Late
    in training drift can mean that dense features decay; the authors anchor to an earlier checkpoint for that reason.

    Args:
        x: patches (..., n, d) of this checkpoint.
        y: patches (..., n, d) of the same images in another; row i belongs to row i of x.
        mask: (..., n) bool, True = real.
        gather: take the rows (n, d) of all processes as one set; every process gets the value.

    Returns:
        (...), from 0 to 4, in float32 or float64; 0 without a real patch. A zero row has cosine 0 with all others.

    >>> import torch
    >>> gram_drift(torch.eye(2), torch.ones(2, 2))  # two of four similarities went from 1 to 0
    tensor(0.5000)
    """
    all_ranks.check_one_set(x, gather)
    numerics.check_pair(x, y, gather=gather)
    rows = [numerics.unit_rows(numerics.prepare_tokens(t, mask, name)) for t, name in ((x, "x"), (y, "y"))]
    count = all_ranks.total(numerics.real_count(rows[0], mask), gather)
    pairs = reduce_pairs(lambda now, then: (now - then).square(), *rows, gather=gather)
    selves = all_ranks.total((_lengths(rows[0]) - _lengths(rows[1])).square().sum(-1), gather)
    drift: Tensor = (2 * pairs + selves) / count.clamp(min=1).square()
    return drift


def _lengths(unit: Tensor) -> Tensor:
    """Return the squared lengths (..., n) of unit rows: 1, or 0 for zero rows."""
    return (unit.detach() != 0).any(-1).to(unit.dtype)


def _structure(x: Tensor, clusters: int, generator: torch.Generator) -> tuple[Tensor, list[Tensor]]:
    """Return the mean distance of rows (m, d) to the nearest other centre, and the spread of each cluster."""
    centers, label = cluster(x.detach(), clusters, generator)
    spreads = [_spread(x[label == k]) for k in torch.unique(label).tolist() if int((label == k).sum()) > 1]
    if len(centers) < 2:
        return 0 * x.sum(), spreads
    distance = torch.cdist(x, centers).scatter(1, label[:, None], torch.inf)
    return distance.amin(1).mean(), spreads


def _spread(x: Tensor) -> Tensor:
    """Return Σ_k σ_k / √max(m − 1, d) of the centered rows (m, d) of a cluster."""
    sigma = gram_spectrum(numerics.center(x, None))
    return sigma.sum() / math.sqrt(max(len(x) - 1, x.shape[-1]))


def _mean(values: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(values).mean() if values else like.new_zeros(())


def _dimensions(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return the effective rank over min(b, d) of sets of one patch of each image (b, n, d), mean over n sets."""
    order = torch.rand(x.shape[:2], generator=generator, device=x.device).argsort(1)
    drawn = x.gather(1, order[..., None].expand_as(x)).transpose(0, 1)  # (n, b, d)
    return rank_from_singular_values(gram_spectrum(drawn)).mean() / min(drawn.shape[1:])


def cluster(x: Tensor, clusters: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return centres (k, d) and labels (m,) of rows (m, d) by k-means, started by k-means++; k may be smaller."""
    centers = x[torch.randint(len(x), (1,), generator=generator, device=x.device)]
    for _ in range(min(clusters, len(x)) - 1):
        away = torch.cdist(x, centers).amin(1).square()
        if not bool((away > 1e-18).any()):  # fewer different rows than clusters
            break
        centers = torch.cat([centers, x[torch.multinomial(away, 1, generator=generator)]])
    for _ in range(STEPS):
        label = torch.cdist(x, centers).argmin(1)
        size = torch.bincount(label, minlength=len(centers))[:, None]
        means = torch.zeros_like(centers).index_add_(0, label, x) / size.clamp(min=1)
        before, centers = centers, torch.where(size > 0, means, centers)
        if float((centers - before).norm()) < MOVED:
            break
    return centers, torch.cdist(x, centers).argmin(1)
