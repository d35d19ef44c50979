"""Point sets on the unit sphere in R^m: random, clustered, on one half, regular, and optimised.

Each set is (n, m) in float64, with rows of length one.
"""

import math

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from uncollapse.errors import UsageError
from uncollapse.losses.align_uniform import uniform_loss

SPREAD = 0.2  # of a cluster: deviation of its points from the centre per axis, before they are projected to the sphere


def uniform_points(n: int, dim: int, generator: Generator) -> Tensor:
    """Return points drawn uniformly from the whole sphere."""
    return F.normalize(_gaussian(n, dim, generator), dim=-1)


def half_sphere(n: int, dim: int, generator: Generator) -> Tensor:
    """Return points drawn uniformly from the half where the last coordinate is not negative."""
    points = uniform_points(n, dim, generator)
    points[:, -1].abs_()
    return points


def clustered_points(n: int, centres: Tensor, generator: Generator, spread: float = SPREAD) -> Tensor:
    """Return points around centres (k, m), equally many at each within one: similar to von Mises clusters."""
    near = centres[torch.arange(n) % len(centres)]
    return F.normalize(near + spread * _gaussian(n, centres.shape[-1], generator), dim=-1)


def regular_points(n: int, dim: int) -> Tensor | None:
    """Return points as far from each other as possible; None where this function knows no such set.

    On the circle it is the regular polygon. Elsewhere it is the simplex for up to m + 1 points and the cross-polytope
    (in R³ the octahedron) for 2m. In R³ it is the icosahedron for 12 points, and the Fibonacci lattice for other
    numbers. All but the lattice are optimal for every potential that falls as a Gaussian does (Cohn & Kumar 2007).
    """
    if n < 2:
        raise UsageError(f"A regular set needs at least two points, got {n}.")
    if dim == 2:
        return polygon(n)
    if n <= dim + 1:
        return simplex(n, dim)
    if n == 2 * dim:
        return torch.cat([torch.eye(dim, dtype=torch.float64), -torch.eye(dim, dtype=torch.float64)])
    if dim != 3:
        return None
    return icosahedron() if n == 12 else fibonacci(n)


def polygon(n: int) -> Tensor:
    """Return the corners of the regular n-gon on the circle."""
    angles = torch.arange(n, dtype=torch.float64) * (2 * math.pi / n)
    return torch.stack([angles.cos(), angles.sin()], -1)


def simplex(n: int, dim: int) -> Tensor:
    """Return the corners of the regular simplex: n ≤ m + 1 points in R^m, with cosine −1/(n − 1) between any two."""
    if not 2 <= n <= dim + 1:
        raise UsageError(f"A simplex in {dim} dimensions has 2 to {dim + 1} corners, got {n}.")
    # the centred standard basis of R^n, in coordinates of the n − 1 dimensions that it spans
    axes = torch.linalg.svd(torch.eye(n, dtype=torch.float64) - 1 / n).Vh[: n - 1]
    return F.normalize(F.pad(axes.T, (0, dim - n + 1)), dim=-1)


def icosahedron() -> Tensor:
    """Return the 12 corners (0, ±1, ±φ), with φ the golden ratio, and their cyclic shifts, on the unit sphere."""
    golden = (1 + math.sqrt(5)) / 2
    flat = [(0.0, one, phi) for one in (-1.0, 1.0) for phi in (-golden, golden)]
    corners = torch.tensor(flat, dtype=torch.float64)
    return F.normalize(torch.cat([corners.roll(shift, 1) for shift in range(3)]), dim=-1)


def fibonacci(n: int) -> Tensor:
    """Return a lattice on the sphere in R³: points at even heights, each turned by the golden angle from the last."""
    at = torch.arange(n, dtype=torch.float64)
    height = 1 - (2 * at + 1) / n
    angle = at * (math.pi * (3 - math.sqrt(5)))
    radius = (1 - height.square()).sqrt()
    return torch.stack([radius * angle.cos(), radius * angle.sin(), height], -1)


def optimise_points(start: Tensor, t: float, steps: int) -> Tensor:
    """Return points after `steps` steps of L-BFGS on `uc.uniform_loss`, without the pairs of a point with itself."""
    points = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [points], max_iter=steps, tolerance_grad=1e-10, tolerance_change=1e-13, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = uniform_loss(points, t)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return F.normalize(points.detach(), dim=-1)


def _gaussian(n: int, dim: int, generator: Generator) -> Tensor:
    return torch.randn(n, dim, generator=generator, dtype=torch.float64)
