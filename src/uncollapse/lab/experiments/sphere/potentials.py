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
from torch import Tensor

from uncollapse.lab.config.fields import config_field, set_fields
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments import recipe_data
from uncollapse.lab.experiments.sphere import point_sets
from uncollapse.lab.experiments.training_run import with_threads
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs.results import build_record, round_metrics
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
    free: int = config_field(100, "Points of the regular set and of the optimised one.", minimum=2)
    steps: int = config_field(200, "Steps of L-BFGS for the optimised sets.", minimum=1)
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
    runtime.report_stage("optimising small sets")
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
    """Return the point sets by name. The optimised one starts as a cluster; not all numbers have a regular one."""
    corners = point_sets.simplex(config.dim + 1, config.dim)
    sets = {
        "uniform": point_sets.uniform_points(config.points, config.dim, generator),
        "half": point_sets.half_sphere(config.points, config.dim, generator),
        "clusters": point_sets.clustered_points(config.points, corners, generator),
        "cluster": point_sets.clustered_points(config.points, corners[:1], generator),
        "optimised": _optimise_cluster(config, config.free, generator),
    }
    regular = point_sets.regular_points(config.free, config.dim)
    return sets if regular is None else sets | {"regular": regular}


def _optimise_cluster(config: Config, count: int, generator: torch.Generator) -> Tensor:
    """Return points that start as a cluster and minimise the potential."""
    centre = point_sets.simplex(2, config.dim)[:1]
    cluster = point_sets.clustered_points(count, centre, generator)
    return point_sets.optimise_points(cluster, config.t, config.steps)


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
    """Measure a small set that minimises the potential, and the regular set where it is known."""
    regular = point_sets.regular_points(count, config.dim)
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
        points = point_sets.uniform_points(size * count, config.dim, generator).reshape(size, count, -1)
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
    title="The mean Gaussian potential of point sets on the sphere, beside its optimum",
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
