"""An Optuna study: all trials of a search, in memory or in an SQLite file that a later process can resume.

Optuna chooses what to try next. Its file has plain values and no pickles. The state of its random numbers is not saved:
each trial draws from a seed of its own, so an interrupted study tries what it would have tried without interruption.
"""

import math
import sqlite3
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from uncollapse.errors import UsageError, import_optional
from uncollapse.tuning.space import Space, suggest
from uncollapse.tuning.trial_result import Better, State, TrialResult

MAX_REPEATS = 25  # suggestions in a row that were tried before; then the space counts as exhausted
FILE, LOCK = "study.db", "study.lock"
NAME = "uncollapse"
FACTS, SETTINGS, KEY = "facts", "settings", "key"
STEPS, SECONDS, WHY, IDLE = "steps", "seconds", "why", "idle"
STARTUP = 5  # trials that are drawn at random before the sampler learns from them
STATES: dict[str, State] = {"COMPLETE": "done", "PRUNED": "pruned", "FAIL": "failed"}
LOCK_TIMEOUT = 20.0  # seconds to wait for another process that reads or writes the file
PrunerName = Literal["median", "hyperband", "none"]
PRUNERS: tuple[PrunerName, ...] = ("median", "hyperband", "none")
WARMUP = 0.3  # share of the steps in which no trial is pruned: deep networks often start to learn late
MIN_FINISHED = 4  # trials that must be done before one is pruned: more than the two that are not searched


@dataclass(frozen=True)
class Pruning:
    """The rule by which trials are stopped early.

    kind: "median" stops a trial whose best metric so far is worse than the median of the others after as many steps;
    "hyperband" continues with a third of the trials at a time; "none" stops none. steps: steps of a whole trial, 0 if
    unknown.
    """

    kind: PrunerName = "median"
    steps: int = 0

    def __post_init__(self) -> None:
        if self.kind not in PRUNERS:
            raise UsageError(f"pruner must be one of {', '.join(PRUNERS)}, got {self.kind!r}.")

    def pruner(self) -> Any:
        """Return the Optuna pruner."""
        pruners: Any = import_optional("optuna", "tune").pruners
        warmup = math.ceil(WARMUP * self.steps)
        match self.kind:
            case "median":
                return pruners.MedianPruner(n_startup_trials=MIN_FINISHED, n_warmup_steps=warmup)
            case "hyperband":
                return pruners.HyperbandPruner(max(1, warmup), self.steps or "auto")
        return pruners.NopPruner()


@contextmanager
def open_study(
    folder: Path | None, facts: Mapping[str, Any], *, better: Better, seed: int, pruning: Pruning | None = None
) -> Iterator["Study"]:
    """Open the study in a folder, locked for this process, or a new one in memory if there is no folder.

    facts: what is searched, as JSON values. Raises UsageError if the folder has a study with other facts, if its file
    is damaged, or if another process has it open.
    """
    from uncollapse.io.files import try_lock

    optuna: Any = import_optional("optuna", "tune")
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with nullcontext(True) if folder is None else try_lock(folder / LOCK) as ours:
            if not ours:
                raise UsageError(
                    f"Another process has the study in {folder} open. Wait for it, or choose another folder."
                )
            created = _create_study(optuna, None if folder is None else folder / FILE, better, pruning)
            study = Study(created, better, seed, None if folder is None else folder / FILE)
            try:
                study.check(facts)
                yield study
            finally:
                study.close()
    finally:
        optuna.logging.set_verbosity(before)


