"""Measure the embeddings of a sentence-transformers model while its tokens are measured, for the same diagnosis."""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from uncollapse.backbones.forward import is_sentence_model, sentence_embeddings
from uncollapse.backbones.sites import OUTPUT
from uncollapse.diagnosis.describe import NO_PAIRS
from uncollapse.diagnosis.embeddings import RowStatistics, merge_ranks
from uncollapse.diagnosis.result import Certainty, Diagnosis, Verdict

NAME, PLACE = "sentence", "embedding"  # of the layer: "sentence embedding"
DOUBTS: tuple[Certainty, ...] = ("high", "medium", "low")


class SentenceRows:
    """The embeddings that a model returns; of a model that is not a SentenceTransformer there are none."""

    def __init__(self, wanted: bool, seed: int) -> None:
        self._wanted, self._seed = wanted, seed
        self._statistics: RowStatistics | None = None

    @classmethod
    def of(cls, model: nn.Module, seed: int) -> "SentenceRows":
        """Return what gathers the embeddings of a model."""
        return cls(is_sentence_model(model), seed)

    def update(self, output: Any, second: Any = None) -> None:
        """Add the embeddings of a batch, and those of its second view if there is one."""
        rows, pairs = (_on_cpu(sentence_embeddings(each)) for each in (output, second))
        if not self._wanted or rows is None:
            return
        self._statistics = self._statistics or RowStatistics(rows.shape[1], seed=self._seed)
        self._statistics.update(rows, pairs)

    def gather(self) -> None:
        """Merge the embeddings of all processes into the first one; all must call this."""
        if self._wanted:
            self._statistics = merge_ranks(self._statistics or RowStatistics(1, seed=self._seed))

    def join(self, tokens: Diagnosis) -> Diagnosis:
        """Return the diagnosis of a model's tokens with the layer of its embeddings and the verdict on both."""
        if self._statistics is None or self._statistics.count < 2:
            return tokens
        rows = self._statistics.diagnosis(layer=f"{NAME} {PLACE}")
        layer = replace(rows.layers[0], name=NAME, place=PLACE)
        ends = sum(each.place == OUTPUT for each in tokens.layers)
        layers = (*tokens.layers[:ends], layer, *tokens.layers[ends:])
        return replace(tokens, layers=layers, verdict=join_verdicts(tokens.verdict, rows.verdict))


def _on_cpu(rows: Tensor | None) -> Tensor | None:
    return None if rows is None else rows.detach().float().cpu()


def join_verdicts(tokens: Verdict, rows: Verdict) -> Verdict:
    """Return one verdict: that on the tokens first, and that on the embeddings if only they are collapsed."""
    only_rows = rows.collapsed and not tokens.collapsed
    doubts = (rows.certainty if only_rows else tokens.certainty, rows.certainty)
    return Verdict(
        rows.kind if only_rows else tokens.kind,
        rows.onset if only_rows else tokens.onset,
        max(doubts if tokens.collapsed == rows.collapsed else doubts[:1], key=DOUBTS.index),
        f"Tokens: {tokens.sentence} Embeddings: {rows.sentence}",
        (*tokens.evidence, *rows.evidence),
        (*tokens.cautions, *(f"Embeddings: {each}" for each in rows.cautions if each != NO_PAIRS)),
        (*tokens.advice, *rows.advice),
        rows.outlook if only_rows else tokens.outlook,
        rows.causes if only_rows else tokens.causes,
    )
