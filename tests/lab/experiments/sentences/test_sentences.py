"""The recipe on neighbouring sentences: training, record, resume, tables and grids."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from tests.lab.experiments.sentences.tiny_sentences import TINY, put_tiny

from uncollapse.lab.config.fields import build, parse_values
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.sentences import recipe as sentences
from uncollapse.lab.experiments.sentences import training as probes
from uncollapse.lab.tables.paper_table import build_cells

for library in ("sklearn", "accelerate"):
    pytest.importorskip(library)


@pytest.fixture(autouse=True)
def few_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the logistic regressions fast; `test_probes` covers them."""
    monkeypatch.setattr(probes, "FOLDS", 2)
    monkeypatch.setattr(probes, "STRENGTHS", (1.0,))


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    return Runtime(put_tiny(tmp_path))


def test_it_learns_to_find_neighbours(runtime: Runtime) -> None:
    encoders, record = sentences.train(replace(TINY, epochs=12), runtime)
    untrained = sentences.RECIPE.run(replace(TINY, epochs=0), runtime)
    assert not encoders.training
    figures, before = record["figures"], untrained["figures"]
    assert figures.keys() == before.keys() == {
        "validation", "objective", "alignment", "uniformity", "mr", "mr_output"
    }  # fmt: skip
    assert record["epochs"][-1]["objective"] < record["epochs"][0]["objective"] - 0.2  # of held-back documents
    assert len(record["epochs"]) == 12
    assert record["epochs"][-1]["loss"] < record["epochs"][0]["loss"]
    assert record["epochs"][-1]["validation"] == figures["validation"]
    assert (untrained["epochs"], untrained["ended"]) == ([], "untrained")


def test_alignment_alone_collapses_and_the_record_says_so(runtime: Runtime) -> None:
    record = sentences.RECIPE.run(replace(TINY, contrast=0.0, align=1.0, epochs=15), runtime)
    assert record["figures"]["uniformity"] > -0.1
    assert record["diagnosis"]["after"]["verdict"] == "complete"
    assert [layer["name"] for layer in record["diagnosis"]["before"]["layers"]] == ["words", "block 1", "output"]


@pytest.mark.parametrize("change", [{"encoder": "transformer"}, {"two_encoders": True}, {"precision": "bf16"}])
def test_other_encoders_train_too(runtime: Runtime, change: dict[str, Any]) -> None:
    record = sentences.RECIPE.run(replace(TINY, epochs=1, **change), runtime)
    assert record["config"] | change == record["config"]
    assert 0 < record["figures"]["mr"] <= 1


def test_the_record_is_json_and_says_how_to_repeat_it(runtime: Runtime) -> None:
    record = sentences.RECIPE.run(replace(TINY, epochs=1), runtime)
    again = json.loads(json.dumps(record))
    assert build(sentences.Config, again["config"]) == replace(TINY, epochs=1)
    assert (record["recipe"], record["seed"]) == ("sentences", 0)
    assert record["data"]["train"] == {"documents": 16, "sentences": 128}
    assert record["data"]["tasks"]["mr"]["always"] == 0.5
    assert sentences.RECIPE.same_data(TINY, runtime, record)
    assert runtime.data_root is not None
    path = runtime.data_root / "rt-polarity.all"
    path.write_text(path.read_text().replace("any1", "any2"))
    assert not sentences.RECIPE.same_data(TINY, runtime, record)
    assert sentences.RECIPE.same_data(replace(TINY, data="gone"), runtime, record)


def test_a_run_that_was_stopped_ends_with_the_same_figures(tmp_path: Path, runtime: Runtime) -> None:
    whole = sentences.RECIPE.run(TINY, runtime)

    def stop(done: int, total: int, figures: Any) -> None:
        if done == 8:
            raise KeyboardInterrupt

    kept = replace(runtime, checkpoints=tmp_path / "checkpoints", save_seconds=0.0)
    with pytest.raises(KeyboardInterrupt):
        sentences.RECIPE.run(TINY, replace(kept, progress=stop))
    resumed = sentences.RECIPE.run(TINY, kept)
    assert resumed["figures"] == whole["figures"]
    assert resumed["epochs"] == whole["epochs"]


def test_a_kept_encoder_has_its_words_beside_it(tmp_path: Path, runtime: Runtime) -> None:
    sentences.RECIPE.run(replace(TINY, epochs=1), replace(runtime, save_to=tmp_path / "kept"))
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {
        "config.json",
        "model.safetensors",
        "vocabulary.txt",
    }
    words = (tmp_path / "kept" / "vocabulary.txt").read_text(encoding="utf-8").splitlines()
    assert words[:2] == ["<padding>", "<unknown>"]


def test_the_paper_stands_beside_the_results() -> None:
    names = {field.name for field in fields(sentences.Config)}
    for table in sentences.RECIPE.tables.values():
        assert table.named <= names
    config = build(sentences.Config, sentences.RECIPE.presets["small"] | {"temperature": 0.075})
    record = {"recipe": "sentences", "seed": 0, "config": vars(config), "figures": {"mr": 0.7, "validation": 0.1}}
    found = build_cells(sentences.RECIPE.tables["mr"], [record])
    ours = next(cell for cell in found if cell.group == "brown")
    assert (ours.row, ours.figures) == ("C(τ=0.075)", {0: 70.0})
    papers = {cell.row: cell.published.mean for cell in found if cell.published is not None}
    assert papers == {"C(τ=0.075)": 77.51, "0.9·A(α=2) + 0.1·U(t=5)": 73.76}
    assert all(cell.group == "bookcorpus" for cell in found if cell.published is not None)


def test_presets_and_grids_are_settings_of_the_recipe() -> None:
    for values in (*sentences.RECIPE.presets.values(), sentences.RECIPE.quick):
        assert parse_values(sentences.Config, values) == dict(values)
    grids = {
        name: [cell for grid in of for cell in grid.cells(sentences.Config)]
        for name, of in sentences.RECIPE.grids.items()
    }
    runs = [trial for cell in grids["brown"] for trial in cell.trials]
    assert len(set(runs)) == len(runs) == 9
    assert len({sentences.name_of(run) for run in runs}) == 9
    assert sum(map(sentences.cost, runs)) < 3600
    assert [sentences.row_of(vars(run)) for run in runs[:3]] == ["C(τ=0.075)", "0.9·A(α=2) + 0.1·U(t=5)", "untrained"]
