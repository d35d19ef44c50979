"""Evaluate the geometry of sentence embeddings while a SentenceTransformerTrainer trains, without labels."""

import csv
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from uncollapse.backbones import torchvision_ops
from uncollapse.diagnosis.build import Labels
from uncollapse.diagnosis.embeddings import diagnose_rows
from uncollapse.diagnosis.result import Diagnosis
from uncollapse.errors import import_optional

logger = logging.getLogger(__name__)

METRICS = ("alignment", "uniformity", "uniformity_gap", "effective_rank", "rank_share", "mean_cosine", "robust_cosine")
COLLAPSED = "collapsed"


class GeometryEvaluator:
    """Measure alignment, uniformity, rank and cosines of embeddings, as an evaluator of sentence-transformers.

    It goes where evaluators go: `SentenceTransformerTrainer(..., evaluator=...)`, alone, in a list or in a
    SequentialEvaluator, or `evaluator(model)`. The metrics have the names of `uncollapse embeddings`, with the
    evaluator's name in front; `collapsed` is 1 if the verdict is a collapse. The primary metric is the effective rank:
    for embeddings of the same data it is RankMe (arXiv 2210.02885), which predicts the quality of a representation
    without labels. `evaluator.diagnosis` has everything else about the last evaluation. It is an instance of their
    BaseEvaluator and needs the extra `st`.

    Args:
        sentences: texts, at least a few hundred.
        pairs: the second text of each, such as a paraphrase, for alignment.
        name: goes in front of the metrics and into the name of the CSV file.
        batch_size: of the encoder.
        show_progress_bar: while texts are encoded.
        write_csv: append a line to geometry_evaluation_NAME_results.csv in the evaluation's folder.
        truncate_dim: measure only so many features, as in Matryoshka models.
    """

    primary_metric: str

    def __new__(cls, *args: Any, **kwargs: Any) -> "GeometryEvaluator":
        """Return an instance that is a BaseEvaluator as well: the library is imported only now."""
        base = _evaluator_class()
        return object.__new__(
            cls if issubclass(cls, base) else type(cls.__name__, (cls, base), {"__doc__": cls.__doc__})
        )

    def __init__(
        self,
        sentences: Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        name: str = "",
        batch_size: int = 32,
        show_progress_bar: bool = False,
        write_csv: bool = True,
        truncate_dim: int | None = None,
    ) -> None:
        super().__init__()
        if isinstance(sentences, str) or len(sentences) < 2:
            raise ValueError("sentences must be a list of at least two texts: collapse is about how they differ.")
        if pairs is not None and len(pairs) != len(sentences):
            raise ValueError(f"pairs must have one text per sentence, {len(sentences)}, got {len(pairs)}.")
        self.sentences, self.pairs, self.name = list(sentences), None if pairs is None else list(pairs), name
        self.batch_size, self.show_progress_bar, self.truncate_dim = batch_size, show_progress_bar, truncate_dim
        self.write_csv = write_csv
        self.csv_file = f"geometry_evaluation{'_' + name if name else ''}_results.csv"
        names = METRICS if pairs is not None else METRICS[1:]
        self.csv_headers = ["epoch", "steps", *names, "verdict"]
        self.greater_is_better, self.primary_metric = True, "effective_rank"
        self.diagnosis: Diagnosis | None = None

    def __call__(
        self, model: Any, output_path: str | None = None, epoch: float = -1, steps: int = -1
    ) -> dict[str, float]:
        """Return the metrics of a model; the trainer calls this."""
        self.diagnosis = found = self.diagnose(model)
        layer = found.layers[0]
        values = {name: layer[name] for name in self.csv_headers[2:-1]}
        when = (
            "" if epoch == -1 else f" after epoch {epoch}" if steps == -1 else f" in epoch {epoch} after {steps} steps"
        )
        logger.info("Geometry of the embeddings of %s%s: %s", self.name or "the texts", when, found.verdict.sentence)
        if output_path is not None and self.write_csv:
            self._append(Path(output_path), [epoch, steps, *values.values(), found.verdict.kind])
        own: Any = self  # the methods of their class
        metrics: dict[str, float] = own.prefix_name_to_metrics(
            values | {COLLAPSED: float(found.verdict.collapsed)}, self.name
        )
        if hasattr(model, "model_card_data"):
            own.store_metrics_in_model_card_data(model, metrics, epoch, steps)
        return metrics

    def diagnose(self, model: Any) -> Diagnosis:
        """Return the diagnosis of the embeddings of the texts."""
        modes = [(module, module.training) for module in model.modules()]
        try:
            rows = self._encode(model, self.sentences)
            pairs = None if self.pairs is None else [self._encode(model, self.pairs)]
        finally:  # encode leaves the model in evaluation mode
            for module, mode in modes:
                module.training = mode
        labels = Labels(self.name or "embeddings", f"{len(self.sentences)} texts")
        return diagnose_rows([rows], pairs=pairs, draws=0, labels=labels)

    def watch(self, trainer: Any, every: int) -> None:
        """Evaluate every so many steps, whatever the trainer's own evaluations are, and log where the trainer reports.

        Call this before `trainer.train()`. `uc.Monitor(...).watch(trainer)` measures the layers as well.
        """
        from uncollapse.monitoring.hf_callback import EvaluatorCallback

        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}.")
        trainer.add_callback(EvaluatorCallback(self, trainer, every))

    def get_config_dict(self) -> dict[str, Any]:
        """Return the settings, for the model card."""
        return {} if self.truncate_dim is None else {"truncate_dim": self.truncate_dim}

    def _encode(self, model: Any, texts: list[str]) -> torch.Tensor:
        options = {"batch_size": self.batch_size, "show_progress_bar": self.show_progress_bar}
        if self.truncate_dim is not None:
            options["truncate_dim"] = self.truncate_dim
        rows: torch.Tensor = model.encode(texts, convert_to_tensor=True, **options)
        return rows.float().cpu()

    def _append(self, folder: Path, row: list[Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.csv_file
        new = not path.is_file()
        with path.open("w" if new else "a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([self.csv_headers, row] if new else [row])


def _evaluator_class() -> type:
    """Return BaseEvaluator, which was SentenceEvaluator before sentence-transformers 5.4."""
    torchvision_ops.declare()
    library: Any = import_optional("sentence_transformers", "st")
    try:
        module: Any = import_optional(f"{library.__name__}.base.evaluation", "st")
        found: type = module.BaseEvaluator
    except (ImportError, ValueError):
        module = import_optional(f"{library.__name__}.evaluation", "st")
        found = module.SentenceEvaluator
    return found
