"""A run that was killed goes on from its checkpoint to the same end, bit for bit on one thread.

CI kills 5 times; `UNCOLLAPSE_KILLS=50` kills more often.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.lab.engine.polynomial import SETTINGS, task, trained
from torch import Tensor, nn
from torch.utils.data import DataLoader

from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.task import Task, TrainingOptions

pytest.importorskip("accelerate")
KILLS = int(os.environ.get("UNCOLLAPSE_KILLS", "5"))
SERVER = """
import json, os, sys, torch
from pathlib import Path
torch.set_num_threads(1)
os.fsync = lambda handle: None  # a killed process loses nothing that it wrote
from uncollapse.lab.experiments.gcn.config import Config
from uncollapse.lab.experiments.gcn.recipe import run
from uncollapse.lab.engine.runtime import Runtime
import torch_geometric, uncollapse.diagnosis.run
config = Config(layers=4, epochs=60, dropout=0.5, select="loss", norm="contra_norm", sample=64, drop_edge=0.1)
def show(done, total, figures):
    print(done, flush=True)
def train(folder):
    record = run(config, Runtime(checkpoints=Path(folder), save_seconds=0.0, device="cpu", progress=show))
    print("END", json.dumps({key: record[key] for key in ("epochs", "figures", "ended", "diagnosis")}), flush=True)
