"""A study: what was tried and how it went, in memory or in an SQLite file that a later process goes on from.

Optuna chooses what to try next. It keeps plain values in its file, no pickles; the state of its random numbers is not
kept at all: each trial draws from a seed of its own, so a study that was interrupted tries what it would have tried.
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

MAX_REPEATS = 25  # trials in a row that are not new, before it counts as certain that nothing new is left
FILE, LOCK = "study.db", "study.lock"
NAME = "uncollapse"
FACTS, SETTINGS, KEY = "facts", "settings", "key"
STEPS, SECONDS, WHY, IDLE = "steps", "seconds", "why", "idle"
STARTUP = 5  # trials that are drawn at random before those that came out well are followed
STATES: dict[str, State] = {"COMPLETE": "done", "PRUNED": "pruned", "FAIL": "failed"}
PATIENCE = 20.0  # seconds to wait for somebody else who reads or writes the file
PrunerName = Literal["median", "hyperband", "none"]
PRUNERS: tuple[PrunerName, ...] = ("median", "hyperband", "none")
WARMUP = 0.3  # share of the steps in which no trial is stopped: deep networks often begin to learn late
COMPARED = 4  # trials that must be done before one is stopped: more than those without a search


@dataclass(frozen=True)
class Pruning:
    """How trials are stopped early.

    kind: median stops a trial whose best figure so far is worse than the median of the others after as many steps;
    hyperband goes on with a third of the trials at a time; none stops nothing. steps: of a whole trial, 0 if that is
    not known.
    """

    kind: PrunerName = "median"
    steps: int = 0

    def __post_init__(self) -> None:
        if self.kind not in PRUNERS:
            raise UsageError(f"Trials are pruned by one of {', '.join(PRUNERS)}, got {self.kind!r}.")

    def pruner(self) -> Any:
        """The pruner of Optuna."""
        pruners: Any = import_optional("optuna", "tune").pruners
        warmup = math.ceil(WARMUP * self.steps)
        match self.kind:
            case "median":
                return pruners.MedianPruner(n_startup_trials=COMPARED, n_warmup_steps=warmup)
            case "hyperband":
                return pruners.HyperbandPruner(max(1, warmup), self.steps or "auto")
        return pruners.NopPruner()


@contextmanager
def open_study(
    folder: Path | None, facts: Mapping[str, Any], *, better: Better, seed: int, pruning: Pruning | None = None
) -> Iterator["Study"]:
    """The study in a folder, which is this process's alone while it is open; a new one without a folder.

    facts: what is searched, as JSON has it. A study in the same folder that has others is refused, with a UsageError
    that says what differs; so are a file that is torn and a study that another process has open.
    """
    from uncollapse.io.files import try_lock

    optuna: Any = import_optional("optuna", "tune")
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with nullcontext(True) if folder is None else try_lock(folder / LOCK) as ours:
            if not ours:
                raise UsageError(
                    f"Another process has the study in {folder} open. Wait for it, or name another folder."
                )
            made = _create_study(optuna, None if folder is None else folder / FILE, better, pruning)
            study = Study(made, better, seed, None if folder is None else folder / FILE)
            try:
                study.check(facts)
                yield study
            finally:
                study.close()
    finally:
        optuna.logging.set_verbosity(before)


class Study:
    """Trials by their numbers. file: where they are kept; None in memory."""

    def __init__(self, study: Any, better: Better, seed: int, file: Path | None) -> None:
        self.better, self.file = better, file
        self._study, self._seed = study, seed

    def check(self, facts: Mapping[str, Any]) -> None:
        """Take what is searched for a new study; raise if it is not what this one searches."""
        with storage_errors(self.file):
            there = self._study.user_attrs.get(FACTS)
            if there is None:
                self._study.set_user_attr(FACTS, dict(facts))
                return
            if there == facts:
                return
            before = there if isinstance(there, dict) else {}
            name = next(name for name in {**before, **facts} if before.get(name) != facts.get(name))
        raise UsageError(
            f"{self.file} is a study of something else: {_difference(name, before.get(name), facts.get(name))} "
            "Name another folder for this one."
        )

    def remember(self, name: str, value: Any) -> Any:
        """A fact that is known once something was run; the answer is what was known before, or the value itself."""
        with storage_errors(self.file):
            there = self._study.user_attrs.get(name)
            if there is None:
                self._study.set_user_attr(name, value)
            return value if there is None else there

    def ask(self, params: Mapping[str, Any] | None = None) -> Any:
        """A new trial of Optuna. params: what it will suggest, where that is known."""
        with storage_errors(self.file):
            waiting = (import_optional("optuna", "tune").trial.TrialState.WAITING,)
            if params is not None and not self._study.get_trials(deepcopy=False, states=waiting):  # as a kill left it
                self._study.enqueue_trial(dict(params))
            self._study.sampler = _sampler(self._seed, len(self._study.get_trials(deepcopy=False)))
            return self._study.ask()

    def suggest(self, trial: Any, space: Space, known: Mapping[str, Any]) -> dict[str, Any]:
        """What a trial tries, which the study keeps; see `space.suggest`."""
        with storage_errors(self.file):
            return suggest(trial, space, known)

    def unfinished_trials(self) -> list[Any]:
        """Trials of Optuna that a process had begun when it ended; they are taken up again where they were."""
        optuna: Any = import_optional("optuna", "tune")
        with storage_errors(self.file):
            running = self._study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
            found = []
            for trial in running:
                self._study.sampler = _sampler(self._seed, trial.number)
                found.append(optuna.trial.Trial(self._study, trial._trial_id))
            return found

    def save_settings(self, trial: Any, settings: Mapping[str, Any], key: str = "") -> None:
        """Keep what a trial tries. key: what tells it from others."""
        with storage_errors(self.file):
            trial.set_user_attr(SETTINGS, {name: _plain(value) for name, value in settings.items()})
            trial.set_user_attr(KEY, key)

    def finish_if_repeat(self, trial: Any, key: str) -> bool:
        """Whether the settings of a trial were tried before. It then has the figure of that one, and is not run."""
        same = [tried for tried in self.trials if tried.key == key and tried.number < trial.number]
        if not same:
            return False
        value = next((tried.value for tried in same if tried.value is not None), None)
        if value is None:  # that one failed, was stopped, or still runs
            self.fail(trial, f"the same as trial {same[0].number}", idle=True)
        else:
            self.finish(trial, value, steps=0, seconds=0.0, idle=True)
        return True

    def should_prune(self, trial: Any, step: int, value: float) -> bool:
        """Keep a trial's figure after a step; whether it is so far behind that it should be stopped."""
        with storage_errors(self.file):
            if not math.isfinite(value):
                return False
            if step not in trial.storage.get_trial(trial._trial_id).intermediate_values:
                trial.report(value, step)
            return trial.number > 1 and bool(trial.should_prune())  # the first two are what others are compared with

    def finish(self, trial: Any, value: float, *, steps: int, seconds: float, idle: bool = False) -> None:
        """A trial has come to its end. A figure that is no number is that of a failed one. idle: it was not run."""
        if not math.isfinite(value):
            self.fail(trial, f"its figure is {value}", steps=steps, seconds=seconds)
            return
        self._end(trial, "COMPLETE", value, {STEPS: steps, SECONDS: seconds, IDLE: idle})

    def prune(self, trial: Any, *, steps: int, seconds: float) -> None:
        """A trial was stopped since it was hopeless."""
        self._end(trial, "PRUNED", None, {STEPS: steps, SECONDS: seconds})

    def fail(self, trial: Any, why: str, *, steps: int = 0, seconds: float = 0.0, idle: bool = False) -> None:
        """A trial gave no numbers. Optuna is told that it was as bad as one that was stopped: it goes elsewhere."""
        self._end(trial, "PRUNED", None, {STEPS: steps, SECONDS: seconds, WHY: why, IDLE: idle})

    @property
    def trials(self) -> list[TrialResult]:
        """All trials, in their order."""
        with storage_errors(self.file):
            return [
                _to_result(trial) for trial in self._study.get_trials(deepcopy=False) if trial.state.name != "WAITING"
            ]

    def importances(self) -> dict[str, float]:
        """How much of the differences between trials each parameter explains; nothing if too few are done to tell."""
        from uncollapse.tuning.trial_result import parameter_importances

        with storage_errors(self.file):
            return parameter_importances(self._study)

    def close(self) -> None:
        """Let go of the file."""
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
        address = f"sqlite:///{quote(str(file.resolve()))}"  # names of folders may have ? and %
        storage = optuna.storages.RDBStorage(address, engine_kwargs={"connect_args": {"timeout": PATIENCE}})
        return optuna.create_study(storage=storage, **shared)


