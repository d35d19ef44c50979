import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from uncollapse.errors import UsageError
from uncollapse.lab.engine.trackers import Trackers, open_trackers


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_no_trackers_need_no_folder() -> None:
    trackers = open_trackers((), None, "run", {})
    trackers.log(1, {"loss": 0.5})
    trackers.close()


def test_a_line_for_each_call(tmp_path: Path) -> None:
    trackers = open_trackers(["jsonl", "jsonl"], tmp_path / "new" / "run", "run", {})
    trackers.log(3, {"epoch": 1, "loss": 0.1 + 0.2, "validation": np.float32(0.5)})
    assert lines(tmp_path / "new" / "run") == [{"step": 3, "epoch": 1, "loss": 0.1 + 0.2, "validation": 0.5}]  # flushed
    assert '"epoch": 1,' in (tmp_path / "new" / "run" / "metrics.jsonl").read_text()
    trackers.log(6, {"loss": float("nan"), "rank": float("inf"), "validation": torch.tensor(0.25)})
    trackers.close()
    assert lines(tmp_path / "new" / "run")[1] == {"step": 6, "loss": None, "rank": None, "validation": 0.25}


def test_lines_are_dropped_where_a_run_goes_on(tmp_path: Path) -> None:
    trackers = open_trackers(["jsonl"], tmp_path, "run", {})
    for step in (10, 20, 30):
        trackers.log(step, {"loss": 1 / step})
    trackers.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4')  # a kill cut it off
    resumed = open_trackers(["jsonl"], tmp_path, "run", {}, step=20)
    resumed.log(20, {"loss": 0.5})
    resumed.close()
    assert lines(tmp_path) == [{"step": 10, "loss": 0.1}, {"step": 20, "loss": 0.5}]
    open_trackers(["jsonl"], tmp_path, "run", {}).close()
    assert lines(tmp_path) == []


def test_tensorboard(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trackers = open_trackers(["tensorboard"], tmp_path, "run", {"layers": 16, "norm": "pair"})
    for step in (10, 20, 30):
        trackers.log(step, {"loss": step / 10, "validation": float("nan")})
    del trackers  # never closed, as after a kill
    resumed = open_trackers(["tensorboard"], tmp_path, "run", {"layers": 16}, step=20)
    resumed.log(20, {"loss": 2.5})
    resumed.close()
    read = events.EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(10, 1.0), (20, 2.5)]
    assert all(math.isnan(event.value) for event in read.Scalars("validation"))
    (text,) = read.Tensors("config/text_summary")
    assert text.tensor_proto.string_val[0].decode() == "    layers: 16\n    norm: pair"


class FakeLibrary(ModuleType):
    """As much of wandb and of trackio as Accelerate's trackers call; neither is installed for the tests."""

    class Error(Exception):
        pass

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[Any] = []

    def init(self, **options: Any) -> Any:
        if options["name"] == "refused":
            raise self.Error("no key")
        self.calls.append(options)
        return SimpleNamespace(
            id=options.get("id") or f"id{len(self.calls)}",
            log=lambda metrics, step: self.calls.append((step, metrics)),
            finish=lambda: self.calls.append("finish"),
        )


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    fake = FakeLibrary("wandb")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return fake


def test_wandb(tmp_path: Path, wandb: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    trackers = open_trackers(["wandb"], tmp_path, "cora-L16", {"layers": 16})
    trackers.log(10, {"loss": float("inf")})
    trackers.close()
    options = {"project": "uncollapse", "name": "cora-L16", "config": {"layers": 16}, "dir": str(tmp_path)}
    assert wandb.calls == [options | {"id": None, "resume": "allow"}, (10, {"loss": float("inf")}), "finish"]

    wandb.calls.clear()
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    open_trackers(["wandb"], tmp_path, "cora-L16", {}, step=10)
    assert (wandb.calls[0]["id"], wandb.calls[0]["project"]) == ("id1", "theirs")  # the same run resumes
    open_trackers(["wandb"], tmp_path, "cora-L16", {}, step=0)
    assert wandb.calls[1]["id"] is None  # another run


def test_wandb_that_cannot_start(tmp_path: Path, wandb: FakeLibrary) -> None:
    with pytest.raises(UsageError, match="wandb login"):
        open_trackers(["wandb"], tmp_path, "refused", {})


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trackio = FakeLibrary("trackio")
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    trackers = open_trackers(["trackio"], tmp_path, "cora-L16", {"layers": 16})
    trackers.log(10, {"loss": 0.5})
    trackers.close()
    options = {"project": "uncollapse", "name": "cora-L16", "config": {"layers": 16}}
    assert trackio.calls == [options | {"resume": "never"}, (10, {"loss": 0.5}), "finish"]
    open_trackers(["trackio"], tmp_path, "cora-L16", {}, step=10)
    assert trackio.calls[-1]["resume"] == "allow"


@pytest.mark.parametrize("name", ["wandb", "trackio"])
@pytest.mark.parametrize("found", [None, ModuleType("empty")])  # not installed; a folder of that name
def test_a_missing_library_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, found: object
) -> None:
    monkeypatch.setitem(sys.modules, name, found)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UsageError, match=f"install {name}"):
        open_trackers(["jsonl", name], tmp_path, "run", {})
    assert lines(tmp_path) == [{"step": 1}]


def test_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UsageError, match=r"uncollapse\[train\]"):
        open_trackers(["tensorboard"], tmp_path, "run", {})


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'mlflow'.*wandb"):
        open_trackers(["jsonl", "mlflow"], tmp_path, "run", {})
    with pytest.raises(UsageError, match="folder"):
        open_trackers(["jsonl"], None, "run", {})
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_that_opened_is_closed_when_the_next_does_not(
    tmp_path: Path, wandb: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(OSError, match="directory"):
        open_trackers(["jsonl", "wandb"], tmp_path, "run", {})
    assert wandb.calls[-1] == "finish"


def test_all_are_closed_when_one_fails() -> None:
    class Failing:
        def log(self, step: int, metrics: object) -> None: ...

        def close(self) -> None:
            closed.append(self)
            raise OSError("no space")

    closed: list[object] = []
    with pytest.raises(OSError, match="no space"):
        Trackers([Failing(), Failing()]).close()
    assert len(closed) == 2
