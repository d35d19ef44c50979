"""The mean Gaussian potential of points on a sphere, beside the least that there can be, and how it is estimated.

Wang & Isola (arXiv 2005.10242) show that it is least for points spread evenly, and draw it for points on the circle.
"""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from uncollapse.lab.config.fields import config_field
from uncollapse.lab.engine.runtime import Runtime, use_threads
from uncollapse.lab.experiments.sphere import point_sets
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs.grids import Grid
from uncollapse.lab.runs.results import build_record, round_metrics
from uncollapse.lab.tables.paper_table import PaperTable
from uncollapse.metrics.hypersphere import PAPER as PAPER
from uncollapse.metrics.hypersphere import uniformity, uniformity_optimum

NAME = "potentials"
TITLE = "The mean Gaussian potential of point sets on the sphere, beside its optimum"
COUNTS = (2, 3, 4, 6, 8, 12, 16, 32, 64, 100)  # of few points, regular and optimised
SHOWN = 500  # points of a set that are kept for pictures
BINS = 72  # of angles, on the circle
PAIRS = 2**29  # of all draws of one size: large samples are drawn less often
BATCH = 2**22  # pairs measured at a time


@dataclass(frozen=True)
class Config:
    """A run: all point sets in one space."""

    dim: int = config_field(2, "Dimension of the space: 2 has the circle, 3 the sphere.", minimum=2)
    t: float = config_field(2.0, "Sharpness of the potential exp(−t·‖x − y‖²).", minimum=1e-3)
    points: int = config_field(10_000, "Points of the random sets.", minimum=2)
    free: int = config_field(100, "Points of the regular set and of the optimised one.", minimum=2)
    steps: int = config_field(200, "Steps of L-BFGS for the optimised sets.", minimum=1)
    draws: int = config_field(2000, "Samples of each size, at most, that show the bias of the estimators.", minimum=2)
    largest: int = config_field(
        4096, "Points of the largest of these samples; powers of two up to it are drawn.", minimum=2
    )
    seed: int = config_field(0, "Of all points.", minimum=0, maximum=2**31)

    def __post_init__(self) -> None:
        object.__setattr__(self, "largest", 1 << (self.largest.bit_length() - 1))  # only powers of two are drawn


def run(config: Config, runtime: Runtime | None = None) -> dict[str, Any]:
    """Measure all point sets, and give the record of the run."""
    runtime = runtime or Runtime()
    with use_threads(runtime.threads):
        began = time.perf_counter()
        generator = torch.Generator().manual_seed(config.seed)
        runtime.report_stage("measuring the point sets")
        found = {name: describe_set(points, config.t) for name, points in make_sets(config, generator).items()}
        runtime.report_stage("optimising few points")
        few = [_measure_few(config, count, generator) for count in COUNTS]
        runtime.report_stage("drawing samples of all sizes")
        estimates = list(measure_estimators(config, generator))
        figures = {"optimum": uniformity_optimum(config.dim, config.t)}
        figures |= {name: facts["log"] for name, facts in found.items()}
        seconds = time.perf_counter() - began
        return build_record(
            NAME, config, seconds, (), figures=round_metrics(figures), sets=found, few=few, estimators=estimates
        )


def make_sets(config: Config, generator: torch.Generator) -> dict[str, Tensor]:
    """The point sets by name. The optimised one begins as a cluster; a regular one is not known for all numbers."""
    corners = point_sets.simplex(config.dim + 1, config.dim)
    found = {
        "uniform": point_sets.uniform_points(config.points, config.dim, generator),
        "half": point_sets.half_sphere(config.points, config.dim, generator),
        "clusters": point_sets.clustered_points(config.points, corners, generator),
        "cluster": point_sets.clustered_points(config.points, corners[:1], generator),
        "optimised": _optimise_cluster(config, config.free, generator),
    }
    regular = point_sets.regular_points(config.free, config.dim)
    return found if regular is None else found | {"regular": regular}


def _optimise_cluster(config: Config, count: int, generator: torch.Generator) -> Tensor:
    """Points that began as a cluster."""
    centre = point_sets.simplex(2, config.dim)[:1]
    return point_sets.optimise_points(point_sets.clustered_points(count, centre, generator), config.t, config.steps)