def _sampler(seed: int, number: int) -> Any:
    samplers: Any = import_optional("optuna", "tune").samplers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that taking parameters together is an experiment of theirs
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


def _difference(name: str, before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        inner = next(key for key in {**before, **now} if before.get(key) != now.get(key))
        return _difference(inner, before.get(inner), now.get(inner))
    if isinstance(before, list) or isinstance(now, list):
        return f"its {name} differs."
    return f"it has {name} {before!r}, and now it is {now!r}."


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else repr(value)


def check_database(file: Path) -> None:
    """Raise now if a file is torn: later on, it might be found in the middle of a trial."""
    if not file.exists():
        return
    with storage_errors(file):
        connection = sqlite3.connect(file, timeout=PATIENCE)
        try:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        finally:
            connection.close()
        if found != "ok":
            raise sqlite3.DatabaseError(found)


@contextmanager
def storage_errors(file: Path | None) -> Iterator[None]:
    """What goes wrong with the file of a study, in a sentence."""
    if file is None:
        yield
        return
    broken: Any = import_optional("sqlalchemy.exc", "tune").SQLAlchemyError
    optuna: Any = import_optional("optuna", "tune")
    try:
        yield
    except (sqlite3.Error, broken, optuna.exceptions.StorageInternalError, OSError) as error:
        why = _root(error)
        raise UsageError(f"The study {file} cannot be used: {why}. {_remedy(why)}") from error
    except UsageError:
        raise
    except (ValueError, KeyError, TypeError, RuntimeError) as error:  # it is SQLite, and not what Optuna wrote
        why = str(error).partition("\n")[0]
        raise UsageError(f"{file} is no study that can be gone on with: {why}. Move it away to begin anew.") from error


def _root(error: BaseException) -> str:
    """What SQLite itself said, below what libraries made of it."""
    found: BaseException = error
    while found.__cause__ is not None and not isinstance(found, sqlite3.Error):
        found = found.__cause__
    return str(found).partition("\n")[0]


def _remedy(why: str) -> str:
    """What to do about it."""
    if "locked" in why:
        return "Another process writes to it; wait for that."
    if "full" in why or "I/O" in why:
        return "Make room on the disk; the same command goes on then."
    if "readonly" in why or "unable to open" in why:
        return "Name a folder that can be written to."
    return "If it is torn, move it away to begin anew."
