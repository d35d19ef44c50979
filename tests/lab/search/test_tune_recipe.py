"""Searches of recipes: most drive the trials in this process, two with workers of their own."""

import dataclasses
import json
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.lab.sweep_recipe import registered

from uncollapse.errors import UsageError
from uncollapse.lab.config import fields
from uncollapse.lab.data.graph import datasets
from uncollapse.lab.engine.runtime import PrunedError, Runtime
from uncollapse.lab.experiments.gcn import recipe as gcn_depth
from uncollapse.lab.recipe import RECIPES, Recipe
from uncollapse.lab.runs.results import Results
from uncollapse.lab.runs.run_one import run_one, with_run_folder
from uncollapse.lab.runs.sweep import Limits, Sweep
from uncollapse.lab.search.trials import TrialLimits, TrialQueue
from uncollapse.lab.search.tune_recipe import search_facts, tune_recipe
from uncollapse.lab.search.variables import SearchPlan, build_search, parse_dimension
from uncollapse.tuning.space import Between, OneOf
from uncollapse.tuning.study import FILE, Pruning, open_study
from uncollapse.tuning.trial_result import TrialResult, best_trial


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with registered(monkeypatch, "tiny_tune") as module:
        yield module


@contextmanager
def trials(recipe: Recipe, plan: SearchPlan, folder: Path, most: TrialLimits) -> Iterator[TrialQueue]:
    how = Pruning("median", plan.config.epochs)
    with open_study(
        folder, search_facts(recipe, plan, "median"), better="higher", seed=plan.config.seed, pruning=how
    ) as study:
        yield TrialQueue(recipe, plan, study, Results(folder / "results"), most)


def drive(recipe: Recipe, made: TrialQueue, folder: Path, stop: int | None = None) -> list[TrialResult]:
    """Run trials one after the other. stop: leave one half done, when so many are settled."""
    while (config := made.take()) is not None:
        if stop is not None and made.done == stop:
            return made.trials

        def judge(epoch: int, figures: Any, config: Any = config) -> bool:
            return made.should_prune(config, epoch, figures["validation"], 0.25 * epoch)

        runtime = with_run_folder(Runtime(folder, should_prune=judge), recipe, config, folder / "runs")
        try:
            run_one(recipe, config, made.results, runtime)
        except PrunedError:
            made.prune(config)
            continue
        assert made.look_up(config)
    return made.trials


def searches(
    recipe: Recipe, plan: SearchPlan, folder: Path, most: TrialLimits, stop: int | None = None
) -> list[TrialResult]:
    folder.mkdir(exist_ok=True)
    with trials(recipe, plan, folder, most) as made:
        return drive(recipe, made, folder, stop)


def plan(module: ModuleType, *vary: str, **settings: Any) -> SearchPlan:
    config = fields.build(module.Config, settings)
    return build_search(module.SEARCH, config, list(settings), vary)