for line in sys.stdin:  # a child per line: imports take seconds, a fork takes none
    child = os.fork()
    if child == 0:
        train(line.strip())
        os._exit(0)
    print("PID", child, flush=True)
    print("EXIT", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("steps", [1, 2, 3, 8, 17])
def test_every_step_is_a_place_to_go_on_from(tmp_path: Path, steps: int) -> None:
    """After so many steps the process is gone: nothing is left but the checkpoint."""
    whole, weights = trained()

    class GoneError(Exception):
        pass

    def vanish(done: int, total: int, figures: Any) -> None:
        if done == steps + 1:
            raise GoneError

    with pytest.raises(GoneError):
        fit(
            task(),
            TrainingOptions(**SETTINGS),
            Runtime(checkpoints=tmp_path, save_seconds=0.0, progress=vanish),
            "polynomial",
        )
    again, found = trained(tmp_path)
    assert again.epochs == whole.epochs
    assert (again.selected, again.ended) == (whole.selected, whole.ended)
    assert same(found, weights)


class Noisy(torch.utils.data.Dataset[Tensor]):
    """Points with an augmentation that draws from torch's random numbers."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3,), float(index)) / 24 + 0.1 * torch.rand(3)


def lazily(epoch: int) -> Iterator[Tensor]:
    for index in range(6):
        yield torch.rand(4, 3) + index / 6


class Later:
    """Points that depend on the epoch and their number alone, and need not be made to be skipped."""

    made: ClassVar[list[tuple[int, int]]] = []  # epoch and number

    def __init__(self, epoch: int, first: int = 0) -> None:
        self.epoch, self.first = epoch, first

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.first, 6):
            self.made.append((self.epoch, number))
            yield torch.rand(4, 3, generator=torch.Generator().manual_seed(10 * self.epoch + number))

    def after(self, count: int) -> "Later":
        return Later(self.epoch, count)


SOURCES: dict[str, Callable[[int], Iterable[Tensor]]] = {
    "in order": lambda epoch: DataLoader(Noisy(), 4),
    "shuffled": lambda epoch: DataLoader(Noisy(), 4, shuffle=True),
    "workers": lambda epoch: DataLoader(Noisy(), 4, shuffle=True, num_workers=1),
    "generator": lazily,
    "skippable": Later,
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("source", SOURCES)
def test_batches_that_draw_random_numbers(tmp_path: Path, source: str) -> None:
    """A run that goes on in the middle of an epoch sees the batches that it would have seen, and the same dropout."""

    def made() -> Task:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        model.register_buffer("scale", torch.ones(()), persistent=False)

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            scale: Any = model.scale
            scale += 0.1  # a buffer that no state_dict has
            return ((model(x) - 1) * scale).square().mean()

        return Task(model, torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9), SOURCES[source], loss)

    steps = iter(range(1, 100))

    def press(done: int, total: int, figures: Any) -> None:
        if next(steps) == 9:
            os.kill(os.getpid(), signal.SIGINT)

    whole, cut, rest = made(), made(), made()
    fit(whole, TrainingOptions(epochs=3), Runtime(device="cpu"))
    with pytest.raises(KeyboardInterrupt, match="epoch 2"):
        fit(cut, TrainingOptions(epochs=3), Runtime(device="cpu", checkpoints=tmp_path, progress=press), "x")
    fit(rest, TrainingOptions(epochs=3), Runtime(device="cpu", checkpoints=tmp_path), "x")
    assert same(dict(rest.model.state_dict()), dict(whole.model.state_dict()))


def test_batches_that_need_not_be_made_are_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Later, "made", [])

    def press(done: int, total: int, figures: Any) -> None:
        if done == 4:
            os.kill(os.getpid(), signal.SIGINT)

    def learn(**runtime: Any) -> None:
        model = nn.Linear(3, 1)
        task = Task(model, torch.optim.SGD(model.parameters(), 0.01), Later, lambda model, x: model(x).square().mean())
        fit(
            task,
            TrainingOptions(epochs=2, accumulate=2),
            Runtime(device="cpu", checkpoints=tmp_path, **runtime),
            "later",
        )

    with pytest.raises(KeyboardInterrupt, match="epoch 2"):
        learn(progress=press)
    assert Later.made == [(1, number) for number in range(6)] + [(2, 0), (2, 1)]
    Later.made.clear()
    learn()
    assert Later.made == [(2, 2), (2, 3), (2, 4), (2, 5)]


@pytest.mark.usefixtures("one_thread")
def test_a_torn_checkpoint_is_refused_and_the_one_before_used(tmp_path: Path) -> None:
    whole, weights = trained()
    trained(tmp_path)  # leaves the last two checkpoints
    last = max(tmp_path.glob("step-*"))
    file = last / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.warns(UserWarning, match=last.name):
        again, found = trained(tmp_path)
    assert again.epochs == whole.epochs
    assert same(found, weights)


def test_a_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    trained(tmp_path)
    seen: list[int] = []
    runtime = Runtime(checkpoints=tmp_path, progress=lambda done, total, figures: seen.append(done))
    with pytest.warns(UserWarning, match="another"):
        fit(task(), TrainingOptions(**SETTINGS), runtime, "something else")
    assert seen[0] == 1


def test_without_resume_it_starts_anew(tmp_path: Path) -> None:
    trained(tmp_path)
    seen: list[int] = []
    runtime = Runtime(checkpoints=tmp_path, resume=False, progress=lambda done, total, figures: seen.append(done))
    fit(task(), TrainingOptions(**SETTINGS), runtime, "polynomial")
    assert seen[0] == 1


class Trainings:
    """Trainings that can be killed, each in a process of its own."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self.server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=pipe, stdout=pipe, text=True)

    def run(self, folder: Path, kill_after: float | None = None) -> tuple[int, int, dict[str, Any] | None]:
        """Train; kill it so many seconds after its first step. The exit code, the last step, the record."""
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        print(folder, file=self.server.stdin, flush=True)
        pid, code, step, record = 0, None, 0, None
        while code is None or pid == 0:
            word, _, rest = self.server.stdout.readline().strip().partition(" ")
            if word == "PID":
                pid = int(rest)
            elif word == "END":
                record = json.loads(rest)
            elif word == "EXIT":
                code = int(rest)
            else:
                step = int(word)
            if kill_after is not None and pid and step:
                time.sleep(kill_after)
                with contextlib.suppress(ProcessLookupError):  # it may have ended
                    os.kill(pid, signal.SIGKILL)
                kill_after = None
        return code, step, record

    def close(self) -> None:
        self.server.communicate(timeout=60)


@pytest.fixture
def trainings() -> Iterator[Trainings]:
    pytest.importorskip("torch_geometric")
    server = Trainings()
    yield server
    server.close()


def test_kill_9_at_random_moments(trainings: Trainings, tmp_path: Path) -> None:
    began = time.monotonic()
    code, steps, whole = trainings.run(tmp_path / "whole")
    assert whole is not None
    assert (code, steps) == (0, 60)
    lasts = min(2.0, time.monotonic() - began)
    chance, survived, folder = random.Random(0), 0, tmp_path / "killed"
    while survived < KILLS:
        code, reached, _ = trainings.run(folder, kill_after=chance.uniform(0, lasts / 2))
        survived += code == -signal.SIGKILL
        if reached >= 50:  # nearly done: this one ends, and the next begins
            assert trainings.run(folder)[2] == whole
            shutil.rmtree(folder)
    assert trainings.run(folder)[2] == whole
