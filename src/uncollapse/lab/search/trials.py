"""Queue of a search's runs: a study proposes each trial and receives its result."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from uncollapse.errors import UsageError
from uncollapse.lab.runs.results import Results
from uncollapse.lab.runs.run_queue import RunQueue
from uncollapse.lab.search.variables import SearchPlan
from uncollapse.lab.tables.selection import metric_of
from uncollapse.tuning.space import active_dimensions, study_params
from uncollapse.tuning.study import MAX_REPEATS, Study
from uncollapse.tuning.trial_result import TrialResult, format_value

if TYPE_CHECKING:
    from uncollapse.lab.recipe import Recipe

FAILED = 3  # trials that may fail before any is done; more of them point to a fault outside the trials


@dataclasses.dataclass(frozen=True)
class TrialLimits:
    """Number of trials in total, and how many full trainings they may cost together; None for no limit."""

    trials: int
    trainings: float | None = None


class TrialQueue(RunQueue):
    """The trials of a study as runs. trials: all of them. used_up: whether nothing new is left to try."""

    def __init__(self, recipe: "Recipe", plan: SearchPlan, study: Study, results: Results, limits: TrialLimits) -> None:
        super().__init__(recipe, (), results)
        self.plan, self.study, self.limits = plan, study, limits
        self.prune_by, self.used_up = plan.search.by_epoch, False
        self._open_trials: dict[str, Any] = {}  # Optuna's trials, by the identity of their configurations
        self._running: set[str] = set()
        self._spent: dict[str, float] = {}  # seconds of runs that were put back
        self._seen: dict[str, tuple[int, float]] = {}  # last reported epoch and seconds of running trials
        self._killed: set[str] = set()
        self.trials = study.trials
        for trial in study.unfinished_trials():
            if (config := self._begin(trial)) is not None:
                self.open[self.key(config)] = config
        self.found = len(self.finished)

    @property
    def finished(self) -> list[TrialResult]:
        """Trials that ran and have ended."""
        return [trial for trial in self.trials if trial.state != "open" and not trial.idle]

    @property
    def done(self) -> int:
        """Number of trials that have ended."""
        return len(self.finished)

    @property
    def total(self) -> int:
        """Number of trials that were requested."""
        return self.limits.trials

    def label(self, config: Any) -> str:
        """Return the number of a trial and its settings."""
        number = self._open_trials[self.key(config)].number
        words = " ".join(f"{name}={format_value(value)}" for name, value in self._settings(config).items())
        return f"trial {number} ({words if number else 'without a cure'})"

    def seconds_open(self) -> float:
        """Return the estimated seconds of all trials that have not started, if each costs as much as the default."""
        left = self.total - len(self.finished) - len(self.failed) - len(self._running)
        return max(0, left) * self.seconds(self.plan.config)

    def take(self) -> Any | None:
        """Return the next configuration, interrupted ones first; None at the end, or if all trials fail."""
        if len(self.failed) >= FAILED and not self.finished:
            return None
        while self.open:
            config = self.open.pop(next(iter(self.open)))
            if not self.look_up(config):
                return self._mark_running(config)
        for _ in range(MAX_REPEATS):
            if not self._may_ask():
                return None
            config = self._begin(self._ask())
            if config is not None and not self.look_up(config):
                return self._mark_running(config)
        self.used_up = True
        return None

    def put_back(self, config: Any) -> None:
        """Reopen a configuration that was taken but not finished."""
        key = self.key(config)
        self._spent[key] = self._mark_ended(key)[1]
        super().put_back(config)

    def fail(self, config: Any, why: str) -> None:
        """Record that a run failed. In the study it stays open: the same command tries it again."""
        self._mark_ended(self.key(config))
        super().fail(config, why)

    def may_retry(self, config: Any) -> bool:
        """Return True once per trial: a second kill is hardly an accident."""
        first = (key := self.key(config)) not in self._killed
        self._killed.add(key)
        return first

    def should_prune(self, config: Any, epoch: int, metric: float, seconds: float) -> bool:
        """Return whether the pruner stops a trial, which is behind the others."""
        self._seen[self.key(config)] = epoch, seconds
        return self.study.should_prune(self._open_trials[self.key(config)], epoch, metric)

    def prune(self, config: Any) -> None:
        """Record that a trial was stopped early."""
        key = self.key(config)
        epoch, seconds = self._mark_ended(key)
        self.study.prune(self._open_trials[key], steps=epoch, seconds=round(seconds, 2))
        self.trials = self.study.trials

    def look_up(self, config: Any) -> bool:
        """Return whether a result exists by now, and report it to the study."""
        record = self.results.find(self.recipe, config)
        if record is None:
            return False
        self._check_data(record)
        key, by, value = self.key(config), self.plan.search.by, metric_of(record, self.plan.search.by)
        epoch, seconds = self._mark_ended(key)
        if value is not None:
            self.study.finish(
                self._open_trials[key], value, steps=_epochs(record), seconds=float(record.get("seconds", 0.0))
            )
        elif record["figures"] and by not in record["figures"]:
            there = ", ".join(record["figures"])
            raise UsageError(f"A run of {self.recipe.name} has no metric {by!r} to choose by; it has {there}.")
        else:
            why = str(record.get("ended") or f"its {by} is not finite")
            self.study.fail(self._open_trials[key], why, steps=epoch + 1, seconds=round(seconds, 2))
        self._add_record(config, record)
        self.trials = self.study.trials
        return True

    def _may_ask(self) -> bool:
        """Return whether another trial is within the limits, if it runs to its end."""
        if len(self.finished) + len(self._running) + len(self.failed) >= self.total:
            return False
        if self.limits.trainings is None:
            return True
        whole = max(1, getattr(self.plan.config, "epochs", 1))
        spent = sum(trial.steps for trial in self.finished) + whole * (len(self._running) + len(self.failed))
        return spent + whole <= self.limits.trainings * whole

    def _ask(self) -> Any:
        """Return a new trial: first without a cure, then the configuration itself, then what the study proposes."""
        is_second = len(self.study.trials) == 1
        return self.study.ask(self._default_params() if is_second else None)

    def _default_params(self) -> dict[str, Any]:
        """Return the parameters that the study would suggest for the configuration itself; none if it cannot."""
        return study_params(self.plan.space, vars(self.plan.config)) or {}

    def _begin(self, trial: Any) -> Any | None:
        """Return the configuration of a new trial; None if it is a repeat or not allowed."""
        config = self._config(trial)
        key = "" if config is None else self.key(config)
        if config is None:
            self.study.fail(trial, "these settings cannot be combined", idle=True)
        elif self.study.finish_if_repeat(trial, key):
            config = None
        else:
            self._open_trials[key], self._configs[key] = trial, config
            self.study.save_settings(trial, self._settings(config), key)
        self.trials = self.study.trials
        return config

    def _config(self, trial: Any) -> Any | None:
        """Return the configuration of a trial; None if its settings cannot be combined."""
        config, space = self.plan.config, self.plan.space
        if trial.number == 0:
            return self.plan.baseline
        if trial.number == 1:
            if self._default_params():
                self.study.suggest(trial, space, vars(config))  # which stores them
            return config
        chosen = self.study.suggest(trial, space, vars(config))
        try:
            return dataclasses.replace(config, **chosen)
        except UsageError:
            return None

    def _settings(self, config: Any) -> dict[str, Any]:
        dimensions = active_dimensions(self.plan.space, vars(config))
        return {dimension.field: getattr(config, dimension.field) for dimension in dimensions}

    def _mark_running(self, config: Any) -> Any:
        self._running.add(self.key(config))
        return config

    def _mark_ended(self, key: str) -> tuple[int, float]:
        """Return the last reported epoch of a trial that no longer runs, and its seconds over all attempts."""
        self._running.discard(key)
        epoch, seconds = self._seen.pop(key, (0, 0.0))
        return epoch, self._spent.pop(key, 0.0) + seconds

    def _check_data(self, record: Mapping[str, Any]) -> None:
        """Raise if the data has changed: trials on other data cannot be compared."""
        seen = record.get("data", {}).get("fingerprint")
        if seen is not None and self.study.remember("data", seen) != seen:
            raise UsageError(
                f"The data has changed since the first trial of {self.study.file}: its trials can no longer be "
                "compared. Restore the data, or name another folder for a new study."
            )


def _epochs(record: Mapping[str, Any]) -> int:
    epochs = record.get("epochs")
    return int(epochs[-1]["epoch"]) if epochs else int(record["config"].get("epochs", 0))
