"""The evaluator of sentence-transformers: its metrics, its CSV file, and inside their trainer."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.diagnosis.tiny_sentences_model import TEXTS, make

import uncollapse as uc
from uncollapse.backbones import torchvision_ops

torchvision_ops.declare()
library: Any = pytest.importorskip("sentence_transformers")
pytest.importorskip("accelerate")
datasets: Any = pytest.importorskip("datasets")


@pytest.fixture
def model(tmp_path: Path) -> Any:
    return make(tmp_path / "encoder")


def test_metrics_are_those_of_the_embeddings(model: Any, tmp_path: Path) -> None:
    evaluator = uc.GeometryEvaluator(TEXTS[:40], TEXTS[40:80], name="words")
    metrics = evaluator(model, str(tmp_path / "eval"), epoch=1, steps=20)
    first, second = (torch.tensor(model.encode(part)) for part in (TEXTS[:40], TEXTS[40:80]))
    assert evaluator.primary_metric == "words_effective_rank"
    assert evaluator.greater_is_better
    assert metrics["words_effective_rank"] == pytest.approx(float(uc.effective_rank(first)), rel=1e-4)
    assert metrics["words_alignment"] == pytest.approx(float(uc.alignment(first, second)), rel=1e-4)
    assert metrics["words_uniformity"] == pytest.approx(float(uc.uniformity(first)), rel=1e-4)
    assert metrics["words_collapsed"] in (0.0, 1.0)
    evaluator(model, str(tmp_path / "eval"), epoch=2, steps=40)
    with (tmp_path / "eval" / "geometry_evaluation_words_results.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["steps"] for row in rows] == ["20", "40"]
    assert float(rows[0]["alignment"]) == metrics["words_alignment"]
    assert rows[0]["verdict"] == evaluator.diagnosis.verdict.kind


def test_without_pairs_and_name(model: Any) -> None:
    evaluator = uc.GeometryEvaluator(TEXTS, truncate_dim=8)
    metrics = evaluator(model)
    assert evaluator.csv_file == "geometry_evaluation_results.csv"
    assert "alignment" not in metrics
    assert evaluator.diagnosis.layers[0].dim == 8


@pytest.mark.parametrize("wrong", [False, True], ids=["", "after an error"])
def test_each_module_keeps_its_mode(model: Any, wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model.train()
    frozen = model[0].eval()
    if wrong:
        monkeypatch.setattr(uc.GeometryEvaluator, "_encode", lambda self, model, texts: model.eval().nothing)
    try:
        uc.GeometryEvaluator(TEXTS)(model)
    except AttributeError:
        assert wrong
    assert not any(module.training for module in frozen.modules())
    assert model.training
    assert model[1].training


def train(model: Any, folder: Path, **options: Any) -> Any:
    data = datasets.Dataset.from_dict({"anchor": TEXTS[:16], "positive": TEXTS[16:32]})
    arguments = {"max_steps": 4, "report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 1}
    arguments |= options.pop("args", {})
    args = library.SentenceTransformerTrainingArguments(str(folder), per_device_train_batch_size=8, **arguments)
    return library.SentenceTransformerTrainer(model, args, train_dataset=data, **options)


def test_the_trainer_evaluates_and_chooses_by_it(model: Any, tmp_path: Path) -> None:
    loss = uc.SentenceLoss(model, "uniform_loss", weight=0.5, base=uc.SentenceLoss(model, "align_loss"))
    evaluator = uc.GeometryEvaluator(TEXTS, name="words")
    args = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True}
    args |= {"metric_for_best_model": "eval_words_effective_rank"}
    trainer = train(model, tmp_path / "run", loss=loss, evaluator=evaluator, args=args)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "eval_words_effective_rank" in entry]
    assert [entry["step"] for entry in logged] == [2, 4]
    assert trainer.state.best_metric == max(entry["eval_words_effective_rank"] for entry in logged)
    assert (tmp_path / "run" / "eval" / "geometry_evaluation_words_results.csv").is_file()
    assert any("uniform_loss" in entry and "align_loss" in entry for entry in trainer.state.log_history)


def test_a_callback_and_a_monitor_log_through_the_trainer(model: Any, tmp_path: Path) -> None:
    mnrl = library.sentence_transformer.losses.MultipleNegativesRankingLoss(model)
    loss = uc.SentenceLoss(model, "global_orthogonal_loss", weight=0.1, base=mnrl)
    trainer = train(model, tmp_path / "run", loss=loss)
    uc.GeometryEvaluator(TEXTS).watch(trainer, every=2)
    uc.Monitor(TEXTS, every=4, measures=["uniformity"]).watch(trainer)
    trainer.train()
    history = trainer.state.log_history
    assert [entry["step"] for entry in history if "eval_effective_rank" in entry] == [0, 2, 4]
    assert [entry["step"] for entry in history if "collapse/uniformity/sentence_embedding" in entry] == [0, 4]
    assert len([entry for entry in history if "loss" in entry]) == 4, "the trainer's own lines are all there"


@pytest.mark.parametrize(
    ("given", "word"), [((["one"],), "two"), (("text",), "list"), ((TEXTS, TEXTS[:3]), "one text per sentence")]
)
def test_refusals(given: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        uc.GeometryEvaluator(*given)
