"""Snapshot of a training: progress, weights, optimizer, averaged weights and random state, to and from a checkpoint."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from uncollapse import distributed
from uncollapse.lab.engine.checkpoints import Checkpoint
from uncollapse.lab.engine.seeding import get_random_state, set_random_state

Tensors = dict[str, Tensor]
Random = tuple[Tensors, dict[str, Any]]  # a random state, see `get_random_state`


@dataclass
class TrainingState:
    """Progress of a training: epochs done, batches done in the next one, steps, and the metrics so far.

    losses: of the steps of the current epoch. best: the best epoch and its metric; `chosen`: its weights.
    epoch_start: the random state at the start of the epoch. Checkpoints store the fields by name.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    losses: list[float] = field(default_factory=list)
    epochs: list[dict[str, float]] = field(default_factory=list)
    best: tuple[int, float] | None = None
    chosen: Tensors | None = None
    epoch_start: Random | None = None
    waited: int = 0
    ended: str | None = None
    seconds: float = 0.0

    @property
    def unlogged(self) -> int:
        """The first step whose metrics are not logged yet; those of finished epochs are."""
        return self.step + (self.epoch > 0 and self.batch == 0)

    def newest(self) -> dict[str, float]:
        """Return the metrics of the last evaluation."""
        measured = next((metrics for metrics in reversed(self.epochs) if len(metrics) > 2), {})
        return {name: value for name, value in measured.items() if name not in ("epoch", "loss")}


def take_snapshot(
    at: TrainingState, model: nn.Module, optimiser: Any, average: Any, scaler: Any
) -> tuple[dict[str, Tensors], dict[str, Any]]:
    """Return groups of tensors and values for JSON; all ranks must call it.

    The random states are those of all ranks: "random" and "start" of rank zero, "random-1" and so on of the others.
    """
    states = {"random": get_random_state(), "start": at.epoch_start or ({}, {})}
    drawn = {
        _rank_name(name, number): state
        for number, each in enumerate(distributed.gather_objects(states))
        for name, state in each.items()
    }
    moments, counts = _flatten(optimiser.state_dict()["state"])
    groups = {"model": model.state_dict(), "optimiser": moments, "buffers": _other_buffers(model)}
    groups |= {name: tensors for name, (tensors, _) in drawn.items()}
    if average is not None:
        groups["average"] = average.state_dict()
    if at.chosen is not None:
        groups["best"] = at.chosen
    values = {name: value for name, value in vars(at).items() if name not in ("chosen", "epoch_start")}
    scale = None if scaler is None else scaler.state_dict()
    named = {name: values for name, (_, values) in drawn.items()}
    return groups, {"progress": values, "optimiser": counts, "scaler": scale, **named}


def restore(
    saved: Checkpoint | None, at: TrainingState, model: nn.Module, optimiser: Any, average: Any, scaler: Any
) -> None:
    """Restore everything from a checkpoint; do nothing without one.

    A rank that did not exist then keeps its initial random state.
    """
    if saved is None:
        return
    for name, value in saved.state["progress"].items():
        setattr(at, name, value)
    at.best = None if at.best is None else (at.best[0], at.best[1])
    at.chosen = saved.tensors.get("best")
    at.epoch_start = _random_state(saved, "start")
    model.load_state_dict(saved.tensors["model"])
    for name, buffer in _other_buffers(model).items():
        buffer.copy_(saved.tensors["buffers"][name])
    state = _unflatten(saved.tensors["optimiser"], saved.state["optimiser"])
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
    if average is not None:
        average.load_state_dict(saved.tensors["average"])
    if scaler is not None:
        scaler.load_state_dict(saved.state["scaler"])
    if (drawn := _random_state(saved, "random")) is not None:
        set_random_state(*drawn)


def _rank_name(name: str, process: int) -> str:
    """Return the name of a rank's random state."""
    return f"{name}-{process}" if process else name


def _random_state(saved: Checkpoint, name: str) -> Random | None:
    """Return a random state of this rank; None if there is none."""
    own = _rank_name(name, distributed.rank())
    return (saved.tensors[own], saved.state[own]) if saved.tensors.get(own) else None


def _other_buffers(model: nn.Module) -> Tensors:
    """Return the buffers that a state_dict leaves out."""
    known = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name not in known}


def _flatten(state: dict[int, dict[str, Any]]) -> tuple[Tensors, dict[str, Any]]:
    """Return the state of an optimizer by "parameter.name": tensors, and the rest."""
    flat = {f"{number}.{name}": value for number, own in state.items() for name, value in own.items()}
    tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in flat.items() if name not in tensors}


def _unflatten(tensors: Tensors, values: dict[str, Any]) -> dict[int, dict[str, Any]]:
    state: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **values}.items():
        number, _, own = name.partition(".")
        state.setdefault(int(number), {})[own] = value
    return state