def log(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines()


def choices(tried: list[TrialResult]) -> list[Any]:
    return [(each.settings, each.state, each.value, each.steps, each.idle) for each in tried]


def test_it_finds_what_is_best(tiny: ModuleType, tmp_path: Path) -> None:
    tried = searches(tiny.RECIPE, plan(tiny), tmp_path, TrialLimits(13))
    assert tried[0].settings == {"cure": "none"}
    assert tried[1].settings == {"cure": "good", "scale": 0.1}
    won = best_trial(tried)
    assert won is not None
    assert won.settings["cure"] == "good"
    assert abs(won.settings["scale"] - 0.5) < 0.2
    ran = [each for each in tried if not each.idle]
    assert len(ran) == 13
    pruned = [each for each in ran if each.state == "pruned"]
    assert pruned
    assert all(2 <= each.steps < 5 for each in pruned)  # no earlier than after three tenths
    assert all(each.seconds == 0.25 * each.steps for each in pruned)
    files = {path.name for path in (tmp_path / "results" / tiny.NAME).iterdir()}
    assert len(files) == len(ran) - len(pruned)  # a pruned run leaves no result
    assert len(log(tmp_path)) == len(set(log(tmp_path))) == 13  # and nothing is run twice


def test_a_search_that_was_killed_chooses_as_one_that_was_not(tiny: ModuleType, tmp_path: Path) -> None:
    whole = searches(tiny.RECIPE, plan(tiny), tmp_path / "whole", TrialLimits(7))
    for stop in (0, 1, 3):
        searches(tiny.RECIPE, plan(tiny), tmp_path / "parts", TrialLimits(7), stop)
    parts = searches(tiny.RECIPE, plan(tiny), tmp_path / "parts", TrialLimits(5))
    assert sum(not each.idle for each in parts) == 5
    parts = searches(
        tiny.RECIPE, plan(tiny), tmp_path / "parts", TrialLimits(7)
    )  # the same command with more trials goes on
    assert choices(parts) == choices(whole)
    begun = len(log(tmp_path / "parts"))
    searches(tiny.RECIPE, plan(tiny), tmp_path / "parts", TrialLimits(7))
    assert len(log(tmp_path / "parts")) == begun == 7


def test_a_result_without_its_trial_is_taken(tiny: ModuleType, tmp_path: Path) -> None:
    """The process was killed after the result was written, and before the study heard of it."""
    with trials(tiny.RECIPE, plan(tiny), tmp_path, TrialLimits(2)) as made:
        config = made.take()
        run_one(tiny.RECIPE, config, made.results, Runtime(tmp_path))
    tried = searches(tiny.RECIPE, plan(tiny), tmp_path, TrialLimits(2))
    assert [each.state for each in tried] == ["done", "done"]
    assert len(log(tmp_path)) == 2


def test_labels_of_test_nodes_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen on validation alone: with other test labels, the same trials, the same figures, the same winner."""
    load, tests = datasets.load_graph, []
    settings = {"nodes": 240, "layers": 3, "hidden": 8, "epochs": 10, "norm_every": 1}
    config = fields.build(RECIPES["gcn-depth"].config, settings)
    for name in ("right", "wrong"):
        if name == "wrong":

            def changed(*given: Any, **more: Any) -> datasets.Graph:
                graph = load(*given, **more)
                wrong = torch.where(graph.test, (graph.y + 1) % graph.classes, graph.y)
                return dataclasses.replace(graph, y=wrong)

            monkeypatch.setattr(datasets, "load_graph", changed)
        made = build_search(gcn_depth.SEARCH, config, settings)
        tried = searches(RECIPES["gcn-depth"], made, tmp_path / name, TrialLimits(3))
        records = Results(tmp_path / name / "results").all(RECIPES["gcn-depth"])
        tests.append((choices(tried), best_trial(tried), {r["config"]["norm"]: r["figures"]["test"] for r in records}))
    (right, first, judged), (wrong, second, misjudged) = tests
    assert right == wrong
    assert first is not None
    assert second is not None
    assert first.number == second.number
    assert judged != misjudged


def test_what_is_given_stays(tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a search ends when nothing new is left to try."""
    monkeypatch.setattr("uncollapse.lab.search.trials.MAX_REPEATS", 8)
    with trials(tiny.RECIPE, plan(tiny, "scale=0.2,0.5", cure="good"), tmp_path, TrialLimits(9)) as made:
        tried = drive(tiny.RECIPE, made, tmp_path)
        assert (made.used_up, made.done) == (True, 4)
    scales = [each.settings.get("scale") for each in tried if not each.idle]
    assert scales[:2] == [None, 0.1]  # the default is none of the choices, and is tried all the same
    assert sorted(scales[2:]) == [0.2, 0.5]
    assert all("cure" not in each.settings for each in tried)


def test_settings_that_do_not_go_together(tiny: ModuleType, tmp_path: Path) -> None:
    tried = searches(tiny.RECIPE, plan(tiny, "cure=good,broken", "scale=0.15,0.5"), tmp_path, TrialLimits(5))
    impossible = [each for each in tried if each.why == "these settings cannot be combined"]
    assert all(each.idle for each in impossible)
    assert sum(not each.idle for each in tried) == 5


def test_costs_end_a_search(tiny: ModuleType, tmp_path: Path) -> None:
    tried = searches(tiny.RECIPE, plan(tiny), tmp_path, TrialLimits(99, trainings=9.5))
    spent = sum(each.steps for each in tried)
    assert 42 < spent <= 47
    assert sum(not each.idle for each in tried) > 9  # since some were stopped early


def test_what_diverges_has_failed(tiny: ModuleType, tmp_path: Path) -> None:
    tried = searches(tiny.RECIPE, plan(tiny, fault="nan"), tmp_path, TrialLimits(3))
    assert [each.state for each in tried] == ["done", "failed", "failed"]
    assert "The loss became nan" in tried[1].why
    assert best_trial(tried) == tried[0]


def test_other_data(tiny: ModuleType, tmp_path: Path) -> None:
    searches(tiny.RECIPE, plan(tiny), tmp_path, TrialLimits(2))
    (tmp_path / "data").write_text("other")
    with pytest.raises(UsageError, match=r"data.*changed"):
        searches(tiny.RECIPE, plan(tiny), tmp_path, TrialLimits(3))


def test_no_metric_to_choose_by(tiny: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--holdout"):
        plan(tiny, holdout=0.0)
    other = dataclasses.replace(plan(tiny), search=dataclasses.replace(tiny.SEARCH, by="nothing"))
    with pytest.raises(UsageError, match=r"'nothing'.*validation"):
        searches(tiny.RECIPE, other, tmp_path, TrialLimits(1))


class Ear:
    def __init__(self, interrupt: bool = False) -> None:
        self.notes: list[str] = []
        self.interrupt = interrupt

    def handle_change(self, sweep: Sweep) -> None:
        if self.interrupt and sweep.queue.done == 2 and any(worker.steps[0] > 1 for worker in sweep.running):
            self.interrupt = False
            signal.raise_signal(signal.SIGINT)

    def handle_end(self, sweep: Sweep, config: Any) -> None:
        self.notes.append(sweep.queue.label(config))

    def note(self, words: str) -> None:
        self.notes.append(words)


def tuned(tiny: ModuleType, folder: Path, ear: Ear, number: int, jobs: int = 1, **settings: Any) -> Any:
    runtime = Runtime(folder)
    return tune_recipe(
        tiny.RECIPE,
        plan(tiny, **settings),
        folder / "study",
        runtime,
        ear,
        trial_limits=TrialLimits(number),
        limits=Limits(jobs),
    )


def test_with_workers(tiny: ModuleType, tmp_path: Path) -> None:
    """A trial whose process was killed is tried again; Ctrl-C keeps all; then it goes on, and prunes."""
    ear = Ear(interrupt=True)
    made = tuned(tiny, tmp_path, ear, 9, fault="slow")
    assert made.ended == "interrupted"
    assert [each.state for each in made.trials] == ["done", "done", "open"]
    assert any((tmp_path / "study" / "runs").rglob("step-*"))
    made = tuned(tiny, tmp_path, ear, 9, fault="slow")
    assert made.ended == "done"
    states = [each.state for each in made.trials if not each.idle]
    assert len(states) == 9
    assert set(states) == {"done", "pruned"}
    assert made.best.settings["cure"] == "good"
    assert made.unseen_metrics(made.best) == {"test": 0.5}
    assert made.line == f'uc.attach(model, "contra_norm", scale={made.best.settings["scale"]})'
    assert made.command.startswith("uncollapse train tiny-tune --scale")
    assert 0 < made.trainings < 9
    kept = json.loads((tmp_path / "study" / "tuned.json").read_text())
    assert kept["best"]["number"] == made.best.number
    assert not any((tmp_path / "study" / "runs").rglob("step-*"))  # nothing is left of those that were pruned


def test_workers_that_die_or_fail(tiny: ModuleType, tmp_path: Path) -> None:
    ear = Ear()
    made = tuned(tiny, tmp_path, ear, 2, fault="kill")
    assert [each.state for each in made.trials] == ["done", "done"]
    assert "its process was killed" in ear.notes[1]
    (tmp_path / "other").mkdir()
    made = tuned(tiny, tmp_path / "other", Ear(), 8, fault="raise")
    assert list(made.failed.values()) == ["It broke."] * 3  # nothing was done: the fault is hardly that of the settings
    assert made.best is None


@pytest.mark.parametrize("size", [0.0, 0.3, 0.9])
def test_a_torn_study(tiny: ModuleType, tmp_path: Path, size: float) -> None:
    searches(tiny.RECIPE, plan(tiny), tmp_path, TrialLimits(2))
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[: int(size * len(whole))] if size else b"no database" * 100)
    with pytest.raises(UsageError, match=r"study\.db") as caught:
        searches(tiny.RECIPE, plan(tiny), tmp_path, TrialLimits(3))
    assert "\n" not in str(caught.value)


def test_a_study_that_is_in_use(tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uncollapse.tuning.study.LOCK_TIMEOUT", 0.1)
    with trials(tiny.RECIPE, plan(tiny), tmp_path, TrialLimits(2)) as made:
        with pytest.raises(UsageError, match=r"process.*open"):
            searches(tiny.RECIPE, plan(tiny), tmp_path, TrialLimits(2))
        other = sqlite3.connect(tmp_path / FILE, isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(UsageError, match="locked"):
            made.take()
        other.close()


def test_another_study(tiny: ModuleType, tmp_path: Path) -> None:
    searches(tiny.RECIPE, plan(tiny), tmp_path, TrialLimits(1))
    with pytest.raises(UsageError, match="epochs=5"):
        searches(tiny.RECIPE, plan(tiny, epochs=6), tmp_path, TrialLimits(1))
    with pytest.raises(UsageError, match="space differs"):
        searches(tiny.RECIPE, plan(tiny, "scale=0.1..1"), tmp_path, TrialLimits(1))


def test_vary(tiny: ModuleType) -> None:
    assert parse_dimension("scale=0.01..2", tiny.Config) == Between("scale", 0.01, 2.0)
    assert parse_dimension("scale=1..2", tiny.Config) == Between("scale", 1.0, 2.0, log=False)
    assert parse_dimension("epochs=2,4", tiny.Config) == OneOf("epochs", (2, 4))
    made = plan(tiny, "scale=0.2..0.4")
    assert made.space[1] == Between("scale", 0.2, 0.4, log=False, when={"cure": ("good",)})  # as the recipe has it
    for text, words in {
        "scale": "takes FIELD=LOW..HIGH",
        "scale=2..1": "lower number first",
        "cure=a..b": "by commas",
        "cure=none,bad,worse": "cure must be one of none, good, bad",
        "nothing=1": "no setting 'nothing'",
        "seed=0,1": "seed cannot vary",
    }.items():
        with pytest.raises(UsageError, match=words):
            plan(tiny, text)
    with pytest.raises(UsageError, match="scale"):
        plan(tiny, "scale=1,2", scale=1.0)
    with pytest.raises(UsageError, match="vary"):
        plan(tiny, cure="good", scale=1.0)
