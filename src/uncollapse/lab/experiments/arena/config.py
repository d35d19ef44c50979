"""Configuration of the recipe `arena`, and its contestants: how a cure enters the model of each task."""

import tomllib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import nn

from uncollapse.attachment.attach import attach
from uncollapse.errors import UsageError, did_you_mean
from uncollapse.lab.config.fields import config_field, reset_idle

NAME = "arena"
TASKS = ("gcn", "vit-digits", "bert", "decoder", "vit-cifar")
GRAPHS = ("cora", "citeseer", "chameleon", "csbm", "karate")
STRENGTH = "strength"  # in contestants.toml: the argument of the cure that takes the config's scale


@dataclass(frozen=True)
class Config:
    """Configuration of a run."""

    task: str = config_field("gcn", "What is learned.", choices=TASKS)
    data: str = config_field("csbm", "gcn: the graph.", choices=GRAPHS)
    depth: int = config_field(16, "Number of blocks or graph convolutions of the task.", minimum=2)
    cure: str = config_field("none", "The contestant, one of contestants.toml.")
    scale: float = config_field(1.0, "Strength of the cure.")
    blocks: int = config_field(0, "Blocks of a shallower model that stands in for the deep one; 0: all.", minimum=0)
    longer: float = config_field(1.0, "Epochs as a multiple of the task's.", minimum=0.01)
    lr: float = config_field(5e-3, "Learning rate.", minimum=0)
    draw: int = config_field(0, "gcn: number of the random graph, or of the split.", minimum=0, maximum=2**31)
    seed: int = config_field(0, "Seed of weights, dropout and the order of examples.", minimum=0, maximum=2**31)

    def __post_init__(self) -> None:
        if self.blocks >= self.depth:
            raise UsageError(f"blocks must be below depth, which is {self.depth}, got {self.blocks}.")
        contestant = find_contestant(self.task, self.cure)
        reset_idle(self, [] if self.task == "gcn" else ["data", "draw"])
        reset_idle(self, [] if contestant.has_strength else ["scale"])

    @property
    def built(self) -> int:
        """Return the number of blocks that the model has."""
        return self.blocks or self.depth


class Contestant(BaseModel):
    """How a cure enters a model: settings of the task's own model, and calls of `uc.attach` in their order.

    An entry of `attach` has the cure's name and arguments; the argument that its `strength` names gets the config's
    scale. So does the setting of the model that `strength` of the contestant names. code: how users get such a
    setting in their own model, a line of code or a comment; the scale stands for `{scale}`.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    model: dict[str, Any] = {}
    strength: str = ""
    attach: list[dict[str, Any]] = []
    code: str = ""

    @property
    def has_strength(self) -> bool:
        """Return whether the config's scale does anything."""
        return bool(self.strength) or any(STRENGTH in step for step in self.attach)

    def model_settings(self, scale: float) -> dict[str, Any]:
        """Return the settings of the task's own model."""
        return self.model | ({self.strength: scale} if self.strength else {})

    def put_into(self, model: nn.Module, scale: float) -> None:
        """Attach the cures."""
        for step, options in self._steps(scale):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "DeepGCN takes no batch")  # it has one whole graph
                attach(model, step["cure"], **options)

    def code_for(self, scale: float) -> str:
        """Return the code that does the same in a user's model."""
        if not self.attach:
            return self.code.format(scale=f"{scale:g}")
        calls = []
        for step, options in self._steps(scale):
            words = "".join(f", {name}={value!r}" for name, value in options.items()).replace("'", '"')
            calls.append(f'uc.attach(model, "{step["cure"]}"{words})')
        return "; ".join(calls)

    def _steps(self, scale: float) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield each call of `uc.attach` with its options."""
        for step in self.attach:
            options = {name: value for name, value in step.items() if name not in ("cure", STRENGTH)}
            yield step, options | ({step[STRENGTH]: scale} if STRENGTH in step else {})


@cache
def contestants() -> Mapping[str, Mapping[str, Contestant]]:
    """Return all contestants by task and name."""
    file = resources.files(__package__).joinpath("contestants.toml")
    content = tomllib.loads(file.read_text(encoding="utf-8"))
    found: dict[str, dict[str, Contestant]] = {}
    for task, entries in content.items():
        if task not in TASKS:
            raise ValueError(f"contestants.toml: there is no task {task!r}.{did_you_mean(task, TASKS)}")
        for name, entry in entries.items():
            try:
                found.setdefault(task, {})[name] = Contestant.model_validate(entry)
            except ValidationError as error:
                raise ValueError(f"contestants.toml, {task}.{name}: {error.errors()[0]['msg']}.") from error
    return found


def find_contestant(task: str, name: str) -> Contestant:
    """Return a contestant by name, or raise a UsageError that lists those of the task."""
    there = contestants().get(task, {})
    if name not in there:
        hint = did_you_mean(name, there)
        raise UsageError(f"cure must be one of {', '.join(there)} for {task}, got {name!r}.{hint}")
    return there[name]


def group_of(config: Mapping[str, Any]) -> str:
    """Return the task of a run, with the graph where there are several."""
    if config["task"] != "gcn":
        return str(config["task"])
    number = f" {config['draw']}" if config["draw"] else ""
    return f"gcn, {config['data']}{number}"


def row_of(config: Mapping[str, Any]) -> str:
    """Return the row of a run: its cure, or the simple rival that it is; both, if a rival has a cure as well.

    >>> row_of({"cure": "none", "blocks": 2, "longer": 1.0}), row_of({"cure": "gfsa", "blocks": 0, "longer": 0.5})
    ('shallower', 'gfsa, fewer epochs')
    """
    epochs = "more epochs" if config["longer"] > 1 else "fewer epochs" if config["longer"] < 1 else ""
    parts = [config["cure"] if config["cure"] != "none" else "", "shallower" if config["blocks"] else "", epochs]
    return ", ".join(filter(None, parts)) or "none"
