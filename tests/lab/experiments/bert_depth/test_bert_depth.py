"""Encoders of any depth: what they are made of, what their record says of every layer, and that a run goes on."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lab.tiny_text import SENTENCES, tiny_model, write_sst2

from uncollapse import backbones
from uncollapse.errors import UsageError
from uncollapse.io.hf_models import Origin, load_classifier
from uncollapse.lab.data.text import glue
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.bert_depth import recipe as bert_depth
from uncollapse.lab.recipe import RECIPES
from uncollapse.lab.tables.paper_table import build_cells

for library in ("accelerate", "sklearn", "scipy"):
    pytest.importorskip(library)
SST2 = glue.TASKS["sst2"]
STARTS: dict[str, dict[str, Any]] = {
    "scratch": {"start": "scratch", "depth": 4, "width": 16, "heads": 2},
    "stacked": {"start": "stacked", "depth": 3},
    "extended": {"start": "extended", "depth": 3},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("depth")
    tiny_model(folder / "bert", layers=2)
    return write_sst2(folder, SENTENCES)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNCOLLAPSE_CACHE", str(tmp_path / "cache"))


def config(place: Path, **changes: Any) -> bert_depth.Config:
    usual = {"model": str(place / "bert"), "examples": 32, "epochs": 2, "batch": 8, "holdout": 0.25, "lr": 2e-3}
    return bert_depth.Config(**{**usual, **changes})


def runtime(place: Path, **changes: Any) -> Runtime:
    return Runtime(place, device="cpu", **changes)


@pytest.mark.parametrize("start", STARTS)
def test_every_layer_after_every_epoch(place: Path, start: str) -> None:
    record = bert_depth.run(config(place, **STARTS[start]), runtime(place))
    layers = record["layers"]
    assert len(layers["names"]) == STARTS[start]["depth"]
    for measure in ("mean_cosine", "effective_rank", "feature_variance", "token_variance"):
        rows = layers[measure]
        assert [len(row) for row in rows] == [len(layers["names"])] * 3  # the start, and two epochs
        assert all(math.isfinite(value) for row in rows for value in row)
        assert rows[0] != rows[1]
        assert rows[0] == [layer[measure] for layer in record["diagnosis"]["before"]["layers"]]
        assert rows[-1] == [layer[measure] for layer in record["diagnosis"]["after"]["layers"]]
    assert all(set(epoch) == {"epoch", "loss", "validation"} for epoch in record["epochs"])
    assert record["figures"]["always"] == 0.5
    assert set(record["figures"]) == {"epoch", "validation", "dev", "always"}
    json.dumps(record, allow_nan=False)


class GoneError(Exception):
    """The process is gone."""


@pytest.mark.parametrize(("start", "cure"), [("scratch", "contra_norm"), ("stacked", "uniform_loss")])
def test_goes_on_with_the_same_rows(place: Path, tmp_path: Path, start: str, cure: str) -> None:
    """The first epoch's rows come from the checkpoint, the second's from the rest of the run."""
    chosen = config(place, **STARTS[start], cure=cure)
    whole, expected = bert_depth.train(chosen, runtime(place))

    def vanish(done: int, total: int, figures: Mapping[str, float]) -> None:
        if done == 6:  # of three steps in each epoch
            raise GoneError

    with pytest.raises(GoneError):
        bert_depth.run(chosen, runtime(place, checkpoints=tmp_path / "run", save_seconds=0.0, progress=vanish))
    seen: list[int] = []
    rest = runtime(place, checkpoints=tmp_path / "run", progress=lambda done, *_: seen.append(done))
    model, found = bert_depth.train(chosen, rest)
    assert seen == [6]
    for part in ("layers", "epochs", "figures", "diagnosis"):
        assert found[part] == expected[part]
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in whole.state_dict().items())


def test_from_scratch_it_has_the_shape_that_was_asked_for(place: Path) -> None:
    origin = Origin(str(place / "bert"))
    model = bert_depth.build(config(place, **STARTS["scratch"], cure="none"), origin, SST2)
    assert len(backbones.find(model).blocks) == 4
    assert model.get_parameter("bert.encoder.layer.3.intermediate.dense.weight").shape == (64, 16)
    words = model.get_parameter("bert.embeddings.word_embeddings.weight")
    assert words.shape[1] == 16
    again, other = (
        bert_depth.build(config(place, **STARTS["scratch"], cure="none", seed=seed), origin, SST2) for seed in (0, 1)
    )
    assert torch.equal(again.get_parameter("bert.embeddings.word_embeddings.weight"), words)
    assert not torch.equal(other.get_parameter("bert.embeddings.word_embeddings.weight"), words)


def test_stacked_it_starts_from_the_pretrained_blocks(place: Path) -> None:
    origin = Origin(str(place / "bert"))
    model = bert_depth.build(config(place, **STARTS["stacked"]), origin, SST2)
    pretrained = load_classifier(origin, 2)
    name = "attention.self.query.weight"
    for number, block in enumerate((0, 1, 0)):
        found = model.get_parameter(f"bert.encoder.layer.{number}.{name}")
        assert torch.equal(found, pretrained.get_parameter(f"bert.encoder.layer.{block}.{name}"))


def test_extended_it_has_random_blocks_after_the_pretrained_ones(place: Path) -> None:
    """As the paper's figure: transformers initializes blocks that the checkpoint does not have."""
    origin = Origin(str(place / "bert"))
    model = bert_depth.build(config(place, **STARTS["extended"]), origin, SST2)
    pretrained = load_classifier(origin, 2)
    first, second, third = (
        model.get_parameter(f"bert.encoder.layer.{number}.attention.self.query.weight") for number in range(3)
    )
    known = [pretrained.get_parameter(f"bert.encoder.layer.{k}.attention.self.query.weight") for k in range(2)]
    assert torch.equal(first, known[0])
    assert torch.equal(second, known[1])
    assert not any(torch.equal(third, each) for each in known)
    assert float(third.detach().std()) == pytest.approx(model.config.initializer_range, rel=0.2)


