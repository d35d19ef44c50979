"""Tune a recipe: search for the cure, place and strength that are best on validation; a search can be resumed."""

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
from uncollapse.lab.search.trials import TrialLimits, TrialQueue
from uncollapse.lab.search.variables import SearchPlan
from uncollapse.tuning import space
from uncollapse.tuning.study import PrunerName, Pruning, check_facts, open_study
from uncollapse.tuning.trial_result import TrialResult, best_trial

if TYPE_CHECKING:
    from uncollapse.lab.recipe import Recipe

RESULTS, RUNS, OUTCOME, PAGE = "results", "runs", "tuned.json", "tuned.html"  # in the folder of a study
UNSEEN = ("test", "dev")  # metrics that the search does not use


@dataclass(frozen=True)
class Outcome:
    """What a search has found so far.

    used_up: whether nothing new is left to try. shares: the part of the differences that each parameter explains.
    records: of the winner and of the run without a cure, by trial number, if they are done. failed: error messages, by
    the label of a trial.
    """

    recipe: "Recipe"
    plan: SearchPlan
    ended: StopReason
    used_up: bool
    trials: list[TrialResult]
    shares: Mapping[str, float]
    records: Mapping[int, Mapping[str, Any]]
    failed: Mapping[str, str]

    @property
    def best(self) -> TrialResult | None:
        """Best trial; the run without a cure if none is better."""
        return best_trial(self.trials)

    @property
    def baseline(self) -> TrialResult | None:
        """Trial without a cure, once it is done."""
        return next((trial for trial in self.trials if trial.number == 0 and trial.value is not None), None)

    @property
    def line(self) -> str | None:
        """Line of code for the user's own model; None if no cure was better, or the recipe has no such line."""
        return self.plan.search.line(self.config) if self.best is not None and self.best.number > 0 else None

    @property
    def command(self) -> str | None:
        """Command that repeats the best trial."""
        return None if self.best is None else fields.command_line(self.recipe.name, self.config)

    @property
    def config(self) -> Any:
        """Configuration of the best trial."""
        if self.best is None:
            raise UsageError("No trial is done, so there is no best one.")
        return trial_config(self.plan, self.best)

    @property
    def trainings(self) -> float:
        """Cost of all trials, in full trainings."""
        whole = max(1, getattr(self.plan.config, "epochs", 1))
        return sum(trial.steps for trial in self.trials) / whole

    @property
    def seconds(self) -> float:
        """Cost of all trials, in seconds of training."""
        return sum(trial.seconds for trial in self.trials)

    def unseen_metrics(self, trial: TrialResult) -> dict[str, float]:
        """Return the metrics of a trial that the search does not use: those on test or development data."""
        metrics = self.records.get(trial.number, {}).get("figures", {})
        return {name: metrics[name] for name in UNSEEN if name in metrics}

    def facts(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        best, base = self.best, self.baseline
        return {
            "recipe": self.recipe.name,
            "version": __version__,
            "config": dataclasses.asdict(self.plan.config),
            "space": space.facts(self.plan.space),
            "by": self.plan.search.by,
            "ended": self.ended,
            "best": None if best is None else best.facts() | {"unseen": self.unseen_metrics(best)},
            "baseline": None if base is None else base.facts() | {"unseen": self.unseen_metrics(base)},
            "line": self.line,
            "command": self.command,
            "cost": {"trainings": round(self.trainings, 3), "seconds": round(self.seconds, 1)},
            "mattered": dict(self.shares),
            "failed": dict(self.failed),
            "trials": [trial.facts() for trial in self.trials],
        }


def tune_recipe(
    recipe: "Recipe",
    plan: SearchPlan,
    folder: Path,
    runtime: Runtime,
    listener: SweepListener,
    *,
    trial_limits: TrialLimits,
    limits: Limits,
    pruning: PrunerName = "median",
) -> Outcome:
    """Search, or resume a search whose study, results and checkpoints are in the folder.

    Trial 0 is the run without a cure, trial 1 the configuration as it is; then Optuna proposes what does well on
    validation. The `facts` of the outcome are written to `tuned.json`.

    Args:
        recipe: The experiment.
        plan: Start configuration and search space; the seed of the runs is also that of the search.
        folder: Folder of the study. A folder with another study is refused.
        runtime: Runtime of the runs.
        listener: Receives the events of the search.
        trial_limits: Number and cost of all trials.
        limits: Processes, and seconds of this call.
        pruning: How trials are stopped early.
    """
    config, results = plan.config, Results(folder / RESULTS)
    how = Pruning(pruning, getattr(config, "epochs", 0))
    with open_study(
        folder, search_facts(recipe, plan, pruning), better="higher", seed=config.seed, pruning=how
    ) as study:
        queue = TrialQueue(recipe, plan, study, results, trial_limits)
        ended = Sweep(queue, folder / RUNS, runtime, limits, listener).run()
        failed = {queue.label(queue.config(key)): why for key, why in queue.failed.items()}
        best = best_trial(queue.trials)
        shown = {trial.number: trial for trial in (*queue.trials[:1], *([best] if best else []))}
        records = {n: results.find(recipe, trial_config(plan, trial)) or {} for n, trial in shown.items()}
        outcome = Outcome(recipe, plan, ended, queue.used_up, queue.trials, study.importances(), records, failed)
    files.write(folder / OUTCOME, json.dumps(outcome.facts(), indent=1, ensure_ascii=False) + "\n")
    return outcome


def trial_config(plan: SearchPlan, trial: TrialResult) -> Any:
    """Return the configuration of a trial."""
    if trial.number < 2:
        return plan.config if trial.number else plan.baseline
    own = fields.parse_values(type(plan.config), trial.settings)
    return dataclasses.replace(plan.config, **own)


def search_facts(recipe: "Recipe", plan: SearchPlan, pruning: PrunerName) -> dict[str, Any]:
    """Return what identifies a study, for JSON; a study with other facts is another one."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(plan.config)))
    return {
        "recipe": recipe.name,
        "settings": plain,
        "space": json.loads(json.dumps(space.facts(plan.space))),
        "by": plan.search.by,
        "pruning": pruning,
    }


def check_outcome(path: Path, known: Mapping[str, Any], recipe: "Recipe", plan: SearchPlan) -> None:
    """Raise if the outcome of an earlier search, as `tuned.json` has it, belongs to a study of something else."""
    now = search_facts(recipe, plan, "median")
    before = {name: known.get("config" if name == "settings" else name) for name in now}
    check_facts(path, before | {"pruning": now["pruning"]}, now)  # the file does not say how trials were stopped


def estimate_seconds(recipe: "Recipe", plan: SearchPlan, trials: int) -> float:
    """Return the estimated seconds of a search on one core, if no trial is stopped early."""
    return recipe.cost(plan.baseline) + (trials - 1) * recipe.cost(plan.config)
