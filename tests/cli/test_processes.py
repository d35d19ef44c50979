"""Commands in several processes: one of them writes and talks, and all leave together."""

import json
import signal
import time
from pathlib import Path

import pytest
from tests.distributed import finish, start
from torch import distributed

pytest.importorskip("accelerate")
pytestmark = pytest.mark.skipif(not distributed.is_gloo_available(), reason="needs gloo")

RECIPE = Path(__file__).with_name("shared_recipe.py")
LOST = "Error: another process of this run ended"


def command(folder: Path, *more: str) -> list[str]:
    places = ["--data-root", str(folder), "--results", str(folder / "results"), "--runs", str(folder / "runs")]
    return [str(RECIPE), "train", "shared", "--device", "cpu", *places, *more]


def has_begun(folder: Path) -> bool:
    """Whether a checkpoint is there, and another step is under way."""
    return (folder / "step-of-1").exists() and any((folder / "runs").glob("*/*/step-*"))


def test_a_process_is_killed_and_the_same_command_goes_on(tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    started, _store = start(2, *command(tmp_path))
    while not has_begun(tmp_path) and all(each.poll() is None for each in started):
        time.sleep(0.1)
    started[1].send_signal(signal.SIGKILL)
    (first, out, told), second = finish(started)
    assert (first, out, second) == (1, "", (-signal.SIGKILL, "", ""))
    assert told.startswith(LOST)
    assert "same command again to resume" in told
    assert not list((tmp_path / "results").rglob("*.json"))

    (tmp_path / "wait").unlink()
    started, _store = start(2, *command(tmp_path, "--json"))
    (first, out, told), second = finish(started)
    assert (first, second) == (0, (0, "", ""))
    assert told.startswith("Seed 0 continues from step ")
    (record,) = json.loads(out)
    assert record["figures"]["rank"] == 0  # the first process's
    assert len(record["epochs"]) == 30
    assert [path.suffix for path in (tmp_path / "results").rglob("*.*")] == [".json"]
    assert not list((tmp_path / "runs").rglob("step-*"))


def test_a_signal_to_one_process_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    started, _store = start(2, *command(tmp_path))
    while not has_begun(tmp_path) and all(each.poll() is None for each in started):
        time.sleep(0.1)
    started[1].send_signal(signal.SIGTERM)
    (first, out, told), second = finish(started)
    assert (first, out, second) == (130, "", (130, "", ""))
    assert told.startswith("Interrupted in epoch ") or told.startswith("Interrupted after epoch ")
    assert told.endswith("The same command continues from there.\n")


def test_an_error_in_one_process_is_told_once_and_all_leave(tmp_path: Path) -> None:
    (tmp_path / "fail").touch()
    started, _store = start(2, *command(tmp_path))
    first, (second, out, told) = finish(started)
    assert first == (1, "", "")
    assert (second, out) == (1, "")
    assert told == "Error: the disk of the second process is gone (--debug shows the traceback.)\n"


def test_what_cannot_be_shared_is_left_to_the_first_process(tmp_path: Path) -> None:
    small = ["--nodes", "180", "--layers", "2", "--hidden", "8", "--epochs", "2"]
    places = ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
    started, _store = start(2, "-m", "uncollapse", "train", "gcn-depth", *small, *places)  # it trains all the same
    (first, out, told), second = finish(started)
    assert (first, second) == (0, (0, "", ""))
    assert told.startswith("gcn-depth cannot be split over 2 processes: rank 0 runs it, and the others wait.")
    assert "after epoch 2" in out
    assert len(list((tmp_path / "results").rglob("*.json"))) == 1
