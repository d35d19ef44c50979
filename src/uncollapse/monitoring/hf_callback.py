"""Use a monitor or an evaluator as a callback of the HuggingFace Trainer."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

if TYPE_CHECKING:
    from uncollapse.monitoring.geometry_evaluator import GeometryEvaluator
    from uncollapse.monitoring.monitor import Monitor


class MonitorCallback(TrainerCallback):
    """Measures at the start and after steps, or after evaluations, and logs to where the trainer reports."""

    def __init__(self, monitor: "Monitor", trainer: Any) -> None:
        self.monitor, self.trainer = monitor, trainer
        self._training = False  # evaluations before and after the training are not measured
        self._owed = False  # a rule asks for a checkpoint

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Start or resume the run, and measure the initial model."""
        self._training = True
        due = self.monitor.every is None or self.monitor.is_due(state.global_step)
        self._visit(state, control, given["model"], due=due, start=True)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Measure if the step is due."""
        self._visit(state, control, given["model"], due=self.monitor.is_due(state.global_step))

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Measure at the trainer's evaluation, if the monitor has no steps of its own."""
        if self._training and self.monitor.every is None:
            self._visit(state, control, given["model"], due=True)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Stop measuring at evaluations."""
        self._training = False

    def _visit(
        self, state: TrainerState, control: TrainerControl, model: Any, *, due: bool, start: bool = False
    ) -> None:
        step, epoch, wanted = state.global_step, state.epoch, control.should_log
        options: dict[str, Any] = {"epoch": epoch, "log": (self._log,), "trackers": _trackers(self.trainer)}
        record = self.monitor.visit(model, step, done=step, due=due, start=start, **options)
        control.should_log = wanted  # logging clears this flag, but the trainer still has to log its own values
        control.should_training_stop = control.should_training_stop or self.monitor.should_stop
        self._owed = self._owed or (record is not None and record.save)
        if self._owed and not start:  # the trainer ignores requests before its first step
            control.should_save, self._owed = True, False

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        self.trainer.log(dict(values))


def _trackers(trainer: Any) -> list[Any]:
    """Return the libraries that the trainer reports to and that can alert; their run is the current one."""
    callbacks = trainer.callback_handler.callbacks
    found = (getattr(each, name, None) for each in callbacks for name in ("_trackio", "_wandb"))
    return [library for library in found if library is not None]


class EvaluatorCallback(TrainerCallback):
    """Evaluates at the start and every so many steps, and logs to where the trainer reports."""

    def __init__(self, evaluator: "GeometryEvaluator", trainer: Any, every: int) -> None:
        self.evaluator, self.trainer, self.every = evaluator, trainer, every

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Evaluate the initial model."""
        self._evaluate(args, state, control)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Evaluate if the step is due."""
        if state.global_step % self.every == 0:
            self._evaluate(args, state, control)

    def _evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        if not state.is_world_process_zero:
            return
        model, wanted = self.trainer.model, control.should_log
        folder = str(Path(args.output_dir or ".") / "eval")
        metrics = self.evaluator(model, folder, -1 if state.epoch is None else state.epoch, state.global_step)
        self.trainer.log({f"eval_{name}": value for name, value in metrics.items()})
        control.should_log = wanted  # logging clears this flag, but the trainer still has to log its own values
