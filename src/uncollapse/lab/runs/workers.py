"""Processes of one thread that run one configuration after the other for a sweep.

The two sides talk through a pipe. A worker is in a session of its own, so that Ctrl-C reaches the sweep alone, which
then asks its workers to stop; when the sweep is killed, they stop by themselves.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch

import uncollapse
from uncollapse.io.files import try_lock
from uncollapse.lab.engine.runtime import PrunedError, Runtime, ShouldPrune
from uncollapse.lab.recipe import RECIPES
from uncollapse.lab.runs.results import Results
from uncollapse.lab.runs.run_one import remove_checkpoints, run_lock, run_one

HOME = str(Path(uncollapse.__file__).parent)
GRACE = 20.0  # seconds in which a run that is asked to stop can write a checkpoint
LEAVING = 5.0  # seconds from its last word to the end of a process
CODE = "from uncollapse.lab.runs.workers import main; main({})"
PATIENCE = 0.2  # seconds between two messages about the same run


@dataclass(frozen=True)
class Job:
    """A run. results: the folder of all results. judged: the figure by which it may be stopped early; None: by none."""

    recipe: str
    config: Any
    results: Path
    runtime: Runtime
    judged: str | None = None


@dataclass(frozen=True)
class Message:
    """What a worker says. words: a note, or why a run failed; more: the traceback.

    ready: it can be given runs. steps: so many of so many. judge: the run asks whether it should stop, and waits for
    the answer; judged: its epoch, its figure and its seconds in this process. pruned: it did stop. busy: another
    process runs the same.
    """

    kind: Literal["ready", "steps", "note", "judge", "done", "pruned", "failed", "busy", "stopped"]
    words: str = ""
    more: str = ""
    steps: tuple[int, int] = (0, 0)
    judged: tuple[int, float, float] = (0, 0.0, 0.0)


class Worker:
    """A worker as the sweep sees it. ready: it has started. steps: how many of how many its run has made."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", CODE.format(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,  # never written to: its end is how the worker learns of ours
                stdout=subprocess.DEVNULL,  # ours is for results
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self.ready, self.steps = False, (0, 0)

    def answer(self, stop: bool) -> None:
        """Say whether the run that asked should stop."""
        with suppress(BrokenPipeError):
            self.connection.send(stop)

    def give(self, job: Job) -> None:
        """Let it run something."""
        self.steps = (0, 0)
        with suppress(BrokenPipeError):  # that it is gone is heard where all that it says is heard
            self.connection.send(job)

    def ask(self) -> None:
        """Ask it to end: with a checkpoint if it runs something. One that only starts has nothing to lose."""
        self.process.send_signal(signal.SIGINT if self.ready else signal.SIGTERM)

    def end(self) -> int:
        """Wait for its end, which has begun; the answer is its exit code."""
        try:
            self.process.wait(LEAVING)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.connection.close()
        if self.process.stdin is not None:
            self.process.stdin.close()
        return self.process.wait()


def main(handle: int) -> None:
    """Run what comes through the pipe, until it is closed or the process is asked to stop."""
    torch.set_num_threads(1)
    threading.Thread(target=_follow_sweep, daemon=True).start()
    with Connection(handle) as connection:
        try:
            _tell(connection, Message("ready"))
            while True:
                _run(connection.recv(), connection)
        except KeyboardInterrupt:
            _tell(connection, Message("stopped"))
        except (EOFError, ConnectionResetError):
            return  # the sweep is gone


def _follow_sweep() -> None:
    """Wait for the end of the sweep, even by kill -9, and stop then as if it had asked."""
    os.read(0, 1)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    time.sleep(GRACE)
    os._exit(1)


def _tell(connection: Connection, message: Message) -> None:
    with suppress(OSError):  # when nobody listens any more, the run still has to write its checkpoint
        connection.send(message)


def _run(job: Job, connection: Connection) -> None:
    recipe = RECIPES[job.recipe]
    results = Results(job.results)
    judge = None if job.judged is None else _judge(connection, job.judged)
    runtime = replace(job.runtime, progress=_reporter(connection), should_prune=judge)
    with try_lock(run_lock(recipe, job.config, results)) as ours, warnings.catch_warnings():
        warnings.showwarning = _noter(connection)
        if not ours:
            _tell(connection, Message("busy"))
            return
        try:
            run_one(recipe, job.config, results, runtime)
            answer = Message("done")
        except PrunedError:
            remove_checkpoints(runtime.checkpoints, recipe, job.config)
            answer = Message("pruned")
        except Exception as error:
            answer = Message("failed", " ".join(str(error).split()) or type(error).__name__, traceback.format_exc())
    _tell(connection, answer)


def _noter(connection: Connection) -> Any:
    """Tells warnings of ours and of the user's own files; those of other libraries are for their programmers."""

    def note(message: Warning | str, category: type[Warning], filename: str, *_: Any, **__: Any) -> None:
        if filename.startswith(HOME) or "site-packages" not in filename:
            _tell(connection, Message("note", " ".join(str(message).split())))

    return note


def _reporter(connection: Connection) -> Any:
    """Tells how far a run is, now and then."""
    told = 0.0

    def report(done: int, total: int, figures: Mapping[str, float]) -> None:
        nonlocal told
        if time.monotonic() - told >= PATIENCE:
            told = time.monotonic()
            _tell(connection, Message("steps", steps=(done, total)))

    return report


def _judge(connection: Connection, name: str) -> ShouldPrune:
    """Tells a figure after each evaluation, and hears whether to stop."""

    began = time.monotonic()

    def ask(epoch: int, figures: Mapping[str, float]) -> bool:
        if name not in figures:
            return False
        try:
            connection.send(Message("judge", judged=(epoch, figures[name], time.monotonic() - began)))
            return bool(connection.recv())
        except (OSError, EOFError):  # nobody listens any more: the run is about to be asked to stop
            return False

    return ask
