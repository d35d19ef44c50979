"""A run that was killed goes on from its checkpoint to the same end, bit for bit on one thread.

CI kills 5 times; `UNCOLLAPSE_KILLS=50` kills more often.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from uncollapse.lab.sessions import Session
from uncollapse.lab.tasks import Settings
from uncollapse.lab.training import fit

from .polynomial import SETTINGS, task, trained

pytest.importorskip("accelerate")
KILLS = int(os.environ.get("UNCOLLAPSE_KILLS", "5"))
CHILD = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
from uncollapse.lab.recipes import gcn_depth
from uncollapse.lab.sessions import Session
config = gcn_depth.Config(layers=4, epochs=60, dropout=0.5, select="loss", norm="contra_norm", sample=64, drop_edge=0.1)
def told(done, total, figures):
    print(done, flush=True)
record = gcn_depth.run(config, Session(checkpoints=Path(sys.argv[1]), save_seconds=0.0, device="cpu", progress=told))
import json
print("END", json.dumps({key: record[key] for key in ("epochs", "figures", "ended", "diagnosis")}), flush=True)
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
            task(), Settings(**SETTINGS), Session(checkpoints=tmp_path, save_seconds=0.0, progress=vanish), "polynomial"
        )
    again, found = trained(tmp_path)
    assert again.epochs == whole.epochs
    assert (again.kept, again.ended) == (whole.kept, whole.ended)
    assert same(found, weights)


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
    session = Session(checkpoints=tmp_path, progress=lambda done, total, figures: seen.append(done))
    with pytest.warns(UserWarning, match="another"):
        fit(task(), Settings(**SETTINGS), session, "something else")
    assert seen[0] == 1


def test_without_resume_it_starts_anew(tmp_path: Path) -> None:
    trained(tmp_path)
    seen: list[int] = []
    session = Session(checkpoints=tmp_path, resume=False, progress=lambda done, total, figures: seen.append(done))
    fit(task(), Settings(**SETTINGS), session, "polynomial")
    assert seen[0] == 1


def start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", CHILD, str(folder)], stdout=subprocess.PIPE, text=True)


def outcome(process: subprocess.Popen[str]) -> tuple[list[int], dict[str, Any] | None]:
    """The steps that it told of, and its end, if it came to one."""
    steps, end = [], None
    assert process.stdout is not None
    for text in process.stdout:
        if text.startswith("END"):
            end = json.loads(text[4:])
        elif text.strip().isdigit():
            steps.append(int(text))
    process.wait()
    return steps, end


def killed(process: subprocess.Popen[str], after: float) -> list[int]:
    """Kill it so many seconds after its first step."""
    assert process.stdout is not None
    first = process.stdout.readline()
    time.sleep(after)
    process.send_signal(signal.SIGKILL)
    return [int(first), *outcome(process)[0]] if first.strip().isdigit() else []


def test_kill_9_at_random_moments(tmp_path: Path) -> None:
    pytest.importorskip("torch_geometric")
    began = time.monotonic()
    steps, whole = outcome(start(tmp_path / "whole"))
    assert whole is not None
    assert steps == list(range(1, 61))
    lasts = min(2.0, 0.2 * (time.monotonic() - began))
    chance, survived, folder = random.Random(0), 0, tmp_path / "killed"
    while survived < KILLS:
        reached = killed(start(folder), chance.uniform(0, lasts))
        survived += 1
        if reached and reached[-1] >= 50:  # nearly done: this one ends, and the next begins
            assert outcome(start(folder))[1] == whole
            shutil.rmtree(folder)
    steps, end = outcome(start(folder))
    assert end == whole
