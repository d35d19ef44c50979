"""The tasks of the arena: a model that is deep enough to collapse, its training, and its test."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.engine.task import Task, TrainingOptions
from uncollapse.lab.experiments.arena.config import Config
from uncollapse.lab.experiments.gcn import config as gcn_config
from uncollapse.lab.experiments.gcn import recipe as gcn_recipe

Cure = Callable[[nn.Module], None]  # puts the contestant into the model, before the optimizer is built


@dataclass(frozen=True)
class Problem:
    """A task with its model.

    task: what is trained. options: how. test: metrics on the test data, read once. batches: inputs of the diagnosis.
    data: name, fingerprint and sizes of the data.
    """

    task: Task
    options: TrainingOptions
    test: Callable[[nn.Module], Mapping[str, float]]
    batches: Sequence[Any]
    data: Mapping[str, Any] = field(default_factory=dict)


def scaled_epochs(config: Config, usual: int) -> int:
    """Return the epochs of a run whose task usually has so many."""
    return max(1, round(usual * config.longer))


def build_gcn(config: Config, settings: Mapping[str, Any], cure: Cure, runtime: Runtime) -> Problem:
    """Return ContraNorm's deep GCN; the weights that were best on validation are tested."""
    own = gcn_config.Config(
        data=config.data,
        split_index=config.draw,
        layers=config.built,
        lr=config.lr,
        epochs=scaled_epochs(config, 200),
        select="accuracy",
        patience=scaled_epochs(config, 100),  # else more epochs would end where the usual ones do
        seed=config.seed,
        **{"norm": "none", **settings},
    )
    graph = gcn_config.load(own, runtime)
    with use_seed(own.seed):
        model = gcn_config.build(own, graph)
        cure(model)
    task, options = gcn_recipe.build_task(model, graph, own), gcn_recipe.training_options(own)
    batch = {"x": graph.x, "edge_index": graph.edge_index}
    data = {"name": graph.name, "fingerprint": graph.fingerprint(), "nodes": len(graph.y)}

    def test(model: nn.Module) -> dict[str, float]:
        return gcn_recipe.accuracies(model, graph)

    return Problem(task, options, test, [batch], data)
