"""Diagnose a model while it trains: layer curves in your logger, and rules that warn, stop or save."""

import inspect
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from uncollapse import distributed
from uncollapse.backbones import forward
from uncollapse.diagnosis.result import Diagnosis
from uncollapse.diagnosis.run import diagnose
from uncollapse.diagnosis.target import Plan
from uncollapse.errors import did_you_mean
from uncollapse.monitoring import journal
from uncollapse.monitoring.held_batches import hold_batches, preserve_random_states
from uncollapse.monitoring.journal import Cost, Record, State
from uncollapse.monitoring.layer_curves import (
    Sink,
    check_measures,
    curves,
    layer_values,
    make_alerts,
    make_sinks,
    make_tables,
    scalars,
)
from uncollapse.monitoring.rules import WINDOW, Rule, check_rules

__all__ = ["CollapseWarning", "Cost", "Monitor", "Record", "Rule"]

ALERT = "Collapse"  # title of an alert
CURVES = ("effective_rank", "mean_cosine", "uniformity")
OPTIONS = [name for name in inspect.signature(diagnose).parameters if name not in ("model", "batches", "pairs")]


class CollapseWarning(UserWarning):
    """A rule of a monitor was met, or a measurement, a logger or `save` failed."""


class Monitor:
    """Diagnose a model every few training steps, on batches that the monitor holds.

    Training is not affected: with and without a monitor it gives the same weights. A measurement costs a forward pass
    over the held batches and about a fifth more. With several processes, call it in all of them; rank 0 measures.

    Args:
        batches: as for `diagnose`. The first `max_batches` are held and used for every measurement.
        every: number of steps between measurements; None: at evaluations, or when you call `measure`.
        measures: metrics whose curves to log, from `uncollapse.diagnosis.measures.MEASURES`.
        rules: conditions for a collapse, and what happens then.
        folder: for monitor.jsonl, with one line per measurement; first.json, the diagnosis that rules compare with;
            and collapse.json, the diagnosis at which a rule was met. A resumed run continues there.
        log: a SummaryWriter, a run of W&B or Trackio, an Accelerator, a function of (step, values), or a list of these.
            W&B and Trackio also get a table of all layers at the start, and a table and an alert when a rule is met.
        save: called with the step when a rule has then="save", and again at the next measurement if it failed; the
            trainers of HF and Lightning save by themselves.
        max_batches: how many batches to hold; this bounds the cost.
        max_share: skip a measurement while measurements have taken more than this share of the time.
        overwrite: replace another run in the folder, if this one starts from the beginning.
        options: those of `diagnose`: layers, at, modules, part, tokens, layout, attention, call, labels, plan …; no
            random baseline is measured.

    >>> import torch
    >>> from uncollapse.monitoring.monitor import Monitor, Rule
    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2)
    >>> monitor = Monitor([torch.randn(8, 16, 32)], every=10, rules=[Rule("effective_rank", falls_by=0.5, then="stop")])
    >>> [step for step in range(25) if monitor.step(model, step)]
    [0, 10, 20]
    """

    def __init__(
        self,
        batches: Iterable[Any],
        *,
        every: int | None = 200,
        measures: Sequence[str] = CURVES,
        rules: Rule | Sequence[Rule] = (),
        folder: str | Path | None = None,
        log: Any = (),
        save: Callable[[int], Any] | None = None,
        max_batches: int = 4,
        max_share: float | None = None,
        overwrite: bool = False,
        **options: Any,
    ) -> None:
        rules = (rules,) if isinstance(rules, Rule) else rules
        _check_frequency(every, max_share)
        check_measures(measures)
        check_rules(rules)
        _check_options(options)
        self.every, self.measures, self.rules = every, tuple(measures), tuple(rules)
        self.folder = None if folder is None else Path(folder)
        self.max_share, self.overwrite, self.save = max_share, overwrite, save
        self.options = options | {"plan": replace(options.get("plan", Plan()), baseline=0)}
        self.should_stop = False  # a rule that says "stop" was met
        self._batches = hold_batches(batches, max_batches)
        self._sinks = make_sinks(log)
        self._trackers = tuple(log) if isinstance(log, list | tuple) else (log,)
        self._state, self._restored = State(), False
        self._began: float | None = None  # when the first step was seen
        self._fits = False  # whether rules and measures are known to fit the model
        self._failing = False
        self._owed = False  # a rule asks for a checkpoint that could not be saved so far
        self._broken: set[tuple[str, int]] = set()  # loggers, tables and alerts that failed; each is reported once
        self._problems: list[str] = []  # of loggers and `save`, still to be reported

    @classmethod
    def early(cls, batches: Iterable[Any], *, steps: int, then: Any = "stop", **options: Any) -> "Monitor":
        """Return a monitor that stops a training which is likely to fail, after at most a twentieth of it.

        It measures at the start and every twentieth of the steps, with the rules of `Rule.early`; see there how often
        it is right. After an alarm, `uc.diagnose(model, batches, causes=True)` says why, and what to try.

        Args:
            batches: as in `Monitor`.
            steps: of the whole training.
            then: "stop", "warn" or "save".
            options: those of `Monitor`.

        >>> import torch
        >>> from uncollapse.monitoring.monitor import Monitor
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2)
        >>> monitor = Monitor.early([torch.randn(8, 16, 32)], steps=200)
        >>> [step for step in range(25) if monitor.step(model, step)], monitor.should_stop
        ([0, 10, 20], False)
        """
        given: dict[str, Any] = {"every": max(1, steps // WINDOW[1]), "rules": Rule.early(steps, then=then)}
        return cls(batches, **given | options)

    def __repr__(self) -> str:
        rules = "; ".join(map(str, self.rules)) or "none"
        return f"<Monitor: every {self.every} steps, rules: {rules}, {self._state.measured} measurements so far>"

    def step(self, model: nn.Module, step: int, *, epoch: float | None = None) -> Record | None:
        """Measure if the step is due; call this after each step of the training. Return the measurement, or None.

        Args:
            model: the model as it is trained, also compiled or wrapped for several processes.
            step: its number; multiples of `every` are measured.
            epoch: for the record.
        """
        self._check_save()
        return self.visit(model, step, done=step - 1, due=self.is_due(step), epoch=epoch)

    def measure(self, model: nn.Module, step: int, *, epoch: float | None = None) -> Record | None:
        """Measure now, such as at an evaluation. None if the step was measured already or `max_share` is used up."""
        self._check_save()
        return self.visit(model, step, done=step - 1, due=True, epoch=epoch)

    def watch(self, trainer: Any) -> None:
        """Monitor a HuggingFace Trainer; call this before `trainer.train()`.

        Without a folder, the monitor writes to "collapse" in the trainer's output folder.
        """
        from uncollapse.monitoring import hf_callback

        if self.folder is None:
            self.folder = Path(trainer.args.output_dir) / "collapse"
        trainer.add_callback(hf_callback.MonitorCallback(self, trainer))

    def lightning(self) -> Any:
        """Return a callback for `lightning.pytorch.Trainer(callbacks=[…])`; it logs to the trainer's loggers."""
        from uncollapse.monitoring import lightning_callback

        return lightning_callback.make_callback(self)

    @property
    def met(self) -> dict[str, int]:
        """The rules that were met so far, each with its step; known on rank 0."""
        return dict(self._state.met)

    @property
    def cost(self) -> Cost:
        """What the measurements have cost so far; known on rank 0."""
        state, elapsed = self._state, self._elapsed_seconds()
        share = state.seconds / elapsed if elapsed > 0 else 0.0
        return Cost(state.measured, state.seconds, share, state.skipped)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed training needs, as plain values, for your own checkpoint."""
        return self._state.brief(self._elapsed_seconds()) | {"reference": self._state.reference}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`. Later lines in the folder, if there is one, are dropped."""
        self._state, self._restored, self._began = State.of(state), True, None

    def is_due(self, step: int) -> bool:
        """Return whether the step is a multiple of `every`."""
        return self.every is not None and step % self.every == 0

    def visit(
        self,
        model: nn.Module,
        step: int,
        *,
        done: int,
        due: bool,
        start: bool = False,
        epoch: float | None = None,
        log: tuple[Sink, ...] = (),
        trackers: Sequence[Any] = (),
    ) -> Record | None:
        """Do what `step` and `measure` do, for adapters to trainers.

        Args:
            model, step, epoch: as in `step`.
            done: if the run is resumed here, measurements up to this step are kept and later ones dropped.
            due: whether to measure, unless the step was measured already or `max_share` is used.
            start: whether a training starts or resumes here; the first call always counts as a start.
            log: loggers in addition to the monitor's own.
            trackers: what a trainer logs to, if it can alert or show tables.
        """
        step, start = int(step), start or self._began is None
        if not start and not due:
            return None

        def work() -> Record | None:
            if start:
                self._begin(done)
            return self._measure_now(model, step, epoch, (log, trackers)) if due else None

        record = distributed.on_rank_zero(work, "The monitor")
        self.should_stop = (self.should_stop and not start) or (record is not None and record.stop)
        self._began = self._began or time.perf_counter()
        if record is not None:
            self._warn(record)
        return record

    def _begin(self, done: int) -> None:
        """Resume the run in the folder, or make sure that another run is not lost; on rank 0."""
        if self.folder is None:
            self._state = self._state if self._restored or done > 0 else State()
            self._state.elapsed = self._elapsed_seconds() if self._restored or done > 0 else 0.0
        elif self._restored:
            journal.Journal(self.folder).resume_from(self._state)
        else:
            self._state = journal.Journal(self.folder).resume(done, self.overwrite)
        self._restored, self._owed, self._began = False, False, time.perf_counter()

    def _measure_now(
        self, model: nn.Module, step: int, epoch: float | None, log: tuple[tuple[Sink, ...], Sequence[Any]]
    ) -> Record | None:
        """Measure, apply the rules, write and log; on rank 0 only."""
        if not self._is_wanted(step):
            return None
        started, state = time.perf_counter(), self._state.copy()  # the state changes only once it is written
        found, error = self._diagnose(forward.unwrap(model))
        if found is not None and not self._fits:
            _check_fit(found, self.rules, self.measures, state.reference)
            self._fits = True
        if found is not None and not state.reference:
            state.reference = layer_values(found)
            self._save_diagnosis(journal.FIRST, found, {"step": step, "epoch": epoch})
        met = state.apply_rules(self.rules, found, error, step)
        chosen = {} if found is None else curves(found, self.measures)
        actions, sentences = {rule.then for rule, _ in met}, tuple(dict.fromkeys(sentence for _, sentence in met))
        seconds = time.perf_counter() - started
        state.last, state.measured, state.seconds = step, state.measured + 1, state.seconds + seconds
        why = None if error is None else f"{type(error).__name__}: {error}"
        record = Record(step, epoch, seconds, chosen, sentences, "stop" in actions, "save" in actions, why, found)
        self._write(record, state)
        self._state = state
        self._log(record, (*self._sinks, *log[0]), (*self._trackers, *log[1]))
        self._save(record)
        return record

    def _is_wanted(self, step: int) -> bool:
        """Return whether this step is new and measurements have not taken too much time."""
        last = self._state.last
        if last is not None and step < last:
            raise ValueError(f"Step {step} comes after step {last}. A monitor follows one training: create another.")
        too_slow = self.max_share is not None and self._state.measured > 0 and self.cost.share > self.max_share
        self._state.skipped += too_slow and step != last
        return not too_slow and step != last

    def _diagnose(self, model: nn.Module) -> tuple[Diagnosis | None, Exception | None]:
        """Return the diagnosis, or the error if there is none."""
        forward.check_unsharded(model)
        try:
            with preserve_random_states():
                return diagnose(model, self._batches, **self.options), None
        except Exception as error:
            if not self._state.reference:  # nothing is lost yet, and the options may not fit the model
                raise
            return None, error  # a failed measurement does not end a training

    def _write(self, record: Record, state: State) -> None:
        if self.folder is not None:
            if record.met and record.diagnosis is not None:
                facts = {"step": record.step, "epoch": record.epoch, "met": list(record.met), "rules": state.met}
                self._save_diagnosis(journal.COLLAPSE, record.diagnosis, facts)
            journal.Journal(self.folder).append(record.line() | {"state": state.brief(self._elapsed_seconds())})

    def _log(self, record: Record, loggers: tuple[Sink, ...], trackers: tuple[Any, ...]) -> None:
        """Log a record, and alert where a rule was met.

        A logger that fails, such as one without a network, does not stop the training or others. Trackers get a table
        of all layers at the first measurement and where a rule was met.
        """
        named = {} if record.diagnosis is None else scalars(record.diagnosis, record.curves)
        values = named | {"collapse/rules_met": float(len(self._state.met))}
        calls: dict[str, list[Callable[[], None]]] = {}
        calls["logger"] = [partial(sink, record.step, values) for sink in loggers]
        if record.diagnosis is not None and (record.met or self._state.measured == 1):
            calls["table"] = [partial(table, record.step, record.diagnosis) for table in make_tables(trackers)]
        calls["alert"] = [partial(alert, ALERT, each) for alert in make_alerts(trackers) for each in record.met]
        for kind, number, call in ((kind, n, call) for kind, some in calls.items() for n, call in enumerate(some, 1)):
            try:
                call()
            except Exception as error:
                if (kind, number) not in self._broken:
                    where = f"{kind} {number} of {len(calls[kind])}"
                    self._problems.append(f"{where} failed. {type(error).__name__}: {error}")
                self._broken.add((kind, number))

    def _save(self, record: Record) -> None:
        """Save the checkpoint that a rule asks for, now or at an earlier measurement at which saving failed."""
        self._owed = self.save is not None and (self._owed or record.save)
        if self.save is None or not self._owed:
            return
        try:
            self.save(record.step)
            self._owed = False
        except Exception as error:
            retry = "save failed and is called again at the next measurement."
            self._problems.append(f"{retry} {type(error).__name__}: {error}")

    def _save_diagnosis(self, name: str, found: Diagnosis, facts: dict[str, Any]) -> None:
        if self.folder is not None:
            journal.Journal(self.folder).save(name, found, facts)

    def _warn(self, record: Record) -> None:
        """Warn once per rule, and once when measurements, a logger or `save` fail; on rank 0."""
        failing, self._failing = self._failing, record.error is not None
        if not distributed.is_rank_zero():
            return
        if record.error is not None and not failing and not record.met:  # a rule that was met reports it
            message = f"Step {record.step}: the model could not be measured. {record.error}"
            warnings.warn(message, CollapseWarning, stacklevel=4)
        problems, self._problems = self._problems, []
        for sentence in (*record.met, *problems):
            warnings.warn(f"Step {record.step}: {sentence}", CollapseWarning, stacklevel=4)

    def _elapsed_seconds(self) -> float:
        return self._state.elapsed + (0.0 if self._began is None else time.perf_counter() - self._began)

    def _check_save(self) -> None:
        if self.save is None and any(rule.then == "save" for rule in self.rules):
            raise ValueError('A rule says then="save": pass save=, a function of the step that writes a checkpoint.')


def _check_frequency(every: int | None, max_share: float | None) -> None:
    if every is not None and every < 1:
        raise ValueError(f"every must be at least 1, or None for evaluations only, got {every}.")
    if max_share is not None and not 0 < max_share <= 1:
        raise ValueError(f"max_share is a share of the time between 0 and 1, got {max_share}.")


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise TypeError for options that `diagnose` does not have, or that a monitor does not pass on."""
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        hint = did_you_mean(unknown[0], OPTIONS)
        raise TypeError(f"Monitor has no option {unknown[0]!r}.{hint} Those of diagnose are: {', '.join(OPTIONS)}.")


def _check_fit(
    found: Diagnosis, rules: Sequence[Rule], measures: Sequence[str], reference: Mapping[str, Mapping[str, float]]
) -> None:
    """Raise ValueError if rules or measures do not fit the model, or the model does not fit the resumed run."""
    for rule in rules:
        rule.select(found.layers)
    curves(found, measures)
    other = layer_values(found).keys() ^ reference.keys() if reference else set()
    if other:
        raise ValueError(
            f"The run in the folder measured other layers: {min(other)} is not in both. "
            "Give another folder, or the options of that run."
        )
