"""The arena: every cure against doing nothing and the simplest alternatives, on tasks deep enough to collapse.

Each contestant has nine trials (learning rate, and strength where it has one), or more where its best rate was at the
end of a range. One is chosen on validation with one seed. It then runs with fresh seeds, whose test data are read once;
only these seeds count in the table.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from uncollapse.diagnosis.run import diagnose
from uncollapse.diagnosis.target import Plan
from uncollapse.lab.config.fields import identity
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments import recipe_data
from uncollapse.lab.experiments.arena.config import NAME, Config, find_contestant, group_of, row_of
from uncollapse.lab.experiments.arena.pages import draw_plots, list_details, unfinished_rows
from uncollapse.lab.experiments.arena.problems import Problem
from uncollapse.lab.experiments.arena.standings import measured_gains
from uncollapse.lab.experiments.gcn.config import BUILT_IN
from uncollapse.lab.experiments.training_run import record_of, training_record, with_threads
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs.results import round_metrics, summarize_diagnosis
from uncollapse.registry import CURES

BUILDERS = {  # task -> module and function of this package
    "gcn": ("problems", "build_gcn"),
    "vit-digits": ("image_problems", "build_digits"),
    "vit-cifar": ("image_problems", "build_cifar"),
    "bert": ("text_problems", "build_bert"),
    "decoder": ("text_problems", "build_decoder"),
}
LIBRARIES = {
    "gcn": ("torch_geometric",),
    "vit-digits": ("timm", "scikit-learn"),
    "vit-cifar": ("timm",),
    "bert": ("transformers",),
    "decoder": ("transformers",),
}
SECONDS = {"gcn": 0.8, "vit-digits": 0.75, "vit-cifar": 3.2, "bert": 4.8, "decoder": 2.8}  # per block, without a cure
SLOWER = {"contra_norm": 3.0}  # on graphs


def build_problem(config: Config, runtime: Runtime) -> Problem:
    """Return the task of a run, with its contestant in the model."""
    module, function = BUILDERS[config.task]
    build: Callable[..., Problem] = getattr(import_module(f"{__package__}.{module}"), function)
    contestant = find_contestant(config.task, config.cure)
    return build(
        config, contestant.model_settings(config.scale), partial(contestant.put_into, scale=config.scale), runtime
    )


@with_threads
def train(config: Config, runtime: Runtime) -> tuple[nn.Module, dict[str, Any]]:
    """Train a contestant; return it in evaluation mode, and the record of the run."""
    problem = build_problem(config, runtime)
    model = problem.task.model
    before = _diagnose(model, problem)
    resumes = runtime.checkpoints is not None and any(runtime.checkpoints.glob("*"))
    memory, started = saved_megabytes(problem), time.process_time()
    experiment = f"{identity(NAME, config)}-{problem.data['fingerprint']}"
    history = fit(problem.task, problem.options, runtime, experiment, vars(config))
    spent = None if resumes else round(time.process_time() - started, 2)
    last = history.epochs[history.selected - 1]
    figures = {"validation": last["validation"], **problem.test(model), "epoch": history.selected}
    record = training_record(
        NAME,
        config,
        history,
        ("accelerate", *LIBRARIES[config.task]),
        data=problem.data,
        figures=round_metrics(figures),
        diagnosis={"before": before, "after": _diagnose(model, problem)},
        contestant=find_contestant(config.task, config.cure).model_dump(),
        cost={"processor_seconds": spent, "saved_megabytes": round(memory, 3)},
    )
    return model, record


run = record_of(train)


def saved_megabytes(problem: Problem) -> float:
    """Return the size of the tensors that a training step stores for its backward pass; parameters do not count."""
    model, task = problem.task.model, problem.task
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, int] = {}

    def store(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided and (at := tensor.untyped_storage().data_ptr()) not in own:
            seen[at] = max(seen.get(at, 0), tensor.untyped_storage().nbytes())
        return tensor.detach()  # an output that its own node stores would never be freed

    state, buffers = torch.get_rng_state(), [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.train()
    with torch.autograd.graph.saved_tensors_hooks(store, lambda tensor: tensor):
        loss = task.loss(model, next(iter(task.batches(1))))
    torch.set_rng_state(state)
    for buffer, before in buffers:  # such as the running statistics of batch norm
        buffer.copy_(before)
    del loss
    return sum(seen.values()) / 1e6


def _diagnose(model: nn.Module, problem: Problem) -> dict[str, Any]:
    return summarize_diagnosis(diagnose(model, problem.batches, plan=Plan(baseline=0, rank_samples=1, embed=False)))


def name_of(config: Config) -> str:
    """Return the readable part of a run's file names."""
    number = f"{config.draw}" if config.draw else ""
    data = f"-{config.data}{number}" if config.task == "gcn" else ""
    strength = f"-s{config.scale:g}" if find_contestant(config.task, config.cure).has_strength else ""
    rival = f"-L{config.blocks}" if config.blocks else f"-x{config.longer:g}" if config.longer != 1 else ""
    return f"{config.task}{data}-{config.depth}-{config.cure}{strength}{rival}-lr{config.lr:g}-seed{config.seed}"


def cost(config: Config) -> float:
    """Return an estimate of a run's seconds on one core."""
    names = config.cure.split("+") if config.task == "gcn" else []
    return SECONDS[config.task] * config.built * config.longer * max([SLOWER.get(name, 1.0) for name in names] or [1.0])


def data_fingerprint(config: Config, runtime: Runtime) -> str | None:
    """Return the fingerprint of data in a named folder; None for data that does not change."""
    built_in = config.task == "vit-digits" or (config.task == "gcn" and config.data in BUILT_IN)
    if runtime.data_root is None or built_in:
        return None
    return str(build_problem(config, runtime).data["fingerprint"])


DATA = recipe_data.read(__package__, Config, row_of=row_of)
TABLE = replace(DATA.tables[NAME], group_of=group_of)


def collect_gains(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what advice is taken from: the gains of rows whose sweep is complete."""
    return measured_gains(TABLE, records, unfinished_rows(DATA.grids, records))


RECIPE = Recipe(
    name=NAME,
    title="All cures, and the simplest alternatives, under one protocol on deep graph networks and transformers",
    paper=CURES["contra_norm"].paper,
    config=Config,
    run=run,
    name_of=name_of,
    cost=cost,
    tables={NAME: TABLE},
    grids=DATA.grids,
    quick=DATA.quick,
    fingerprint=data_fingerprint,
    plots=partial(draw_plots, TABLE),
    statistics=collect_gains,
    details=partial(list_details, TABLE, DATA.grids),
)