class Study:
    """The trials of a search. file: where they are stored; None if in memory."""

    def __init__(self, study: Any, better: Better, seed: int, file: Path | None) -> None:
        self.better, self.file = better, file
        self._study, self._seed = study, seed

    def check(self, facts: Mapping[str, Any]) -> None:
        """Store what is searched in a new study; raise if an existing one searches something else."""
        with storage_errors(self.file):
            stored = self._study.user_attrs.get(FACTS)
            if stored is None:
                self._study.set_user_attr(FACTS, dict(facts))
                return
        check_facts(self.file, stored if isinstance(stored, dict) else {}, facts)

    def remember(self, name: str, value: Any) -> Any:
        """Store a fact that is known only after a run. Return the stored one if there is one, else the value."""
        with storage_errors(self.file):
            stored = self._study.user_attrs.get(name)
            if stored is None:
                self._study.set_user_attr(name, value)
            return value if stored is None else stored

    def ask(self, params: Mapping[str, Any] | None = None) -> Any:
        """Return a new Optuna trial. params: what it will suggest, if that is given."""
        with storage_errors(self.file):
            waiting = (import_optional("optuna", "tune").trial.TrialState.WAITING,)
            if params is not None and not self._study.get_trials(
                deepcopy=False, states=waiting
            ):  # one may be left by a killed process
                self._study.enqueue_trial(dict(params))
            self._study.sampler = _sampler(self._seed, len(self._study.get_trials(deepcopy=False)))
            return self._study.ask()

    def suggest(self, trial: Any, space: Space, known: Mapping[str, Any]) -> dict[str, Any]:
        """Suggest and store the settings of a trial, see `space.suggest`."""
        with storage_errors(self.file):
            return suggest(trial, space, known)

    def unfinished_trials(self) -> list[Any]:
        """Return the Optuna trials that were running when an earlier process ended, to be resumed."""
        optuna: Any = import_optional("optuna", "tune")
        with storage_errors(self.file):
            running = self._study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
            found = []
            for trial in running:
                self._study.sampler = _sampler(self._seed, trial.number)
                found.append(optuna.trial.Trial(self._study, trial._trial_id))
            return found

    def save_settings(self, trial: Any, settings: Mapping[str, Any], key: str = "") -> None:
        """Store the settings of a trial. key: identifies them."""
        with storage_errors(self.file):
            trial.set_user_attr(SETTINGS, {name: _to_json(value) for name, value in settings.items()})
            trial.set_user_attr(KEY, key)

    def finish_if_repeat(self, trial: Any, key: str) -> bool:
        """Return whether the settings were tried before. If so, end the trial with that metric, without running it."""
        same = [earlier for earlier in self.trials if earlier.key == key and earlier.number < trial.number]
        if not same:
            return False
        value = next((earlier.value for earlier in same if earlier.value is not None), None)
        if value is None:  # that one failed, was pruned, or is still running
            self.fail(trial, f"the same as trial {same[0].number}", idle=True)
        else:
            self.finish(trial, value, steps=0, seconds=0.0, idle=True)
        return True

    def should_prune(self, trial: Any, step: int, value: float) -> bool:
        """Store the metric of a trial after a step, and return whether the trial should be stopped."""
        with storage_errors(self.file):
            if not math.isfinite(value):
                return False
            if step not in trial.storage.get_trial(trial._trial_id).intermediate_values:
                trial.report(value, step)
            return trial.number > 1 and bool(trial.should_prune())  # never the two that others are compared with

    def finish(self, trial: Any, value: float, *, steps: int, seconds: float, idle: bool = False) -> None:
        """End a trial with its metric; one that is not finite counts as failed. idle: the trial was not run."""
        if not math.isfinite(value):
            self.fail(trial, f"its metric is {value}", steps=steps, seconds=seconds)
            return
        self._end(trial, "COMPLETE", value, {STEPS: steps, SECONDS: seconds, IDLE: idle})

    def prune(self, trial: Any, *, steps: int, seconds: float) -> None:
        """End a trial that was stopped early."""
        self._end(trial, "PRUNED", None, {STEPS: steps, SECONDS: seconds})

    def fail(self, trial: Any, why: str, *, steps: int = 0, seconds: float = 0.0, idle: bool = False) -> None:
        """End a trial without a metric. For Optuna it is pruned, so that it searches elsewhere."""
        self._end(trial, "PRUNED", None, {STEPS: steps, SECONDS: seconds, WHY: why, IDLE: idle})

    @property
    def trials(self) -> list[TrialResult]:
        """Return the results of all trials, in order."""
        with storage_errors(self.file):
            return [
                _to_result(trial) for trial in self._study.get_trials(deepcopy=False) if trial.state.name != "WAITING"
            ]

    def importances(self) -> dict[str, float]:
        """Return the importance of each parameter, see `trial_result.parameter_importances`."""
        from uncollapse.tuning.trial_result import parameter_importances

        with storage_errors(self.file):
            return parameter_importances(self._study)

    def close(self) -> None:
        """Close the file."""
        engine = getattr(getattr(self._study._storage, "_backend", None), "engine", None)
        if engine is not None:
            engine.dispose()

    def _end(self, trial: Any, state: str, value: float | None, facts: Mapping[str, Any]) -> None:
        states: Any = import_optional("optuna", "tune").trial.TrialState
        with storage_errors(self.file):
            for name, fact in facts.items():
                trial.set_user_attr(name, fact)
            self._study.tell(trial, value, state=states[state])


