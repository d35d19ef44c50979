"""The runs of a search: an agenda that asks a study what to run next, and tells it what came of it."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from uncollapse.errors import UsageError
from uncollapse.lab.runs.results import Results
from uncollapse.lab.runs.run_queue import RunQueue
from uncollapse.lab.search.variables import RecipeSearch
from uncollapse.lab.tables.selection import metric_of
from uncollapse.tuning.space import active_dimensions, study_params
from uncollapse.tuning.study import MAX_REPEATS, Study
from uncollapse.tuning.trial_result import TrialResult, format_value

if TYPE_CHECKING:
    from uncollapse.lab.recipe import Recipe

FAILED = 3  # trials that may fail before any was done; then the fault is hardly theirs


@dataclasses.dataclass(frozen=True)
class TrialLimits:
    """How much is tried: so many trials, counted from the first, that cost no more than so many whole trainings."""

    trials: int
    trainings: float | None = None


class Trials(RunQueue):
    """The trials of a study as runs. tried: all of them. used_up: there is nothing new left to try."""

    def __init__(
        self, recipe: "Recipe", searched: RecipeSearch, study: Study, results: Results, most: TrialLimits
    ) -> None:
        super().__init__(recipe, (), results)
        self.searched, self.study, self.most = searched, study, most
        self.judged, self.used_up = searched.search.by_epoch, False
        self._trials: dict[str, Any] = {}  # those of Optuna that are open, by the identity of their configurations
        self._running: set[str] = set()
        self._spent: dict[str, float] = {}  # seconds of those that were put back
        self._seen: dict[
            str, tuple[int, float]
        ] = {}  # epochs and seconds of those that are running, when last heard of
        self._lost: set[str] = set()
        self.tried = study.trials
        for trial in study.unfinished_trials():
            if (config := self._begun(trial)) is not None:
                self.open[self.key(config)] = config
        self.found = len(self.settled)

    @property
    def settled(self) -> list[TrialResult]:
        """The trials that were run and are over."""
        return [tried for tried in self.tried if tried.state != "open" and not tried.idle]

    @property
    def done(self) -> int:
        """How many trials are settled."""
        return len(self.settled)

    @property
    def total(self) -> int:
        """All trials that are asked for."""
        return self.most.trials

    def label(self, config: Any) -> str:
        """The number of a trial, and what it tries."""
        number = self._trials[self.key(config)].number
        words = " ".join(f"{name}={format_value(value)}" for name, value in self._varied(config).items())
        return f"trial {number} ({words if number else 'without a cure'})"

    def seconds_open(self) -> float:
        """How long all takes that nobody has begun, on one core, if all trials cost as much as the default."""
        left = self.total - len(self.settled) - len(self.failed) - len(self._running)
        return max(0, left) * self.seconds(self.searched.config)

    def take(self) -> Any | None:
        """What is to be run next: first what was begun earlier; None if nothing is, or if it seems to be of no use."""
        if len(self.failed) >= FAILED and not self.settled:
            return None
        while self.open:
            config = self.open.pop(next(iter(self.open)))
            if not self.look_up(config):
                return self._started(config)
        for _ in range(MAX_REPEATS):
            if not self._may_ask():
                return None
            config = self._begun(self._asked())
            if config is not None and not self.look_up(config):
                return self._started(config)
        self.used_up = True
        return None

    def put_back(self, config: Any) -> None:
        """It was taken and not run to its end."""
        key = self.key(config)
        self._spent[key] = self._ended(key)[1]
        super().put_back(config)

    def fail(self, config: Any, why: str) -> None:
        """It was run and came to nothing. In the study it stays open: the same command tries it again."""
        self._ended(self.key(config))
        super().fail(config, why)

    def may_retry(self, config: Any) -> bool:
        """Once: a second time it is hardly an accident."""
        first = (key := self.key(config)) not in self._lost
        self._lost.add(key)
        return first

    def judge(self, config: Any, epoch: int, figure: float, seconds: float) -> bool:
        """Whether a trial is behind the others."""
        self._seen[self.key(config)] = epoch, seconds
        return self.study.should_prune(self._trials[self.key(config)], epoch, figure)

    def prune(self, config: Any) -> None:
        """A trial was stopped."""
        key = self.key(config)
        epoch, seconds = self._ended(key)
        self.study.prune(self._trials[key], steps=epoch, seconds=round(seconds, 2))
        self.tried = self.study.trials

    def look_up(self, config: Any) -> bool:
        """Whether there is a result by now, which the study is then told."""
        record = self.results.find(self.recipe, config)
        if record is None:
            return False
        self._check_data(record)
        key, by, value = self.key(config), self.searched.search.by, metric_of(record, self.searched.search.by)
        epoch, seconds = self._ended(key)
        if value is not None:
            self.study.finish(
                self._trials[key], value, steps=_epochs(record), seconds=float(record.get("seconds", 0.0))
            )
        elif record["figures"] and by not in record["figures"]:
            there = ", ".join(record["figures"])
            raise UsageError(f"A run of {self.recipe.name} has no figure {by!r} to choose by; it has {there}.")
        else:
            why = str(record.get("ended") or f"its {by} is not finite")
            self.study.fail(self._trials[key], why, steps=epoch + 1, seconds=round(seconds, 2))
        self._note(config, record)
        self.tried = self.study.trials
        return True

    def _may_ask(self) -> bool:
        """Whether another trial is wanted, and can be afforded if it goes to its end."""
        if len(self.settled) + len(self._running) + len(self.failed) >= self.total:
            return False
        if self.most.trainings is None:
            return True
        whole = max(1, getattr(self.searched.config, "epochs", 1))
        spent = sum(tried.steps for tried in self.settled) + whole * (len(self._running) + len(self.failed))
        return spent + whole <= self.most.trainings * whole

    def _asked(self) -> Any:
        """A new trial: without a cure, then what the configuration itself says, then what the study chooses."""
        is_second = len(self.study.trials) == 1
        return self.study.ask(self._default() if is_second else None)

    def _default(self) -> dict[str, Any]:
        """What the study would have suggested for the configuration itself; nothing if it cannot suggest that."""
        return study_params(self.searched.space, vars(self.searched.config)) or {}

    def _begun(self, trial: Any) -> Any | None:
        """The configuration of a trial; None if it was tried before, or cannot be had."""
        config = self._config(trial)
        key = "" if config is None else self.key(config)
        if config is None:
            self.study.fail(trial, "these settings do not go together", idle=True)
        elif self.study.finish_if_repeat(trial, key):
            config = None
        else:
            self._trials[key], self._configs[key] = trial, config
            self.study.save_settings(trial, self._varied(config), key)
        self.tried = self.study.trials
        return config

    def _config(self, trial: Any) -> Any | None:
        """What a trial runs; None if its settings do not go together."""
        config, space = self.searched.config, self.searched.space
        if trial.number == 0:
            return self.searched.baseline
        if trial.number == 1:
            if self._default():
                self.study.suggest(trial, space, vars(config))  # which keeps them
            return config
        chosen = self.study.suggest(trial, space, vars(config))
        try:
            return dataclasses.replace(config, **chosen)
        except UsageError:
            return None

    def _varied(self, config: Any) -> dict[str, Any]:
        return {
            each.field: getattr(config, each.field) for each in active_dimensions(self.searched.space, vars(config))
        }

    def _started(self, config: Any) -> Any:
        self._running.add(self.key(config))
        return config

    def _ended(self, key: str) -> tuple[int, float]:
        """Epochs and seconds of a trial that no longer runs, in all its parts, when it was last heard of."""
        self._running.discard(key)
        epoch, seconds = self._seen.pop(key, (0, 0.0))
        return epoch, self._spent.pop(key, 0.0) + seconds

    def _check_data(self, record: Mapping[str, Any]) -> None:
        """Trials on other data cannot be compared."""
        seen = record.get("data", {}).get("fingerprint")
        if seen is not None and self.study.remember("data", seen) != seen:
            raise UsageError(
                f"The data has changed since the first trial of {self.study.file}: figures cannot be compared any "
                "more. Bring the data back, or name another folder for a new study."
            )


def _epochs(record: Mapping[str, Any]) -> int:
    epochs = record.get("epochs")
    return int(epochs[-1]["epoch"]) if epochs else int(record["config"].get("epochs", 0))
