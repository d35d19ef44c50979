"""The arena: contestants enter every task, simple rivals have rows of their own, and only fresh seeds count."""

import dataclasses
import gc
import json
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from uncollapse.backbones import torchvision_ops
from uncollapse.errors import UsageError
from uncollapse.lab.config.fields import identity
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.arena import text_problems
from uncollapse.lab.experiments.arena.config import Config, contestants, find_contestant, row_of
from uncollapse.lab.experiments.arena.recipe import RECIPE, build_problem, run, saved_megabytes
from uncollapse.lab.tables.paper_table import build_cells
from uncollapse.registry import CURES

torchvision_ops.declare()
for library in ("torch_geometric", "timm", "transformers", "accelerate", "sklearn"):
    pytest.importorskip(library)
TINY = {"gcn": {"depth": 4}, "vit-digits": {"depth": 2}, "decoder": {"depth": 2}}
SMALL = Config(depth=4, longer=0.02)  # four epochs


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a text that repeats itself."""
    folder = tmp_path / "wikitext2"
    folder.mkdir()
    for name, length in (("valid.txt", 6000), ("test.txt", 1000)):
        (folder / name).write_bytes(b"abcdefgh" * (length // 8))
    return tmp_path


@pytest.mark.parametrize(("task", "cure"), [(task, cure) for task in TINY for cure in contestants()[task]])
def test_every_contestant_enters_its_task_and_trains(task: str, cure: str, root: Path) -> None:
    problem = build_problem(Config(task=task, cure=cure, scale=0.5, **TINY[task]), Runtime(data_root=root))  # type: ignore[arg-type]
    model = problem.task.model.train()
    problem.task.loss(model, next(iter(problem.task.batches(1)))).backward()
    learned = {id(p) for group in problem.task.optimizer.param_groups for p in group["params"]}
    assert {id(p) for p in model.parameters() if p.requires_grad} == learned  # those of the cure too
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())


def test_every_contestant_names_a_cure_of_the_registry() -> None:
    for task, entries in contestants().items():
        for name, entry in entries.items():
            for step in entry.attach:
                assert step["cure"] in CURES, (task, name)


def test_every_contestant_is_in_a_sweep_with_as_many_trials_as_the_others() -> None:
    for grids in (grids for name, grids in RECIPE.grids.items() if name != "demo"):  # which chooses nothing
        for cell in (cell for grid in grids for cell in grid.cells(Config)):
            assert len(cell.trials) == 9, cell.trials[0]
            assert {trial.seed for trial in cell.trials} == {0}
            assert cell.seeds == ((1, 2, 3) if cell.trials[0].task in ("bert", "decoder") else (1, 2, 3, 4, 5, 6))


def test_strength_counts_only_where_there_is_one() -> None:
    assert Config(scale=3.0) == Config()
    assert identity("arena", Config(cure="contra_norm", scale=3.0)) != identity("arena", Config(cure="contra_norm"))
    assert find_contestant("gcn", "drop_edge").model_settings(0.3) == {"drop_edge": 0.3}
    assert Config(task="vit-digits", data="cora") == Config(task="vit-digits")


@pytest.mark.parametrize(("values", "word"), [({"cure": "contra"}, "contra_norm"), ({"blocks": 16}, "blocks")])
def test_wrong_settings_are_refused(values: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        Config(**values)


def test_the_record_of_a_run() -> None:
    config = Config(depth=4, longer=0.02, cure="contra_norm", scale=0.5)
    record = run(config)
    assert json.loads(json.dumps(record)) == record
    assert Config(**record["config"]) == config
    assert record["figures"].keys() == {"train", "validation", "test", "epoch"}
    assert record["contestant"] == find_contestant("gcn", "contra_norm").model_dump()
    assert record["cost"]["processor_seconds"] > 0
    assert record["cost"]["saved_megabytes"] > run(SMALL)["cost"]["saved_megabytes"]


def test_the_step_that_is_weighed_is_freed() -> None:
    problem = build_problem(Config(task="vit-digits", depth=2), Runtime())
    loss, alive = problem.task.loss, []

    def watched(model: Any, batch: Any) -> Any:
        hook = model.blocks[0].register_forward_hook(lambda module, args, output: alive.append(weakref.ref(output)))
        value = loss(model, batch)
        hook.remove()
        return value

    saved_megabytes(dataclasses.replace(problem, task=dataclasses.replace(problem.task, loss=watched)))
    gc.collect()
    assert [reference() for reference in alive] == [None]


def test_simple_rivals_are_rows_and_the_shallow_one_is_shallow() -> None:
    configs = (Config(), Config(blocks=2), Config(longer=3.0), Config(cure="layer_norm"))
    assert [row_of(vars(config)) for config in configs] == ["none", "shallower", "more epochs", "layer_norm"]
    assert [len(build_problem(config, Runtime()).task.model.convs) for config in configs[:2]] == [16, 2]
    assert build_problem(configs[2], Runtime()).options.epochs == 600
    assert len({RECIPE.name_of(config) for config in configs}) == len(configs)


def test_only_seeds_that_did_not_choose_count() -> None:
    def record(seed: int, lr: float, validation: float, test: float) -> dict[str, Any]:
        config = vars(Config(seed=seed, lr=lr))
        return {"recipe": "arena", "seed": seed, "config": config, "figures": {"validation": validation, "test": test}}

    records = [
        record(0, 0.01, 0.9, 0.1),
        record(0, 0.02, 0.8, 0.2),
        record(1, 0.01, 0.5, 0.6),
        record(2, 0.01, 0.5, 0.7),
    ]
    (cell,) = build_cells(RECIPE.tables["arena"], records)
    assert cell.figures == {1: pytest.approx(60.0), 2: pytest.approx(70.0)}
    assert cell.chosen["lr"] == 0.01


def test_measuring_memory_changes_nothing() -> None:
    problem = build_problem(Config(depth=4, cure="batch_norm"), Runtime())
    before = {name: value.clone() for name, value in problem.task.model.state_dict().items()}
    state = torch.get_rng_state()
    assert saved_megabytes(problem) > 0
    assert torch.equal(torch.get_rng_state(), state)
    after = problem.task.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in problem.task.model.parameters())


def test_bytes_that_follow() -> None:
    class Guess(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            logits = torch.zeros(*x.shape, 256)
            logits[..., 98] = math.log(255)  # "b" with probability one half
            return type("Output", (), {"logits": logits})()

    text = torch.frombuffer(bytearray(b"ab" * 200), dtype=torch.uint8).long()
    found = text_problems.measure_next_bytes(Guess(), text)
    bits = {98: 1.0, 97: math.log2(510)}
    windows = [text[start : start + 129] for start in range(0, len(text) - 128, 128)]
    goals = [int(byte) for window in windows for byte in window[1:]]
    assert found[""] == pytest.approx(goals.count(98) / len(goals))
    assert found["_bits_per_byte"] == pytest.approx(sum(bits[goal] for goal in goals) / len(goals))


def test_changed_data_is_noticed_in_every_task_that_reads_files(root: Path) -> None:
    assert RECIPE.fingerprint is not None
    config, runtime = Config(task="decoder", depth=2), Runtime(data_root=root)
    before = RECIPE.fingerprint(config, runtime)
    (root / "wikitext2" / "test.txt").write_bytes(b"hgfedcba" * 200)
    assert None is not before != RECIPE.fingerprint(config, runtime)
    assert RECIPE.fingerprint(Config(task="vit-digits", depth=2), runtime) is None
    assert RECIPE.fingerprint(Config(), runtime) is None


def test_a_decoder_learns_a_text_and_needs_its_files(root: Path, tmp_path: Path) -> None:
    config = Config(task="decoder", depth=2, longer=30.0, lr=3e-3)
    assert run(config, Runtime(data_root=root))["figures"]["test"] > 0.9
    with pytest.raises(UsageError, match="wikitext2"):
        build_problem(config, Runtime(data_root=tmp_path / "elsewhere"))
