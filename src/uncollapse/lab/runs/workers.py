"""Worker processes of a sweep, which run one configuration after the other in one thread.

The two sides exchange messages through a pipe. A worker has its own session, so that Ctrl-C reaches only the sweep,
which then asks its workers to stop; when the sweep is killed, they stop by themselves.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any, Literal

import torch

import uncollapse
from uncollapse.errors import MissingLibraryError
from uncollapse.io.files import try_lock
from uncollapse.lab.engine.runtime import PrunedError, Runtime, ShouldPrune
from uncollapse.lab.recipe import RECIPES
from uncollapse.lab.runs.results import Results
from uncollapse.lab.runs.run_one import remove_checkpoints, run_lock, run_one

HOME = str(Path(uncollapse.__file__).parent)
GRACE = 20.0  # seconds that a run has to write a checkpoint when it is asked to stop
LEAVING = 5.0  # seconds from the last message of a process to its end
CODE = "from uncollapse.lab.runs.workers import main; main({})"
PATIENCE = 0.2  # seconds between two messages about the same run


@dataclass(frozen=True)
class Job:
    """A run. results: the folder of all results. prune_by: the metric by which it may be stopped early; None: never."""

    recipe: str
    config: Any
    results: Path
    runtime: Runtime
    prune_by: str | None = None


@dataclass(frozen=True)
class Message:
    """A message of a worker.

    ready: the worker can run something. steps: progress of the run. note: a warning for the user. evaluated: the run
    waits for the answer whether to stop. pruned: it has stopped. busy: another process runs the same configuration.
    unable: a library is not installed.

    text: the note, or why a run failed. steps: done and total. evaluation: epoch, metric, and seconds in this process.
    """

    kind: Literal["ready", "steps", "note", "evaluated", "done", "pruned", "failed", "unable", "busy", "stopped"]
    text: str = ""
    traceback: str = ""
    steps: tuple[int, int] = (0, 0)
    evaluation: tuple[int, float, float] = (0, 0.0, 0.0)


class LocalPool:
    """Workers that are processes of this machine."""

    def start(self) -> "Worker":
        """Start a worker."""
        return Worker()

    def receive(self, workers: "Sequence[Worker]", timeout: float) -> "Iterator[tuple[Worker, Message | None]]":
        """Yield the messages of workers, waiting at most `timeout` seconds for the first; None when one has ended."""
        waiting = wait_for([worker.connection for worker in workers], timeout)
        for worker in [worker for worker in workers if worker.connection in waiting]:
            try:
                message = worker.connection.recv()
            except (EOFError, ConnectionResetError):
                message = None
            yield worker, message

    def close(self) -> None:
        """Do nothing: workers end by themselves."""


class Worker:
    """The sweep's side of a worker. ready: it has started. steps: of its run, done and total."""

    restarts = False  # a run whose process was killed may kill the next one too

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", CODE.format(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,  # never written to: when it closes, the worker knows that the sweep has ended
                stdout=subprocess.DEVNULL,  # stdout of the sweep is for results
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self.ready, self.steps = False, (0, 0)

    def answer(self, stop: bool) -> None:
        """Answer an evaluated run whether it should stop."""
        with suppress(BrokenPipeError):
            self.connection.send(stop)

    def assign(self, job: Job) -> None:
        """Run a job."""
        self.steps = (0, 0)
        with suppress(BrokenPipeError):  # the sweep notices that it is gone when it waits for messages
            self.connection.send(job)

    def request_stop(self) -> None:
        """Ask the process to end, with a checkpoint if it runs something."""
        self.process.send_signal(signal.SIGINT if self.ready else signal.SIGTERM)  # while it starts, nothing is lost

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()

    def wait(self) -> int:
        """Wait for the end of the process, kill it if it takes too long, and return its exit code."""
        try:
            self.process.wait(LEAVING)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.connection.close()
        if self.process.stdin is not None:
            self.process.stdin.close()
        return self.process.wait()


def main(handle: int) -> None:
    """Run the jobs that come through a pipe, until it is closed or the process is asked to stop."""
    torch.set_num_threads(1)
    threading.Thread(target=_follow_sweep, daemon=True).start()
    with Connection(handle) as connection:
        try:
            _send(connection, Message("ready"))
            while True:
                _run(connection.recv(), connection)
        except KeyboardInterrupt:
            _send(connection, Message("stopped"))
        except (EOFError, ConnectionResetError):
            return  # the sweep is gone


def _follow_sweep() -> None:
    """Wait for the end of the sweep, even by kill -9, then stop as on request."""
    os.read(0, 1)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    time.sleep(GRACE)
    os._exit(1)


def _send(connection: Connection, message: Message) -> None:
    with suppress(OSError):  # when the sweep is gone, the run still has to write its checkpoint
        connection.send(message)


def _run(job: Job, connection: Connection) -> None:
    recipe = RECIPES[job.recipe]
    results = Results(job.results)
    should_prune = None if job.prune_by is None else _prune_request(connection, job.prune_by)
    runtime = replace(job.runtime, progress=_step_sender(connection), should_prune=should_prune)
    with try_lock(run_lock(recipe, job.config, results)) as ours, warnings.catch_warnings():
        warnings.showwarning = _warning_sender(connection)
        if not ours:
            _send(connection, Message("busy"))
            return
        try:
            run_one(recipe, job.config, results, runtime)
            answer = Message("done")
        except PrunedError:
            remove_checkpoints(runtime.checkpoints, recipe, job.config)
            answer = Message("pruned")
        except MissingLibraryError as error:
            answer = Message("unable", str(error))
        except Exception as error:
            answer = Message("failed", " ".join(str(error).split()) or type(error).__name__, traceback.format_exc())
    _send(connection, answer)


def _warning_sender(connection: Connection) -> Any:
    """Return a `showwarning` that sends our warnings and those of the user's files, not those of other libraries."""

    def note(message: Warning | str, category: type[Warning], filename: str, *_: Any, **__: Any) -> None:
        if filename.startswith(HOME) or "site-packages" not in filename:
            _send(connection, Message("note", " ".join(str(message).split())))

    return note


def _step_sender(connection: Connection) -> Any:
    """Return a progress function that sends the steps of a run, at most every `PATIENCE` seconds."""
    last = 0.0

    def report(done: int, total: int, metrics: Mapping[str, float]) -> None:
        nonlocal last
        if time.monotonic() - last >= PATIENCE:
            last = time.monotonic()
            _send(connection, Message("steps", steps=(done, total)))

    return report


def _prune_request(connection: Connection, name: str) -> ShouldPrune:
    """Return a function that sends a metric after each evaluation and returns the answer whether to stop."""
    began = time.monotonic()

    def ask(epoch: int, metrics: Mapping[str, float]) -> bool:
        if name not in metrics:
            return False
        try:
            connection.send(Message("evaluated", evaluation=(epoch, metrics[name], time.monotonic() - began)))
            return bool(connection.recv())
        except (OSError, EOFError):  # the sweep is gone: the run is about to be asked to stop
            return False

    return ask