def measure_potential(points: Tensor, t: float) -> dict[str, float]:
    """The mean potential and its logarithm, without and with the pairs of a point with itself."""
    log, log_self = (float(uniformity(points, t, exclude_self=exclude)) for exclude in (True, False))
    return round_metrics(
        {"potential": math.exp(log), "log": log, "potential_self": math.exp(log_self), "log_self": log_self}
    )


def describe_set(points: Tensor, t: float) -> dict[str, Any]:
    """What the record has of a set: its potential, enough points for a picture, and angles counted on the circle."""
    # evenly, and not by a whole step: every fourth point may be of the same cluster
    kept = points[torch.linspace(0, len(points) - 1, min(len(points), SHOWN)).long()]
    found = {
        "n": len(points),
        **measure_potential(points, t),
        "points": [[round(v, 4) for v in row] for row in kept.tolist()],
    }
    if points.shape[1] == 2:
        angles = torch.atan2(points[:, 1], points[:, 0])
        found["angles"] = torch.histc(angles, BINS, -math.pi, math.pi).int().tolist()
    return found


def _measure_few(config: Config, count: int, generator: torch.Generator) -> dict[str, Any]:
    """Few points: those that minimise the loss, beside the regular set where it is known."""
    regular = point_sets.regular_points(count, config.dim)
    free = measure_potential(_optimise_cluster(config, count, generator), config.t)
    return {"n": count, "optimised": free} | (
        {} if regular is None else {"regular": measure_potential(regular, config.t)}
    )


def measure_estimators(config: Config, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    """Both estimators on samples of 2, 4, 8 … points of the uniform distribution: their mean and deviation.

    Without self pairs the mean potential is unbiased, and its logarithm below the optimum on average. With them it is
    the mean of the other and of 1, with a weight of 1/n.
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
    """The logarithm of the mean potential without self pairs, of so many samples."""
    at_once = max(1, BATCH // count**2)
    for begin in range(0, draws, at_once):
        size = min(at_once, draws - begin)
        points = point_sets.uniform_points(size * count, config.dim, generator).reshape(size, count, -1)
        yield uniformity(points, config.t)


def with_self(logs: Tensor, count: int) -> Tensor:
    """L⁽¹⁾, with self pairs, from L⁽²⁾ without: log(((n − 1)·e^{L⁽²⁾} + 1) / n)."""
    return torch.log1p((count - 1) * logs.exp()) - math.log(count)


def name_of(config: Config) -> str:
    """What a run is called in the names of files."""
    return f"m{config.dim}-t{config.t:g}-seed{config.seed}"


def cost(config: Config) -> float:
    """Roughly the seconds of a run on one core."""
    sizes = config.largest.bit_length() - 1
    samples = min(sizes * PAIRS, config.draws * 4 / 3 * config.largest**2)
    return 5 + 0.12 * config.steps + (samples + 8 * config.points**2) / 2e8


def _board(title: str, figure: str) -> PaperTable:
    return PaperTable(title, where={}, groups="points", rows="dim", columns="t", metric=figure, percent=False)


TABLES: Mapping[str, PaperTable] = {
    "optimised": _board("Log of the mean potential of points that minimise it", "optimised"),
    "optimum": _board("The least that it can be: that of the uniform distribution", "optimum"),
    "uniform": _board("Log of the mean potential of random points", "uniform"),
    "half": _board("Log of the mean potential of random points on one half", "half"),
    "clusters": _board("Log of the mean potential of as many clusters as a simplex has corners", "clusters"),
    "cluster": _board("Log of the mean potential of one cluster", "cluster"),
}
GRIDS: Mapping[str, tuple[Grid, ...]] = {"all": (Grid({"dim": (2, 3), "t": (2.0,)}),)}
QUICK: Mapping[str, Any] = {"points": 2000, "steps": 50, "draws": 200, "largest": 512}

RECIPE = Recipe(
    name=NAME,
    title=TITLE,
    paper=PAPER,
    config=Config,
    run=run,
    name_of=name_of,
    cost=cost,
    tables=TABLES,
    grids=GRIDS,
    quick=QUICK,
    single_process=True,  # nothing is trained in batches
)
