"""Use a monitor as a callback of Lightning's Trainer."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from uncollapse.backbones import torchvision_ops
from uncollapse.monitoring.layer_curves import make_sinks

if TYPE_CHECKING:
    from uncollapse.monitoring.monitor import Monitor


class Hooks:
    """Measures at the start and after steps, or after validations, and logs to the loggers of the trainer."""

    def __init__(self, monitor: "Monitor") -> None:
        self.monitor = monitor
        self._loaded: dict[str, Any] | None = None  # the state in the checkpoint from which the trainer starts

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget a checkpoint that was loaded before this fit or test."""
        self._loaded = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start or resume the run, and measure the initial model."""
        if self._loaded is not None:
            self.monitor.load_state_dict(self._loaded)
            self._loaded = None
        due = self.monitor.every is None or self.monitor.is_due(trainer.global_step)
        self._visit(trainer, pl_module, due=due, start=True)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        """Measure if the step is due."""
        self._visit(trainer, pl_module, due=self.monitor.is_due(trainer.global_step))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Measure at a validation of the training, if the monitor has no steps of its own."""
        if self.monitor.every is None and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._visit(trainer, pl_module, due=True)

    def state_dict(self) -> dict[str, Any]:
        """Return what goes into the trainer's checkpoints."""
        return self.monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember a loaded state for a training that starts from it; tests and validations load one, too."""
        self._loaded = state_dict

    def _visit(self, trainer: Any, model: Any, *, due: bool, start: bool = False) -> None:
        step, monitor, epoch = trainer.global_step, self.monitor, float(trainer.current_epoch)
        options: dict[str, Any] = {"epoch": epoch, "log": make_sinks(trainer.loggers)}
        trackers = [getattr(logger, "experiment", None) for logger in trainer.loggers]
        record = monitor.visit(model, step, done=step, due=due, start=start, trackers=trackers, **options)
        trainer.should_stop = trainer.should_stop or monitor.should_stop
        if record is not None and record.save:
            folder = monitor.folder or Path(trainer.default_root_dir)
            trainer.save_checkpoint(folder / f"collapse-step={step}.ckpt")


def make_callback(monitor: "Monitor") -> Any:
    """Return the callback of a monitor. Lightning is imported only here."""
    torchvision_ops.declare()
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError as error:
        raise ImportError("Monitor.lightning needs Lightning; install it with: pip install lightning") from error

    class MonitorCallback(Hooks, Callback):
        """The hooks as a callback."""

        @property
        def state_key(self) -> str:
            """The key of the state in checkpoints."""
            return "uncollapse.Monitor"

    return MonitorCallback(monitor)
