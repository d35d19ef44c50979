"""Sweeps on a cluster: a Dask cluster and submitit's local executor, with real processes."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.lab.runs.test_sweep import Ear, log
from tests.lab.sweep_recipe import registered

from uncollapse.errors import UsageError
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.runs import cluster
from uncollapse.lab.runs import sweep as sweeping
from uncollapse.lab.runs.grids import Grid
from uncollapse.lab.runs.results import Results
from uncollapse.lab.runs.run_queue import RunQueue
from uncollapse.lab.runs.sweep import Limits, Sweep


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with registered(monkeypatch) as module:
        yield module


@pytest.fixture
def dask_address(tiny: ModuleType) -> Iterator[str]:
    distributed = pytest.importorskip("distributed")
    options: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    failures = {"distributed.scheduler.allowed-failures": 1}  # workers that a task may kill before it counts as failed
    with pytest.importorskip("dask").config.set(failures), distributed.LocalCluster(**options) as local:
        yield local.scheduler_address.replace("tcp://", "dask://")


def sweep(tiny: ModuleType, folder: Path, place: str, *grids: Grid, ear: Ear) -> Sweep:
    cells = [cell for grid in grids for cell in grid.cells(tiny.Config)]
    queue = RunQueue(tiny.RECIPE, cells, Results(folder / "results"))
    pool, jobs = cluster.connect(place, folder / "runs")
    return Sweep(queue, folder / "runs", Runtime(folder), Limits(min(jobs, 3), 150), ear, pool)


@pytest.mark.slow
def test_runs_of_a_dask_cluster_have_the_same_records_and_are_not_made_twice(
    tiny: ModuleType, tmp_path: Path, dask_address: str
) -> None:
    grid = Grid({"scale": (0.1, 0.2), "seed": (0, 1, 2)}, choose=("scale",))
    ear = Ear()
    swept = sweep(tiny, tmp_path, dask_address, grid, Grid({"fault": ("raise",)}), ear=ear)
    assert swept.run() == "done"
    assert (swept.queue.done, list(swept.queue.failed.values())) == (4, ["The loss became nan. Try another one."])
    assert len(ear.done) == len(list((tmp_path / "results" / tiny.NAME).glob("*.json"))) == 4
    again = sweep(tiny, tmp_path, dask_address, grid, ear=Ear())
    assert again.run() == "done"
    assert again.queue.found == 4
    assert len(log(tmp_path)) == 5  # four runs and the one that failed


@pytest.mark.slow
def test_a_run_whose_worker_is_lost_starts_again(tiny: ModuleType, tmp_path: Path, dask_address: str) -> None:
    """A run that kills its worker is tried again, and then fails; the others are done."""
    ear = Ear()
    swept = sweep(tiny, tmp_path, dask_address, Grid({"fault": ("kill",)}), Grid({"size": (1, 2)}), ear=ear)
    assert swept.run() == "done"
    assert swept.queue.done == 2
    assert len(swept.queue.failed) == 1
    assert sum(line.startswith("kill") for line in log(tmp_path)) == 2


@pytest.mark.slow
def test_a_lost_job_of_slurm_starts_again_a_few_times(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setattr(sweeping, "RESTARTS", 1)
    ear = Ear()
    swept = sweep(tiny, tmp_path, "slurm-local", Grid({"fault": ("kill",)}), ear=ear)
    assert swept.run() == "done"
    assert len(swept.queue.failed) == 1
    assert sum("starts again" in words for words in ear.notes) == 1


@pytest.mark.slow
def test_submitit_runs_the_same_jobs(tiny: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    swept = sweep(tiny, tmp_path, "slurm-local", Grid({"size": (1, 2)}), ear=Ear())
    assert swept.run() == "done"
    assert swept.queue.done == 2


@pytest.mark.parametrize(("place", "word"), [("slrum", "slurm"), ("dask://127.0.0.1:1", "scheduler")])
def test_a_place_that_is_not_there(place: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr(cluster, "ANSWER", 0.5)
    with pytest.raises(UsageError, match=word):
        cluster.connect(place, tmp_path)


def test_a_machine_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="needs srun"):
        cluster.connect("slurm", tmp_path)
