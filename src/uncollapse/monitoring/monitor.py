"""Diagnose a model while it trains: layer curves in your logger, and rules that warn, stop or save."""

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from uncollapse import distributed
from uncollapse.backbones import forward
from uncollapse.diagnosis.result import Diagnosis
from uncollapse.diagnosis.run import diagnose
from uncollapse.monitoring import arguments_check, journal
from uncollapse.monitoring.journal import Cost, Record, State
from uncollapse.monitoring.layer_curves import Sink, curves, scalars, sinks, values
from uncollapse.monitoring.rules import Rule

__all__ = ["CollapseWarning", "Cost", "Monitor", "Record", "Rule"]

CURVES = ("effective_rank", "mean_cosine", "uniformity")


class CollapseWarning(UserWarning):
    """A rule of a monitor was met, or a measurement, a logger or `save` failed."""


class Monitor:
    """Diagnose a model every so many steps of its training, on batches that are held for it.

    The training is not changed: with and without a monitor it gives the same weights. A measurement costs a forward
    pass of the held batches and about a fifth more. In several processes call it in all: the first one measures.

    Args:
        batches: as `diagnose` takes them. The first `max_batches` are held, and the same are measured each time.
        every: how many steps lie between measurements; None: at evaluations, or where you call `measure`.
        measures: whose curves are logged, of `uncollapse.diagnosis.measures.MEASURES`.
        rules: when a measurement is a collapse, and what happens then.
        folder: for monitor.jsonl, a line a measurement; first.json, the diagnosis to which rules compare; and
            collapse.json, the diagnosis at which a rule was met. A training that is taken up again goes on there.
        log: a SummaryWriter, a W&B run, an Accelerator, a function of (step, values), or a list of these.
        save: called with the step when a rule says "save", and again at the next measurement if it failed; HF's and
            Lightning's trainers save by themselves.
        max_batches: how many batches are held; this bounds the cost.
        max_share: leave out a measurement that is due while they have cost more than this share of the time.
        overwrite: replace what another run left in the folder, if this one starts from the beginning.
        options: those of `diagnose` that say what is measured and how: part, layers, places, tokens, call, name …

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
        arguments_check.check_plan(every, measures, rules, max_share)
        arguments_check.check_options(options)
        self.every, self.measures, self.rules = every, tuple(measures), tuple(rules)
        self.folder = None if folder is None else Path(folder)
        self.max_share, self.overwrite, self.options, self.save = max_share, overwrite, options, save
        self.should_stop = False  # a rule that says "stop" was met
        self._batches = arguments_check.held(batches, max_batches)
        self._sinks = sinks(log)
        self._state, self._restored = State(), False
        self._began: float | None = None  # when the first step was seen
        self._fits = False  # whether rules and measures were seen to fit the model
        self._failing = False
        self._owed = False  # a rule asks for a checkpoint that could not be saved so far
        self._broken: set[int] = set()  # positions of the loggers that failed, which is told once
        self._problems: list[str] = []  # of loggers and `save`, still to be told

    def __repr__(self) -> str:
        rules = "; ".join(map(str, self.rules)) or "none"
        return f"<Monitor: every {self.every} steps, rules: {rules}, {self._state.measured} measurements so far>"

    def step(self, model: nn.Module, step: int, *, epoch: float | None = None) -> Record | None:
        """After each step of the training: measure if it is due. Gives what was measured, or None.

        Args:
            model: the model as it is trained, also compiled or wrapped for several processes.
            step: its number; measured are the multiples of `every`.
            epoch: for the record.
        """
        self._check_save()
        return self.visit(model, step, done=step - 1, due=self.is_due(step), epoch=epoch)

    def measure(self, model: nn.Module, step: int, *, epoch: float | None = None) -> Record | None:
        """Measure now, such as at an evaluation. None if this step was measured already, or `max_share` is used up."""
        self._check_save()
        return self.visit(model, step, done=step - 1, due=True, epoch=epoch)

    def watch(self, trainer: Any) -> None:
        """Monitor a HuggingFace Trainer; call this before `trainer.train()`.

        Without a folder, "collapse" in the trainer's output folder is taken.
        """
        from uncollapse.monitoring import hf_callback

        if self.folder is None:
            self.folder = Path(trainer.args.output_dir) / "collapse"
        trainer.add_callback(hf_callback.callback(self, trainer))

    def lightning(self) -> Any:
        """A callback for `lightning.pytorch.Trainer(callbacks=[…])`; it logs to the loggers of the trainer."""
        from uncollapse.monitoring import lightning_callback

        return lightning_callback.callback(self)

    @property
    def met(self) -> dict[str, int]:
        """The rules that were met so far, each with its step; known in the first process."""
        return dict(self._state.met)

    @property
    def cost(self) -> Cost:
        """What the measurements have cost so far; known in the first process."""
        state, elapsed = self._state, self._elapsed()
        share = state.seconds / elapsed if elapsed > 0 else 0.0
        return Cost(state.measured, state.seconds, share, state.skipped)

    def state_dict(self) -> dict[str, Any]:
        """What carries over to a training that is taken up again, as plain values, for a checkpoint of your own."""
        return self._state.brief(self._elapsed()) | {"reference": self._state.reference}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave. Later lines of the folder, if there is one, will be dropped."""
        self._state, self._restored, self._began = State.of(state), True, None

    def is_due(self, step: int) -> bool:
        """Whether the step is a multiple of `every`."""
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
    ) -> Record | None:
        """What `step` and `measure` do, for adapters to trainers.

        Args:
            model, step, epoch: as in `step`.
            done: if the run is taken up here, measurements up to this step are kept and later ones dropped.
            due: whether to measure, if it was not measured at this step and is not too dear.
            start: whether a training begins or is taken up here, as it does at the first call.
            log: loggers beside the monitor's own.
        """
        step, start = int(step), start or self._began is None
        if not start and not due:
            return None

        def work() -> Record | None:
            if start:
                self._begin(done)
            return self._measured(model, step, epoch, log) if due else None

        record = distributed.on_rank_zero(work, "The monitor")
        self.should_stop = (self.should_stop and not start) or (record is not None and record.stop)
        self._began = self._began or time.perf_counter()
        if record is not None:
            self._warn(record)
        return record

    def _begin(self, done: int) -> None:
        """Take up the run that is there, or make sure that nothing of another is lost; in the first process."""
        if self.folder is None:
            self._state = self._state if self._restored or done > 0 else State()
            self._state.elapsed = self._elapsed() if self._restored or done > 0 else 0.0
        elif self._restored:
            journal.Journal(self.folder).go_on(self._state)
        else:
            self._state = journal.Journal(self.folder).take_up(done, self.overwrite)
        self._restored, self._owed, self._began = False, False, time.perf_counter()

    def _measured(self, model: nn.Module, step: int, epoch: float | None, log: tuple[Sink, ...]) -> Record | None:
        """Measure, judge, write and log; in the first process only."""
        if not self._wanted(step):
            return None
        started, state = time.perf_counter(), self._state.copy()  # nothing counts before it is written
        found, error = self._diagnosed(forward.unwrap(model))
        if found is not None and not self._fits:
            arguments_check.check_fit(found, self.rules, self.measures, state.reference)
            self._fits = True
        if found is not None and not state.reference:
            state.reference = values(found)
            self._keep(journal.FIRST, found, {"step": step, "epoch": epoch})
        met = state.judged(self.rules, found, error, step)
        chosen = {} if found is None else curves(found, self.measures)
        then, told = {rule.then for rule, _ in met}, tuple(dict.fromkeys(sentence for _, sentence in met))
        seconds = time.perf_counter() - started
        state.last, state.measured, state.seconds = step, state.measured + 1, state.seconds + seconds
        why = None if error is None else f"{type(error).__name__}: {error}"
        record = Record(step, epoch, seconds, chosen, told, "stop" in then, "save" in then, why, found)
        self._write(record, state)
        self._state = state
        self._log(record, (*self._sinks, *log))
        self._save(record)
        return record

    def _wanted(self, step: int) -> bool:
        """Whether this step is new, and measurements are not too dear."""
        last = self._state.last
        if last is not None and step < last:
            raise ValueError(f"Step {step} comes after step {last}. A monitor follows one training: make another.")
        dear = self.max_share is not None and self._state.measured > 0 and self.cost.share > self.max_share
        self._state.skipped += dear and step != last
        return not dear and step != last

    def _diagnosed(self, model: nn.Module) -> tuple[Diagnosis | None, Exception | None]:
        """The diagnosis, or why there is none."""
        forward.check_unsharded(model)
        try:
            with arguments_check.random_kept():
                return diagnose(model, self._batches, baseline=0, **self.options), None
        except Exception as error:
            if not self._state.reference:  # nothing is lost yet, and what was asked for may not fit the model
                raise
            return None, error  # a measurement that fails does not end a training

    def _write(self, record: Record, state: State) -> None:
        if self.folder is not None:
            if record.met and record.diagnosis is not None:
                facts = {"step": record.step, "epoch": record.epoch, "met": list(record.met), "rules": state.met}
                self._keep(journal.COLLAPSE, record.diagnosis, facts)
            journal.Journal(self.folder).append(record.line() | {"state": state.brief(self._elapsed())})

    def _log(self, record: Record, loggers: tuple[Sink, ...]) -> None:
        """A logger that fails, such as one without a network, ends neither the training nor the other loggers."""
        named = {} if record.diagnosis is None else scalars(record.diagnosis, record.curves)
        for place, sink in enumerate(loggers):
            try:
                sink(record.step, named | {"collapse/rules_met": float(len(self._state.met))})
            except Exception as error:
                if place not in self._broken:
                    problem = f"logger {place + 1} of {len(loggers)} failed. {type(error).__name__}: {error}"
                    self._problems.append(problem)
                self._broken.add(place)

    def _save(self, record: Record) -> None:
        """Have the checkpoint saved that a rule asks for, now or at an earlier measurement at which that failed."""
        self._owed = self.save is not None and (self._owed or record.save)
        if self.save is None or not self._owed:
            return
        try:
            self.save(record.step)
            self._owed = False
        except Exception as error:
            said = "save failed and is called again at the next measurement."
            self._problems.append(f"{said} {type(error).__name__}: {error}")

    def _keep(self, name: str, found: Diagnosis, facts: dict[str, Any]) -> None:
        if self.folder is not None:
            journal.Journal(self.folder).keep(name, found, facts)

    def _warn(self, record: Record) -> None:
        """One warning a rule, and one when measurements, a logger or `save` fail; in the first process."""
        failing, self._failing = self._failing, record.error is not None
        if not distributed.is_rank_zero():
            return
        if record.error is not None and not failing and not record.met:  # a rule that was met says it
            said = f"Step {record.step}: the model could not be measured. {record.error}"
            warnings.warn(said, CollapseWarning, stacklevel=4)
        problems, self._problems = self._problems, []
        for sentence in (*record.met, *problems):
            warnings.warn(f"Step {record.step}: {sentence}", CollapseWarning, stacklevel=4)

    def _elapsed(self) -> float:
        return self._state.elapsed + (0.0 if self._began is None else time.perf_counter() - self._began)

    def _check_save(self) -> None:
        if self.save is None and any(rule.then == "save" for rule in self.rules):
            raise ValueError('A rule says then="save": pass save=, a function of the step that writes a checkpoint.')
