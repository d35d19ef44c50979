"""A sweep: the missing runs of an agenda in several processes, cheapest first, until all are done or time is over."""

import time
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal, Protocol

from uncollapse.io.files import NotWrittenError, try_lock, write
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.runs.run_one import remove_leftovers, run_folder, run_lock, with_run_folder
from uncollapse.lab.runs.run_queue import RunQueue
from uncollapse.lab.runs.workers import GRACE, Job, Message, Worker

RETRY = 1.0  # seconds until it is looked up again whether another process is done with a run
ERROR = "error.txt"

StopReason = Literal["done", "time", "interrupted"]


class SweepListener(Protocol):
    """Who tells a person how a sweep goes."""

    def changed(self, sweep: "Sweep") -> None:
        """Something moved: a run began, made a few steps or ended."""

    def finished(self, sweep: "Sweep", config: Any) -> None:
        """A run is done; its record is in the agenda."""

    def note(self, words: str) -> None:
        """Something went wrong, or should be known."""


@dataclass(frozen=True)
class Limits:
    """How many processes at a time, and for how many seconds; None takes the time that it takes."""

    jobs: int
    seconds: float | None = None


class Sweep:
    """The runs of an agenda while they run.

    running: the configuration that each worker runs. runs: the folder of checkpoints and errors, one folder a run.
    """

    def __init__(self, agenda: RunQueue, runs: Path, runtime: Runtime, limits: Limits, teller: SweepListener) -> None:
        self.agenda, self.limits = agenda, limits
        self.running: dict[Worker, Any] = {}
        self._workers: list[Worker] = []
        self._runs, self._session, self._teller = runs, runtime, teller
        self._elsewhere: dict[str, tuple[float, Any]] = {}  # other processes run these; look again at that time
        self._told: set[str] = set()
        self._stopping = False

    def run(self) -> StopReason:
        """Run what is missing; the answer says why it ended. What is then not done is open or failed in the agenda."""
        end = None if self.limits.seconds is None else time.monotonic() + self.limits.seconds
        self._tidy()
        try:
            while end is None or time.monotonic() < end:
                self._hand_out()
                if not (self.running or self._elsewhere):
                    return "done"
                self._listen(RETRY if end is None else min(RETRY, max(0.0, end - time.monotonic())))
            return "time"
        except KeyboardInterrupt:
            return "interrupted"
        finally:
            self._stop()

    def error_file(self, config: Any) -> Path:
        """Where it is said why a run failed."""
        return run_folder(self.agenda.recipe, config, self._runs) / ERROR

    def seconds_left(self) -> float:
        """How long it still takes, with all processes at work."""
        left = self.agenda.seconds_open()
        for worker, config in self.running.items():
            done, total = worker.steps
            left += self.agenda.seconds(config) * (1 - done / total if total else 1)
        return left / self.limits.jobs

    def _tidy(self) -> None:
        """Remove what earlier sweeps have left that were killed as a run of theirs was done."""
        recipe, results = self.agenda.recipe, self.agenda.results
        for config in map(self.agenda.config, self.agenda.records):
            remove_leftovers(recipe, config, results, run_folder(recipe, config, self._runs))

    def _hand_out(self) -> None:
        """Give runs to the workers that have none, and start workers while there are more runs."""
        for key, (when, config) in list(self._elsewhere.items()):
            if when <= time.monotonic():
                del self._elsewhere[key]
                self.agenda.put_back(config)
        while len(self.running) < self.limits.jobs and (config := self.agenda.take()) is not None:
            worker = next((idle for idle in self._workers if idle not in self.running), None)
            if worker is None:
                self._workers.append(worker := Worker())
            self.error_file(config).unlink(missing_ok=True)
            self.running[worker] = config
            runtime = with_run_folder(self._session, self.agenda.recipe, config, self._runs)
            worker.give(Job(self.agenda.recipe.name, config, self.agenda.results.folder, runtime, self.agenda.judged))
        self._teller.changed(self)

    def _listen(self, timeout: float) -> None:
        """Hear what workers say, for this long at most if they are silent."""
        heard = connection.wait([worker.connection for worker in self._workers], timeout)
        for worker in [worker for worker in self._workers if worker.connection in heard]:
            try:
                self._hear(worker, worker.connection.recv())
            except (EOFError, ConnectionResetError):
                self._lose(worker)
        self._teller.changed(self)

    def _hear(self, worker: Worker, message: Message) -> None:
        match message.kind:
            case "ready":
                worker.ready = True
            case "steps":
                worker.steps = message.steps
            case "judge":
                worker.answer(not self._stopping and self.agenda.judge(self.running[worker], *message.judged))
            case "note":
                self._teller.note(f"{self.agenda.label(self.running[worker])}: {message.words}")
            case _ if worker in self.running:
                self._settle(self.running.pop(worker), message)

    def _settle(self, config: Any, message: Message) -> None:
        """A run has ended, or has not begun."""
        match message.kind:
            case "failed":
                self._fail(config, message.words, message.more)
            case "stopped":
                self.agenda.put_back(config)
            case "pruned":
                self.agenda.prune(config)
                self._teller.finished(self, config)
            case "busy":
                self._wait_for(config)
            case _ if self.agenda.look_up(config):
                self._teller.finished(self, config)
            case _:
                self._fail(config, "The run left no result.")

    def _wait_for(self, config: Any) -> None:
        """Another process runs it: take its result, or the run itself should that process end without one."""
        key = self.agenda.key(config)
        self._elsewhere[key] = time.monotonic() + RETRY, config
        if key not in self._told:
            self._told.add(key)
            self._teller.note(f"{self.agenda.label(config)} is being run by another process.")

    def _fail(self, config: Any, why: str, more: str = "") -> None:
        self.agenda.fail(config, why)
        try:
            where = str(write(self.error_file(config), f"{why}\n\n{more}" if more else f"{why}\n"))
        except NotWrittenError as error:  # the run's own words then are all that there is
            where = str(error)
        self._teller.note(f"{self.agenda.label(config)} failed: {why} ({where})")

    def _lose(self, worker: Worker) -> None:
        """A worker has ended: because it was asked to, or because something killed it."""
        code = worker.end()
        self._workers.remove(worker)
        if worker not in self.running:
            return
        config = self.running.pop(worker)
        with try_lock(run_lock(self.agenda.recipe, config, self.agenda.results)):
            pass  # taken and given back, so that no file is left of a worker that was killed
        if self._stopping:
            self.agenda.put_back(config)
        elif worker.ready and self.agenda.may_retry(config):
            self._teller.note(f"{self.agenda.label(config)}: its process was killed; it is tried again.")
            self.agenda.put_back(config)
        elif not worker.ready:
            raise RuntimeError(f"A process for runs ended while it started, with exit code {code}.")
        else:
            how = f"by signal {-code}, maybe since memory ran out" if code < 0 else f"with exit code {code}"
            self._fail(config, f"The process of the run ended {how}.")

    def _stop(self) -> None:
        """End all workers. Those that run something have a while to write a checkpoint."""
        self._stopping, until = True, time.monotonic() + GRACE
        try:
            self._listen(0)
            if self.running:
                self._teller.note("Stopping, with a checkpoint of each running run.")
            for worker in self._workers:
                worker.ask()
            while self._workers and time.monotonic() < until:
                self._listen(RETRY)
        finally:
            for worker in list(self._workers):
                worker.process.kill()
                self._lose(worker)
            for _, config in self._elsewhere.values():
                self.agenda.put_back(config)
