"""Recipe potentials: the mean Gaussian potential of points on a sphere, compared with its minimum.

Wang & Isola (arXiv 2005.10242) show that it is least for evenly spread points, and plot it for points on the circle.
The recipe also measures two estimators of it on samples of all sizes.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from uncollapse.errors import UsageError
from uncollapse.lab.config.fields import config_field, set_fields
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments import recipe_data
from uncollapse.lab.experiments.training_run import with_threads
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs.results import build_record, round_metrics
from uncollapse.losses.align_uniform import uniform_loss
from uncollapse.metrics.hypersphere import PAPER, uniformity, uniformity_optimum

NAME = "potentials"
COUNTS = (2, 3, 4, 6, 8, 12, 16, 32, 64, 100)  # sizes of the small sets, regular and optimised
SHOWN = 500  # points per set that are stored for plots
BINS = 72  # of angles, on the circle
PAIRS = 2**29  # in all samples of one size: large samples are drawn less often
BATCH = 2**22  # pairs that are measured at a time


@dataclass(frozen=True)
class Config:
    """Configuration of a run, which measures all point sets in one space."""

    dim: int = config_field(2, "Dimension of the space: 2 for the circle, 3 for the sphere.", minimum=2)
    t: float = config_field(2.0, "Sharpness of the potential exp(−t·‖x − y‖²).", minimum=1e-3)
    points: int = config_field(10_000, "Points of the random sets.", minimum=2)
    free: int = config_field(100, "Points of the regular set and of the optimized one.", minimum=2)
    steps: int = config_field(200, "Steps of L-BFGS for the optimized sets.", minimum=1)
    draws: int = config_field(2000, "Samples per size, at most, that measure the bias of the estimators.", minimum=2)
    largest: int = config_field(
        4096, "Points of the largest of these samples; their sizes are the powers of two up to it.", minimum=2
    )
    seed: int = config_field(0, "Seed of all points.", minimum=0, maximum=2**31)

    def __post_init__(self) -> None:
        set_fields(self, largest=1 << (self.largest.bit_length() - 1))  # sizes are powers of two


@with_threads
def run(config: Config, runtime: Runtime) -> dict[str, Any]:
    """Measure all point sets. Return the record of the run."""
    began = time.perf_counter()
    generator = torch.Generator().manual_seed(config.seed)
    runtime.report_stage("measuring the point sets")
    sets = {name: describe_set(points, config.t) for name, points in make_sets(config, generator).items()}
    runtime.report_stage("optimizing small sets")
    few = [_measure_few(config, count, generator) for count in COUNTS]
    runtime.report_stage("drawing samples of all sizes")
    estimators = list(measure_estimators(config, generator))
    metrics = {"optimum": uniformity_optimum(config.dim, config.t)}
    metrics |= {name: facts["log"] for name, facts in sets.items()}
    seconds = time.perf_counter() - began
    return build_record(
        NAME, config, seconds, (), figures=round_metrics(metrics), sets=sets, few=few, estimators=estimators
    )


def make_sets(config: Config, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the point sets by name. The optimized one starts as a cluster; not all numbers have a regular one."""
    corners = simplex(config.dim + 1, config.dim)
    sets = {
        "uniform": uniform_points(config.points, config.dim, generator),
        "half": half_sphere(config.points, config.dim, generator),
        "clusters": clustered_points(config.points, corners, generator),
        "cluster": clustered_points(config.points, corners[:1], generator),
        "optimised": _optimise_cluster(config, config.free, generator),
    }
    regular = regular_points(config.free, config.dim)
    return sets if regular is None else sets | {"regular": regular}


def _optimise_cluster(config: Config, count: int, generator: torch.Generator) -> Tensor:
    """Return points that start as a cluster and minimize the potential."""
    centre = simplex(2, config.dim)[:1]
    cluster = clustered_points(count, centre, generator)
    return optimise_points(cluster, config.t, config.steps)


