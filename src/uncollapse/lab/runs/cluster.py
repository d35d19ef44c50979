"""Run a sweep on other machines: on an existing Dask cluster, or through Slurm with submitit.

The queue stays in the process of the sweep. A remote task runs one configuration and writes its result to the results
folder, which all machines must share. Locks, checkpoints and records are those of a sweep on one machine.
"""

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from uncollapse.errors import MissingLibraryError, UsageError, did_you_mean, import_optional
from uncollapse.io.files import try_lock
from uncollapse.lab.recipe import RECIPES
from uncollapse.lab.runs.results import Results
from uncollapse.lab.runs.run_one import run_lock, run_one
from uncollapse.lab.runs.workers import Job, Message

POLL = 0.05  # seconds between two looks at the tasks
ANSWER = 10.0  # seconds in which a scheduler must answer
DASK = "dask://"
SLURM_JOBS = 16  # at a time, if --jobs does not say


def execute(job: Job) -> Message:
    """Run a job in this process, and return how it ended."""
    recipe, results = RECIPES[job.recipe], Results(job.results)
    with try_lock(run_lock(recipe, job.config, results)) as ours:
        if not ours:
            return Message("busy")
        try:
            run_one(recipe, job.config, results, job.runtime)
            return Message("done")
        except KeyboardInterrupt:
            return Message("stopped")
        except MissingLibraryError as error:
            return Message("unable", str(error))
        except Exception as error:
            return Message("failed", " ".join(str(error).split()) or type(error).__name__, traceback.format_exc())


class RemoteWorker:
    """A place on a cluster that runs one job after the other.

    restarts: whether the sweep has to start a run again whose machine was lost; else the cluster does.
    """

    ready = True
    steps = (0, 0)  # a task reports nothing before its end

    def __init__(self, submit: Callable[[Job], Any], restarts: bool) -> None:
        self._submit, self.restarts = submit, restarts
        self.task: Any = None

    def answer(self, stop: bool) -> None:
        """Do nothing: remote runs do not ask."""

    def assign(self, job: Job) -> None:
        """Submit a job."""
        folders: dict[str, Any] = {name: _absolute(getattr(job.runtime, name)) for name in FOLDERS}
        runtime = replace(job.runtime, **folders)
        self.task = self._submit(replace(job, results=job.results.absolute(), runtime=runtime, prune_by=None))

    def request_stop(self) -> None:
        """Cancel a task that waits; one that runs goes on, and its result counts in the next sweep."""
        if self.task is not None:
            self.task.cancel()

    kill = request_stop

    def wait(self) -> int:
        """Return an exit code, as of a process that was killed."""
        self.task = None
        return -9

    def message(self) -> Message | None:
        """Return how the finished task ended; None if it was cancelled or lost."""
        task, self.task = self.task, None
        try:
            found: Message = task.result()
        except BaseException as error:  # the libraries raise many kinds, also for a lost machine
            if isinstance(error, KeyboardInterrupt):
                raise
            return None
        return found


FOLDERS = ("data_root", "checkpoints", "tracker_folder")


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()


class ClusterPool:
    """Workers on a cluster.

    submit: starts a job and returns its task. close: frees the connection. restarts: see `RemoteWorker`.
    """

    def __init__(self, submit: Callable[[Job], Any], close: Callable[[], None], restarts: bool) -> None:
        self._submit, self.close, self._restarts = submit, close, restarts

    def start(self) -> RemoteWorker:
        """Return a new place."""
        return RemoteWorker(self._submit, self._restarts)

    def receive(self, workers: Sequence[RemoteWorker], timeout: float) -> Iterator[tuple[RemoteWorker, Message | None]]:
        """Yield how tasks ended, waiting at most `timeout` seconds for the first."""
        until = time.monotonic() + timeout
        while True:
            ended = [worker for worker in workers if worker.task is not None and worker.task.done()]
            if ended or time.monotonic() >= until:
                break
            time.sleep(POLL)
        for worker in ended:
            yield worker, worker.message()


def connect(place: str, folder: Path) -> tuple[ClusterPool, int]:
    """Return the workers of a place, and how many jobs it runs at a time.

    Args:
        place: dask://HOST:PORT, slurm, or slurm-local, which runs the same jobs as processes of this machine.
        folder: For the files of submitit.
    """
    if place.startswith(DASK):
        return _dask("tcp://" + place.removeprefix(DASK))
    if place in ("slurm", "slurm-local"):
        return _slurm("local" if place == "slurm-local" else "slurm", folder), SLURM_JOBS
    hint = did_you_mean(place, ("slurm", "slurm-local"))
    raise UsageError(f"--on takes dask://HOST:PORT, slurm or slurm-local, got {place!r}.{hint}")


def _dask(address: str) -> tuple[ClusterPool, int]:
    library: Any = import_optional("distributed", "dask")
    try:
        client = library.Client(address, timeout=ANSWER)
    except OSError as error:
        raise UsageError(f"No Dask scheduler answers at {address}: {error}.") from error

    def submit(job: Job) -> Any:
        return client.submit(execute, job, pure=False)  # the same job again is another task

    # Dask moves the tasks of a lost worker to others, and gives up on one that has killed several.
    return ClusterPool(submit, client.close, restarts=False), max(1, sum(client.nthreads().values()))


def _slurm(cluster: str, folder: Path) -> ClusterPool:
    library: Any = import_optional("submitit", "slurm")
    try:
        executor = library.AutoExecutor(folder=folder / "submitit", cluster=cluster)
    except RuntimeError as error:  # submitit looks for srun
        where = "where Slurm is installed, such as on a login node of the cluster"
        raise UsageError(f"--on slurm needs srun, which is not on this machine. Run the command {where}.") from error
    executor.update_parameters(name="uncollapse", cpus_per_task=1, timeout_min=24 * 60)
    return ClusterPool(lambda job: executor.submit(execute, job), lambda: None, restarts=True)
