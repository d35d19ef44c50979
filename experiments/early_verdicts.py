"""What does the verdict say of a network after a tenth of its training?

    python -m experiments.early_verdicts --data DIR

Trains every stored network without a cure again, with the same seed and settings, up to a tenth of its steps, and
diagnoses it there. Results are added to the file as they come; what is there is not run again.
"""

import argparse
import json
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.records import plain_errors, save_record
from uncollapse.diagnosis.run import diagnose
from uncollapse.diagnosis.target import Plan
from uncollapse.lab.config.fields import build
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.experiments.arena import config as arena
from uncollapse.lab.experiments.arena.problems import Problem
from uncollapse.lab.experiments.arena.recipe import build_problem
from uncollapse.lab.experiments.calibration.model_outcomes import EARLY, plain_records
from uncollapse.lab.experiments.gcn import config as gcn
from uncollapse.lab.experiments.gcn import recipe as gcn_recipe

RESULTS = Path("results")
SHARE = 10  # a tenth of the steps


@dataclass(frozen=True)
class Config:
    """Configuration: the seeds are those of the stored runs."""

    seed: int = 0


class ReachedError(Exception):
    """A tenth of the steps has been taken."""


def main() -> None:
    """Diagnose what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    out = args.results / EARLY
    found = json.loads(out.read_text())["verdicts"] if out.exists() else {}
    began = time.perf_counter()
    with plain_errors():
        for record in plain_records(args.results):
            key = record["file"]
            if key in found or record["recipe"] == "bert-depth":  # whose training takes minutes, and has six cases
                continue
            found[key] = early_verdict(record, args.data)
            print(f"{key}: {found[key]}, after training {record['diagnosis']['after']['verdict']}", flush=True)
            spent = time.perf_counter() - began
            save_record(out, "early_verdicts", Config(), spent, arguments="--data DIR", verdicts=found)


def early_verdict(record: dict[str, Any], data: Path | None) -> str:
    """Return the kind of verdict on a stored network after a tenth of its training."""
    problem = train_a_tenth(record, data)
    plan = Plan(baseline=0, rank_samples=1, embed=False)  # as the recipes diagnose before and after
    return diagnose(problem.task.model, problem.batches, plan=plan).verdict.kind


def train_a_tenth(record: dict[str, Any], data: Path | None) -> Problem:
    """Return the task of a stored run, whose model has taken a tenth of its steps."""

    def stop(done: int, total: int, _: Any) -> None:
        if SHARE * done >= total:
            raise ReachedError

    runtime = Runtime(data, progress=stop)
    problem = stored_problem(record, runtime)
    with suppress(ReachedError):
        fit(problem.task, problem.options, runtime)
    return problem


def stored_problem(record: dict[str, Any], runtime: Runtime) -> Problem:
    """Return the task of a stored run, untrained."""
    if record["recipe"] == arena.NAME:
        return build_problem(build(arena.Config, record["config"]), runtime)
    config = build(gcn.Config, record["config"])
    graph = gcn.load(config, runtime)
    with use_seed(config.seed):
        model = gcn.build(config, graph)
    batch = {"x": graph.x, "edge_index": graph.edge_index}
    task = gcn_recipe.build_task(model, graph, config)
    return Problem(task, gcn_recipe.training_options(config), lambda _: {}, [batch])


if __name__ == "__main__":
    main()
