"""One run: its result is found or made, and its checkpoints go when it is there."""

import dataclasses
from pathlib import Path

import pytest
from tests.lab import slope
from tests.lab.slope import RECIPE, Config

from uncollapse.errors import NotFiniteError, UsageError
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.runs.results import Results
from uncollapse.lab.runs.run_one import check_writable, checkpoint_step, run_folder, run_one, with_run_folder


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slope, "runs", [])
    monkeypatch.setattr(slope, "interrupt_at", [])


def runtime(tmp_path: Path, config: Config, **more: object) -> Runtime:
    return dataclasses.replace(with_run_folder(Runtime(device="cpu"), RECIPE, config, tmp_path / "runs"), **more)


def test_a_run_is_saved_with_its_command_and_found_again(tmp_path: Path) -> None:
    config, results = Config(slope=3.0, seed=1), Results(tmp_path / "results")
    record, new = run_one(RECIPE, config, results, runtime(tmp_path, config))
    assert new
    assert record["command"] == "uncollapse train slope --slope 3.0 --seed 1"
    assert record["figures"]["found"] == pytest.approx(3.0, abs=0.1)
    assert record["figures"]["broken"] is None  # as it stands in the file
    assert (tmp_path / "results" / "slope" / run_folder(RECIPE, config, tmp_path).name).with_suffix(".json").exists()
    assert run_one(RECIPE, config, results, runtime(tmp_path, config)) == (record, False)
    assert slope.runs == [1]
    assert run_one(RECIPE, config, results, runtime(tmp_path, config), again=True)[1]
    assert slope.runs == [1, 1]


def test_an_interrupted_run_goes_on_to_the_same_figures(tmp_path: Path) -> None:
    config, results = Config(), Results(tmp_path / "results")
    whole, _ = run_one(RECIPE, config, Results(tmp_path / "others"), runtime(tmp_path, config))
    slope.interrupt_at += [4]
    with pytest.raises(KeyboardInterrupt, match="epoch 4"):
        run_one(RECIPE, config, results, runtime(tmp_path, config))
    folder = run_folder(RECIPE, config, tmp_path / "runs")
    assert list(folder.glob("step-*"))
    assert checkpoint_step(runtime(tmp_path, config), RECIPE, config) == 4
    assert checkpoint_step(runtime(tmp_path, config, resume=False), RECIPE, config) is None
    assert results.find(RECIPE, config) is None
    seen: list[int] = []
    again, new = run_one(
        RECIPE, config, results, runtime(tmp_path, config, progress=lambda done, total, figures: seen.append(done))
    )
    assert (new, seen) == (True, [5, 6])
    assert (again["figures"], again["epochs"]) == (whole["figures"], whole["epochs"])
    assert not folder.exists()
    assert checkpoint_step(runtime(tmp_path, config), RECIPE, config) is None


def test_without_resume_old_checkpoints_are_gone_for_good(tmp_path: Path) -> None:
    config, results = Config(), Results(tmp_path / "results")
    for epochs, resume in (([5], True), ([2], False)):
        slope.interrupt_at += epochs
        with pytest.raises(KeyboardInterrupt):
            run_one(RECIPE, config, results, runtime(tmp_path, config, resume=resume))
    folder = run_folder(RECIPE, config, tmp_path / "runs")
    assert [path.name for path in folder.glob("step-*")] == ["step-000000002"]


def test_what_trackers_wrote_stays(tmp_path: Path) -> None:
    config = Config()
    run_one(RECIPE, config, Results(tmp_path / "results"), runtime(tmp_path, config, trackers=("jsonl",)))
    assert [path.name for path in run_folder(RECIPE, config, tmp_path / "runs").iterdir()] == ["metrics.jsonl"]


def test_an_old_result_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    config, results = Config(), Results(tmp_path / "results")
    record, _ = run_one(RECIPE, config, results, runtime(tmp_path, config))
    slope.interrupt_at += [2]
    with pytest.raises(KeyboardInterrupt):
        run_one(RECIPE, config, results, runtime(tmp_path, config), again=True)
    assert results.find(RECIPE, config) == record


def test_a_folder_that_cannot_be_written_is_told_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"Results.*file.slope"):
        run_one(RECIPE, Config(), Results(tmp_path / "file"), runtime(tmp_path, Config()), again=True)
    with pytest.raises(UsageError, match=r"Checkpoints.*file.x"):
        check_writable(tmp_path / "file" / "x", "Checkpoints")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(UsageError, match=r"Results.*writable"):
        run_one(RECIPE, Config(), Results(tmp_path), runtime(tmp_path, Config()))
    assert slope.runs == []


def test_a_run_that_diverges_has_a_record_that_says_so(tmp_path: Path) -> None:
    """Else a sweep that chooses would wait for it for ever."""
    diverging = dataclasses.replace(RECIPE, run=_diverge)
    results, config = Results(tmp_path / "results"), Config()
    record, new = run_one(diverging, config, results, runtime(tmp_path, config))
    assert new
    assert record["figures"] == {}
    assert record["ended"] == "The loss became nan in epoch 1, step 1."
    assert run_one(diverging, config, results, runtime(tmp_path, config)) == (record, False)


def _diverge(config: Config, runtime: Runtime) -> dict[str, object]:
    raise NotFiniteError("The loss became nan in epoch 1, step 1.")