def measure_potential(points: Tensor, t: float) -> dict[str, float]:
    """Return the mean potential and its logarithm, without and with the pairs of a point with itself."""
    log, log_self = (float(uniformity(points, t, exclude_self=exclude)) for exclude in (True, False))
    return round_metrics(
        {"potential": math.exp(log), "log": log, "potential_self": math.exp(log_self), "log_self": log_self}
    )


def describe_set(points: Tensor, t: float) -> dict[str, Any]:
    """Return what the record has of a set: its potential, points for a plot and, on the circle, counts of angles."""
    # evenly, and not with a whole step: every fourth point may be of the same cluster
    shown = points[torch.linspace(0, len(points) - 1, min(len(points), SHOWN)).long()]
    facts = {
        "n": len(points),
        **measure_potential(points, t),
        "points": [[round(v, 4) for v in row] for row in shown.tolist()],
    }
    if points.shape[1] == 2:
        angles = torch.atan2(points[:, 1], points[:, 0])
        facts["angles"] = torch.histc(angles, BINS, -math.pi, math.pi).int().tolist()
    return facts


def _measure_few(config: Config, count: int, generator: torch.Generator) -> dict[str, Any]:
    """Measure a small set that minimizes the potential, and the regular set where it is known."""
    regular = regular_points(count, config.dim)
    free = measure_potential(_optimise_cluster(config, count, generator), config.t)
    known = {} if regular is None else {"regular": measure_potential(regular, config.t)}
    return {"n": count, "optimised": free} | known


def measure_estimators(config: Config, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    """Yield the mean and the deviation of both estimators on samples of 2, 4, 8 … uniform points.

    Without self pairs the mean potential is unbiased, and its logarithm is below the optimum on average. With them it
    is the weighted mean of the other estimator and of 1, which has the weight 1/n.
    """
    for count in (2**power for power in range(1, config.largest.bit_length())):
        draws = max(2, min(config.draws, PAIRS // count**2))
        without = torch.cat(list(_samples(config, count, draws, generator)))
        both = {"without": without, "with": with_self(without, count)}
        stats = {
            name: round_metrics({"mean": float(logs.mean()), "std": float(logs.std()), "least": float(logs.min())})
            for name, logs in both.items()
        }
        yield {"n": count, "draws": draws, **stats}


def _samples(config: Config, count: int, draws: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the logarithm of the mean potential without self pairs, for `draws` samples in blocks."""
    at_once = max(1, BATCH // count**2)
    for begin in range(0, draws, at_once):
        size = min(at_once, draws - begin)
        points = uniform_points(size * count, config.dim, generator).reshape(size, count, -1)
        yield uniformity(points, config.t)


def with_self(logs: Tensor, count: int) -> Tensor:
    """Return L⁽¹⁾, with self pairs, from L⁽²⁾ without: log(((n − 1)·e^{L⁽²⁾} + 1) / n)."""
    return torch.log1p((count - 1) * logs.exp()) - math.log(count)


def name_of(config: Config) -> str:
    """Return the readable part of a run's file names."""
    return f"m{config.dim}-t{config.t:g}-seed{config.seed}"


def cost(config: Config) -> float:
    """Return an estimate of a run's seconds on one core."""
    sizes = config.largest.bit_length() - 1
    samples = min(sizes * PAIRS, config.draws * 4 / 3 * config.largest**2)
    return 5 + 0.12 * config.steps + (samples + 8 * config.points**2) / 2e8


DATA = recipe_data.read(__package__, Config, prefix="potentials_")
RECIPE = Recipe(
    name=NAME,
    title="The mean Gaussian potential of point sets on the sphere, next to its optimum",
    paper=PAPER,
    config=Config,
    run=run,
    name_of=name_of,
    cost=cost,
    tables=DATA.tables,
    grids=DATA.grids,
    quick=DATA.quick,
    single_process=True,  # nothing is trained in batches
)


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