def _create_study(optuna: Any, file: Path | None, better: Better, pruning: Pruning | None) -> Any:
    direction = "maximize" if better == "higher" else "minimize"
    pruner = optuna.pruners.NopPruner() if pruning is None else pruning.pruner()
    shared = {"study_name": NAME, "direction": direction, "pruner": pruner, "load_if_exists": True}
    if file is None:
        return optuna.create_study(storage=optuna.storages.InMemoryStorage(), **shared)
    check_database(file)
    with storage_errors(file):
        address = f"sqlite:///{quote(str(file.resolve()))}"  # folder names may contain ? and %
        storage = optuna.storages.RDBStorage(address, engine_kwargs={"connect_args": {"timeout": LOCK_TIMEOUT}})
        return optuna.create_study(storage=storage, **shared)


def _sampler(seed: int, number: int) -> Any:
    samplers: Any = import_optional("optuna", "tune").samplers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna calls multivariate sampling experimental
        return samplers.TPESampler(
            seed=(1_000_003 * seed + number) % 2**32, n_startup_trials=STARTUP, multivariate=True, group=True
        )


def _to_result(trial: Any) -> TrialResult:
    facts, state = trial.user_attrs, STATES.get(trial.state.name, "open")
    return TrialResult(
        number=trial.number,
        settings=dict(facts.get(SETTINGS, {})),
        value=trial.value if state == "done" else None,
        state="failed" if WHY in facts else state,
        steps=int(facts.get(STEPS, max(trial.intermediate_values, default=0))),
        seconds=float(facts.get(SECONDS, 0.0)),
        curve=dict(sorted(trial.intermediate_values.items())),
        params=dict(trial.params),
        why=str(facts.get(WHY, "")),
        key=str(facts.get(KEY, "")),
        idle=bool(facts.get(IDLE, False)),
    )


def check_facts(file: Path | None, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise if the study in a file searches something else than now."""
    if before == now:
        return
    name = next(name for name in {**before, **now} if before.get(name) != now.get(name))
    raise UsageError(
        f"{file} is a study of something else: {_difference(name, before.get(name), now.get(name))} "
        "Name another folder for this one, with --study or study=."
    )


def _difference(name: str, before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        inner = next(key for key in {**before, **now} if before.get(key) != now.get(key))
        return _difference(inner, before.get(inner), now.get(inner))
    if isinstance(before, list) or isinstance(now, list):
        return f"its {name} differs."
    return f"it has {name}={before!r}, and now it is {now!r}."


def _to_json(value: Any) -> Any:
    """Return a value that JSON can hold."""
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else repr(value)


def check_database(file: Path) -> None:
    """Raise now if the file is damaged, not in the middle of a trial."""
    if not file.exists():
        return
    with storage_errors(file):
        connection = sqlite3.connect(file, timeout=LOCK_TIMEOUT)
        try:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        finally:
            connection.close()
        if found != "ok":
            raise sqlite3.DatabaseError(found)


@contextmanager
def storage_errors(file: Path | None) -> Iterator[None]:
    """Turn errors of the study's file into a UsageError that says what to do."""
    if file is None:
        yield
        return
    broken: Any = import_optional("sqlalchemy.exc", "tune").SQLAlchemyError
    optuna: Any = import_optional("optuna", "tune")
    try:
        yield
    except (sqlite3.Error, broken, optuna.exceptions.StorageInternalError, OSError) as error:
        why = _root_message(error)
        raise UsageError(f"The study {file} cannot be used: {why}. {_remedy(why)}") from error
    except UsageError:
        raise
    except (ValueError, KeyError, TypeError, RuntimeError) as error:  # an SQLite file that Optuna did not write
        why = str(error).partition("\n")[0]
        raise UsageError(f"{file} is not a study that can be resumed: {why}. Move it away to start again.") from error


def _root_message(error: BaseException) -> str:
    """Return the message of SQLite itself, below those of the libraries around it."""
    found: BaseException = error
    while found.__cause__ is not None and not isinstance(found, sqlite3.Error):
        found = found.__cause__
    return str(found).partition("\n")[0]


def _remedy(why: str) -> str:
    """Return what to do about an error."""
    if "locked" in why:
        return "Another process is writing to it; wait for it."
    if "full" in why or "I/O" in why:
        return "Free some disk space, then run the same command to continue."
    if "readonly" in why or "unable to open" in why:
        return "Choose a folder that is writable."
    return "If it is damaged, move it away to start again."