def test_vanilla_and_cured_start_from_the_same_weights(place: Path) -> None:
    origin = Origin(str(place / "bert"))
    for start in STARTS.values():
        plain, cured = (
            bert_depth.build(config(place, **start, cure=cure), origin, SST2) for cure in ("none", "contra_norm")
        )
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), cured.parameters(), strict=True))


def test_a_width_that_heads_do_not_divide() -> None:
    with pytest.raises(UsageError, match="heads"):
        bert_depth.Config(width=16, heads=3)
    with pytest.raises(UsageError, match="stacked"):
        bert_depth.Config(start="stacked", width=16)


def made_up(dev: float, **changes: Any) -> dict[str, Any]:
    chosen = bert_depth.Config(**changes)
    figures = {"dev": dev, "validation": 0.5}
    return {"recipe": "bert-depth", "config": asdict(chosen), "seed": chosen.seed, "figures": figures}


def test_the_figure_of_the_paper_and_other_tasks_beside_it() -> None:
    table = RECIPES["bert-depth"].tables["depth"]
    made = build_cells(table, [made_up(0.8, depth=12, cure="none"), made_up(0.9, depth=12)])
    cola = {(cell.row, cell.column): cell for cell in made if cell.group == "cola"}
    assert len(cola) == 2 * 6
    assert [cola["none", depth].published.mean for depth in (12, 72)] == [55.28, 0.0]  # type: ignore[union-attr]
    sst2 = {cell.row: cell for cell in made if cell.group == "sst2"}
    assert {row: cell.mean for row, cell in sst2.items()} == pytest.approx({"none": 80.0, "contra_norm": 90.0})
    assert all(cell.unusual == {} for cell in sst2.values())  # the paper's protocol is for the paper's task
    (alone,) = [cell for cell in build_cells(table, [made_up(0.5, task="cola", depth=24)]) if cell.run]
    assert alone.reached is None  # not as the paper's was trained
    assert {"start", "lr", "examples"} <= alone.unusual.keys()
    protocol = {**RECIPES["bert-depth"].presets["paper"], "depth": 48}
    assert protocol == RECIPES["glue"].presets["paper-bert"] | {"start": "extended", "task": "cola", "depth": 48}
    (judged,) = [cell for cell in build_cells(table, [made_up(0.59, **protocol)]) if cell.run]
    assert (judged.unusual.keys() <= {"padding", "holdout", "uniform_on"}, judged.reached) == (True, True)


def test_the_cost_of_a_pretrained_encoder_grows_with_its_width_and_depth(place: Path) -> None:
    def seconds(**changes: Any) -> float:
        return bert_depth.cost(config(place, start="extended", **changes))

    absent = {"model": "owner/of-the-width-of-bert-base", "examples": 10_000}
    assert seconds(**absent, depth=48) > 3.5 * seconds(**absent, depth=12)
    assert seconds(**absent, depth=12) > 10 * seconds(examples=10_000, depth=12)
