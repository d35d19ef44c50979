"""Run a sweep: the missing runs of a queue in several processes, cheapest first, until a time limit."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from uncollapse.errors import UsageError
from uncollapse.io.files import NotWrittenError, try_lock, write
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.runs.run_one import remove_leftovers, run_folder, run_lock, with_run_folder
from uncollapse.lab.runs.run_queue import RunQueue
from uncollapse.lab.runs.workers import GRACE, Job, LocalPool, Message

RESTARTS = 3  # of a run whose remote worker was lost
RETRY = 1.0  # seconds between two looks at a run of another process
ERROR = "error.txt"

StopReason = Literal["done", "time", "interrupted"]


class SweepListener(Protocol):
    """Receives the events of a sweep, to show them."""

    def handle_change(self, sweep: "Sweep") -> None:
        """Handle progress: a run started, made some steps or ended."""

    def handle_end(self, sweep: "Sweep", config: Any) -> None:
        """Handle the end of a run; its record is in the queue."""

    def note(self, words: str) -> None:
        """Show a message to the user."""


class AnyWorker(Protocol):
    """A worker as a sweep sees it; see `workers.Worker` and `cluster.RemoteWorker`."""

    ready: bool
    steps: tuple[int, int]
    restarts: bool

    def answer(self, stop: bool) -> None:
        """Answer an evaluated run whether it should stop."""

    def assign(self, job: Job) -> None:
        """Run a job."""

    def request_stop(self) -> None:
        """Ask the run to end."""

    def kill(self) -> None:
        """End the run at once."""

    def wait(self) -> int:
        """Wait for the end of the worker and return its exit code."""
        ...


class Pool(Protocol):
    """Where workers come from: `workers.LocalPool`, or a cluster."""

    def start(self) -> Any:
        """Start a worker."""

    def receive(self, workers: Sequence[Any], timeout: float) -> Iterator[tuple[Any, Message | None]]:
        """Yield messages of workers, None for one that has ended."""
        ...

    def close(self) -> None:
        """Free what the pool holds."""


@dataclass(frozen=True)
class Limits:
    """Number of processes, and the time limit in seconds; None for no limit."""

    jobs: int
    seconds: float | None = None


class Sweep:
    """Run the configurations of a queue in worker processes.

    running: the configuration of each busy worker. runs: the folder of checkpoints and errors, with one folder per run.
    pool: where workers run; processes of this machine if not given.
    """

    def __init__(
        self,
        queue: RunQueue,
        runs: Path,
        runtime: Runtime,
        limits: Limits,
        listener: SweepListener,
        pool: Pool | None = None,
    ) -> None:
        self.queue, self.limits = queue, limits
        self._pool: Pool = pool or LocalPool()
        self.running: dict[AnyWorker, Any] = {}
        self._workers: list[AnyWorker] = []
        self._lost: Counter[str] = Counter()  # workers that each run has lost
        self._runs, self._runtime, self._listener = runs, runtime, listener
        self._elsewhere: dict[str, tuple[float, Any]] = {}  # runs of other processes, by identity: when to look again
        self._announced: set[str] = set()
        self._stopping = False

    def run(self) -> StopReason:
        """Run what is missing and return why it ended. Runs that are not done then are open or failed in the queue."""
        end = None if self.limits.seconds is None else time.monotonic() + self.limits.seconds
        self._remove_leftovers()
        try:
            while end is None or time.monotonic() < end:
                self._assign_runs()
                if not (self.running or self._elsewhere):
                    return "done"
                self._listen(RETRY if end is None else min(RETRY, max(0.0, end - time.monotonic())))
            return "time"
        except KeyboardInterrupt:
            return "interrupted"
        finally:
            self._stop()

    def error_file(self, config: Any) -> Path:
        """Return the file with the error of a failed run."""
        return run_folder(self.queue.recipe, config, self._runs) / ERROR

    def seconds_left(self) -> float:
        """Return the estimated seconds until the end, with all processes busy."""
        left = self.queue.seconds_open()
        for worker, config in self.running.items():
            done, total = worker.steps
            left += self.queue.seconds(config) * (1 - done / total if total else 1)
        return left / self.limits.jobs

    def _remove_leftovers(self) -> None:
        """Remove files that earlier sweeps left when they were killed at the end of a run."""
        recipe, results = self.queue.recipe, self.queue.results
        for config in map(self.queue.config, self.queue.records):
            remove_leftovers(recipe, config, results, run_folder(recipe, config, self._runs))

    def _assign_runs(self) -> None:
        """Assign runs to idle workers, and start further workers while there are more runs."""
        for key, (when, config) in list(self._elsewhere.items()):
            if when <= time.monotonic():
                del self._elsewhere[key]
                self.queue.put_back(config)
        while len(self.running) < self.limits.jobs and (config := self.queue.take()) is not None:
            worker = next((idle for idle in self._workers if idle not in self.running), None)
            if worker is None:
                self._workers.append(worker := self._pool.start())
            self.error_file(config).unlink(missing_ok=True)
            self.running[worker] = config
            runtime = with_run_folder(self._runtime, self.queue.recipe, config, self._runs)
            worker.assign(Job(self.queue.recipe.name, config, self.queue.results.folder, runtime, self.queue.prune_by))
        self._listener.handle_change(self)

    def _listen(self, timeout: float) -> None:
        """Handle the messages of workers, waiting at most `timeout` seconds for one."""
        for worker, message in self._pool.receive(list(self._workers), timeout):
            if message is None:
                self._remove_worker(worker)
            else:
                self._handle(worker, message)
        self._listener.handle_change(self)

    def _handle(self, worker: AnyWorker, message: Message) -> None:
        match message.kind:
            case "ready":
                worker.ready = True
            case "steps":
                worker.steps = message.steps
            case "evaluated":
                config = self.running[worker]
                worker.answer(not self._stopping and self.queue.should_prune(config, *message.evaluation))
            case "note":
                self._listener.note(f"{self.queue.label(self.running[worker])}: {message.text}")
            case _ if worker in self.running:
                self._end_run(self.running.pop(worker), message)

    def _end_run(self, config: Any, message: Message) -> None:
        """Record how a run ended, or that it did not start."""
        match message.kind:
            case "failed":
                self._fail(config, message.text, message.traceback)
            case "unable":  # and so are the others: they would all fail
                self.queue.put_back(config)
                raise UsageError(message.text)
            case "stopped":
                self.queue.put_back(config)
            case "pruned":
                self.queue.prune(config)
                self._listener.handle_end(self, config)
            case "busy":
                self._wait_for(config)
            case _ if self.queue.look_up(config):
                self._listener.handle_end(self, config)
            case _:
                self._fail(config, "The run left no result.")

    def _wait_for(self, config: Any) -> None:
        """Wait for a run of another process: for its result, or to run it if that process ends without one."""
        key = self.queue.key(config)
        self._elsewhere[key] = time.monotonic() + RETRY, config
        if key not in self._announced:
            self._announced.add(key)
            self._listener.note(f"{self.queue.label(config)} is being run by another process.")

    def _fail(self, config: Any, why: str, traceback: str = "") -> None:
        alike = [key for key, known in self.queue.failed.items() if known == why]
        self.queue.fail(config, why)
        try:
            where = str(write(self.error_file(config), f"{why}\n\n{traceback}" if traceback else f"{why}\n"))
        except NotWrittenError as error:  # then the error is only printed
            where = str(error)
        if not alike:
            self._listener.note(f"{self.queue.label(config)} failed: {why} ({where})")
        elif len(alike) == 1:  # such as data that no run can find
            label, first = self.queue.label(config), self.queue.label(self.queue.config(alike[0]))
            self._listener.note(f"{label} failed for the same reason as {first}; other such runs are only counted.")

    def _remove_worker(self, worker: AnyWorker) -> None:
        """Handle the end of a worker, which stopped on request or was killed."""
        code = worker.wait()
        self._workers.remove(worker)
        if worker not in self.running:
            return
        config = self.running.pop(worker)
        with try_lock(run_lock(self.queue.recipe, config, self.queue.results)):
            pass  # taking the lock removes the lock file of a killed worker
        if self._stopping:
            self.queue.put_back(config)
        elif worker.ready and (self._may_restart(worker, config) or self.queue.may_retry(config)):
            self._listener.note(f"{self.queue.label(config)}: its process was killed; it starts again.")
            self.queue.put_back(config)
        elif not worker.ready:
            raise RuntimeError(f"A worker process ended during its start, with exit code {code}.")
        else:
            how = f"by signal {-code}, maybe because memory ran out" if code < 0 else f"with exit code {code}"
            self._fail(config, f"The process of the run ended {how}.")

    def _may_restart(self, worker: AnyWorker, config: Any) -> bool:
        """Return whether a run starts again whose worker was lost: on a cluster, a few times."""
        key = self.queue.key(config)
        self._lost[key] += 1
        return worker.restarts and self._lost[key] <= RESTARTS

    def _stop(self) -> None:
        """Stop all workers; busy ones have some time to write a checkpoint."""
        self._stopping, until = True, time.monotonic() + GRACE
        try:
            self._listen(0)
            if self.running:
                self._listener.note("Stopping; running experiments write a checkpoint first.")
            for worker in self._workers:
                worker.request_stop()
            while self._workers and time.monotonic() < until:
                self._listen(RETRY)
        finally:
            for worker in list(self._workers):
                worker.kill()
                self._remove_worker(worker)
            self._pool.close()
            for _, config in self._elsewhere.values():
                self.queue.put_back(config)
