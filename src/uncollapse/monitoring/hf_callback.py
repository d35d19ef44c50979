"""A monitor as a callback of the HuggingFace Trainer."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

if TYPE_CHECKING:
    from uncollapse.monitoring.monitor import Monitor


class MonitorCallback(TrainerCallback):
    """Measures at the start and after steps, or after evaluations, and logs to where the trainer reports."""

    def __init__(self, monitor: "Monitor", trainer: Any) -> None:
        self.monitor, self.trainer = monitor, trainer
        self._training = False  # evaluations before and after the training are not part of it
        self._owed = False  # a checkpoint that a rule asks for

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Take up the run, and measure the model as it comes."""
        self._training = True
        due = self.monitor.every is None or self.monitor.is_due(state.global_step)
        self._visit(state, control, given["model"], due=due, start=True)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Measure if the step is due."""
        self._visit(state, control, given["model"], due=self.monitor.is_due(state.global_step))

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Measure beside the trainer's evaluation, if the monitor has no steps of its own."""
        if self._training and self.monitor.every is None:
            self._visit(state, control, given["model"], due=True)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Evaluations from here on are not measured."""
        self._training = False

    def _visit(
        self, state: TrainerState, control: TrainerControl, model: Any, *, due: bool, start: bool = False
    ) -> None:
        step, epoch, wanted = state.global_step, state.epoch, control.should_log
        record = self.monitor.visit(model, step, done=step, due=due, start=start, epoch=epoch, log=(self._log,))
        control.should_log = wanted  # logging takes this flag down, and the trainer's own values are still to come
        control.should_training_stop = control.should_training_stop or self.monitor.should_stop
        self._owed = self._owed or (record is not None and record.save)
        if self._owed and not start:  # the trainer forgets what is asked for before its first step
            control.should_save, self._owed = True, False

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        self.trainer.log(dict(values))


def make_callback(monitor: "Monitor", trainer: Any) -> MonitorCallback:
    """The callback for a trainer."""
    return MonitorCallback(monitor, trainer)
