"""Tune a recipe: which cure, where and how strong, chosen on validation by a search that can be gone on with."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uncollapse import __version__
from uncollapse.errors import UsageError
from uncollapse.io import files
from uncollapse.lab.config import fields
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.runs.results import Results
from uncollapse.lab.runs.sweep import Limits, StopReason, Sweep, SweepListener
from uncollapse.lab.search.trials import TrialLimits, Trials
from uncollapse.lab.search.variables import RecipeSearch
from uncollapse.tuning import space
from uncollapse.tuning.study import PrunerName, Pruning, open_study
from uncollapse.tuning.trial_result import TrialResult, best_trial

if TYPE_CHECKING:
    from uncollapse.lab.recipe import Recipe

RESULTS, RUNS, OUTCOME, PAGE = "results", "runs", "tuned.json", "tuned.html"  # in the folder of a study
JUDGED = ("test", "dev")  # figures that no choice looks at


@dataclass(frozen=True)
class Outcome:
    """What a search has found so far.

    tried: all trials. shares: how much of the differences each parameter explains. records: of the winner and of the
    run without a cure, where they are done. failed: why, by the words of a trial.
    """

    recipe: "Recipe"
    searched: RecipeSearch
    ended: StopReason
    used_up: bool
    tried: list[TrialResult]
    shares: Mapping[str, float]
    records: Mapping[int, Mapping[str, Any]]
    failed: Mapping[str, str]

    @property
    def best(self) -> TrialResult | None:
        """The winner; the run without a cure if none is better."""
        return best_trial(self.tried)

    @property
    def baseline(self) -> TrialResult | None:
        """The run without a cure, once it is done."""
        return next((tried for tried in self.tried if tried.number == 0 and tried.value is not None), None)

    @property
    def line(self) -> str | None:
        """What to copy: the code for a model of one's own; None if no cure was best, or the recipe has none."""
        return None if not self._cured else self.searched.search.line(self.config)

    @property
    def command(self) -> str | None:
        """The command that repeats the winner."""
        return None if self.best is None else fields.command_line(self.recipe.name, self.config)

    @property
    def config(self) -> Any:
        """The configuration of the winner."""
        won = self.best
        if won is None:
            raise UsageError("No trial is done, so there is no best one.")
        return trial_config(self.searched, won)

    @property
    def trainings(self) -> float:
        """What all trials cost, in whole trainings."""
        whole = max(1, getattr(self.searched.config, "epochs", 1))
        return sum(tried.steps for tried in self.tried) / whole

    @property
    def seconds(self) -> float:
        """What all trials cost, in seconds of their training."""
        return sum(tried.seconds for tried in self.tried)

    @property
    def _cured(self) -> bool:
        return self.best is not None and self.best.number > 0

    def judged(self, tried: TrialResult) -> dict[str, float]:
        """The figures of a trial that the search has not looked at: on test or development data."""
        figures = self.records.get(tried.number, {}).get("figures", {})
        return {name: figures[name] for name in JUDGED if name in figures}

    def facts(self) -> dict[str, Any]:
        """All of it for JSON."""
        won, base = self.best, self.baseline
        return {
            "recipe": self.recipe.name,
            "version": __version__,
            "config": dataclasses.asdict(self.searched.config),
            "space": space.facts(self.searched.space),
            "by": self.searched.search.by,
            "ended": self.ended,
            "best": None if won is None else won.facts() | {"judged": self.judged(won)},
            "baseline": None if base is None else base.facts() | {"judged": self.judged(base)},
            "line": self.line,
            "command": self.command,
            "cost": {"trainings": round(self.trainings, 3), "seconds": round(self.seconds, 1)},
            "mattered": dict(self.shares),
            "failed": dict(self.failed),
            "trials": [tried.facts() for tried in self.tried],
        }


def tune_recipe(
    recipe: "Recipe",
    searched: RecipeSearch,
    folder: Path,
    runtime: Runtime,
    teller: SweepListener,
    *,
    most: TrialLimits,
    limits: Limits,
    pruning: PrunerName = "median",
) -> Outcome:
    """Search, or go on with a search. What is there of it lies in the folder: the study, results, checkpoints.

    Trial 0 is the run without a cure, trial 1 the configuration as it is; then Optuna chooses by what came out well on
    validation. `facts` of what came of it are written to `tuned.json`.

    Args:
        recipe: the experiment.
        searched: from which configuration, over which space; the seed of the runs is that of the search.
        folder: of the study. One that has a study of something else is refused.
        runtime: what runs are told.
        teller: hears how it goes.
        most: how much is tried, all in all.
        limits: processes, and seconds of this call.
        pruning: how trials are stopped early.
    """
    config, results = searched.config, Results(folder / RESULTS)
    how = Pruning(pruning, getattr(config, "epochs", 0))
    with open_study(
        folder, search_facts(recipe, searched, pruning), better="higher", seed=config.seed, pruning=how
    ) as study:
        trials = Trials(recipe, searched, study, results, most)
        ended = Sweep(trials, folder / RUNS, runtime, limits, teller).run()
        failed = {trials.label(trials.config(key)): why for key, why in trials.failed.items()}
        won = best_trial(trials.tried)
        shown = {tried.number: tried for tried in (*trials.tried[:1], *([won] if won else []))}
        records = {n: results.find(recipe, trial_config(searched, tried)) or {} for n, tried in shown.items()}
        made = Outcome(recipe, searched, ended, trials.used_up, trials.tried, study.importances(), records, failed)
    files.write(folder / OUTCOME, json.dumps(made.facts(), indent=1, ensure_ascii=False) + "\n")
    return made


def trial_config(searched: RecipeSearch, tried: TrialResult) -> Any:
    """The configuration of a trial."""
    if tried.number < 2:
        return searched.config if tried.number else searched.baseline
    own = fields.parse_values(type(searched.config), tried.settings)
    return dataclasses.replace(searched.config, **own)


def search_facts(recipe: "Recipe", searched: RecipeSearch, pruning: PrunerName) -> dict[str, Any]:
    """What is searched, as JSON has it; a study that has other facts is another one."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(searched.config)))
    return {
        "recipe": recipe.name,
        "settings": plain,
        "space": json.loads(json.dumps(space.facts(searched.space))),
        "by": searched.search.by,
        "pruning": pruning,
    }


def estimate_seconds(recipe: "Recipe", searched: RecipeSearch, trials: int) -> float:
    """Roughly the seconds of a search on one core, if none of its trials is stopped."""
    return recipe.cost(searched.baseline) + (trials - 1) * recipe.cost(searched.config)
