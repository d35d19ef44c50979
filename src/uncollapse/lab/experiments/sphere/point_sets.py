"""Points on the unit sphere in R^m: at random, in clusters, on one half, regular, and spread by minimising the loss.

Each set is (n, m) in float64, with rows of length one.
"""

import math

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from uncollapse.errors import UsageError
from uncollapse.losses.align_uniform import uniform_loss

SPREAD = 0.2  # of a cluster: deviation of its points from the centre along each axis, before they are put on the sphere


def uniform_points(n: int, dim: int, generator: Generator) -> Tensor:
    """Points drawn evenly from the whole sphere."""
    return F.normalize(_gaussian(n, dim, generator), dim=-1)


def half_sphere(n: int, dim: int, generator: Generator) -> Tensor:
    """Points drawn evenly from the half on which the last coordinate is not negative."""
    points = uniform_points(n, dim, generator)
    points[:, -1].abs_()
    return points


def clustered_points(n: int, centres: Tensor, generator: Generator, spread: float = SPREAD) -> Tensor:
    """Points around centres (k, m), as many at each as at the others, or one more: much like von Mises's."""
    near = centres[torch.arange(n) % len(centres)]
    return F.normalize(near + spread * _gaussian(n, centres.shape[-1], generator), dim=-1)


def regular_points(n: int, dim: int) -> Tensor | None:
    """Points as far from each other as they can be; None where no such set is known to this function.

    On the circle the regular polygon. Elsewhere the simplex up to m + 1 points and the cross-polytope (the octahedron
    in space) for 2m; in space the icosahedron for 12, and the Fibonacci lattice for other numbers. All but the lattice
    are the best that there are, for every potential that falls as a Gaussian does (Cohn & Kumar 2007).
    """
    if n < 2:
        raise UsageError(f"A regular set has two points or more, got {n}.")
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
    """The corners of the regular n-gon on the circle."""
    angles = torch.arange(n, dtype=torch.float64) * (2 * math.pi / n)
    return torch.stack([angles.cos(), angles.sin()], -1)


def simplex(n: int, dim: int) -> Tensor:
    """The corners of the regular simplex: n points in R^m, n ≤ m + 1, with cosine −1/(n − 1) between any two."""
    if not 2 <= n <= dim + 1:
        raise UsageError(f"A simplex in {dim} dimensions has 2 to {dim + 1} corners, got {n}.")
    # the centred unit vectors of R^n, in a basis of the n − 1 dimensions that they span
    axes = torch.linalg.svd(torch.eye(n, dtype=torch.float64) - 1 / n).Vh[: n - 1]
    return F.normalize(F.pad(axes.T, (0, dim - n + 1)), dim=-1)


def icosahedron() -> Tensor:
    """Its 12 corners: (0, ±1, ±φ) with φ the golden ratio, and their cyclic shifts, on the unit sphere."""
    golden = (1 + math.sqrt(5)) / 2
    flat = [(0.0, one, phi) for one in (-1.0, 1.0) for phi in (-golden, golden)]
    corners = torch.tensor(flat, dtype=torch.float64)
    return F.normalize(torch.cat([corners.roll(shift, 1) for shift in range(3)]), dim=-1)


def fibonacci(n: int) -> Tensor:
    """A lattice on the sphere in space: points at even heights, each turned by the golden angle from the last."""
    at = torch.arange(n, dtype=torch.float64)
    height = 1 - (2 * at + 1) / n
    angle = at * (math.pi * (3 - math.sqrt(5)))
    radius = (1 - height.square()).sqrt()
    return torch.stack([radius * angle.cos(), radius * angle.sin(), height], -1)


def optimise_points(start: Tensor, t: float, steps: int) -> Tensor:
    """Free points after so many steps of L-BFGS on `uc.uniform_loss`, pairs of a point with itself left out."""
    points = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [points], max_iter=steps, tolerance_grad=1e-10, tolerance_change=1e-13, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = uniform_loss(points, t)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    return F.normalize(points.detach(), dim=-1)


def _gaussian(n: int, dim: int, generator: Generator) -> Tensor:
    return torch.randn(n, dim, generator=generator, dtype=torch.float64)
