"""Losses of this package in the interface of sentence-transformers: a module of a model, features and labels."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from uncollapse.errors import did_you_mean
from uncollapse.registry import LOSSES


class SentenceLoss(nn.Module):
    """Train a SentenceTransformer with a loss of `uc.LOSSES`, alone or in addition to a loss of their own.

        weight · loss(embeddings) + base(embeddings, labels)

    The embeddings are computed once for both. A loss of rows, such as `uniform_loss`, is the mean over the columns of
    the dataset, because a text and its paraphrase must not repel each other. A loss of pairs, such as `align_loss` and
    `info_nce`, takes the first two columns, anchors and positives; further columns are negatives, which `info_nce`
    takes as its queue and others ignore. Labels go to `base`. The trainer logs the terms by their names.

    Args:
        model: a SentenceTransformer.
        loss: name of a loss of rows or pairs, see `uc.LOSSES`.
        weight: factor of the loss.
        base: a loss of sentence-transformers with `compute_loss_from_embeddings`, or another SentenceLoss.
        options: of the loss, such as `t` or `temperature`; `gather=True` takes the rows of all processes as one batch.

    >>> import torch, uncollapse as uc
    >>> model = torch.nn.Module()  # stands for a SentenceTransformer
    >>> model.forward = lambda features: {"sentence_embedding": features["x"]}
    >>> loss = uc.SentenceLoss(model, "uniform_loss", weight=0.5, base=uc.SentenceLoss(model, "align_loss"))
    >>> loss([{"x": torch.eye(2)}, {"x": torch.eye(2)}])
    {'align_loss': tensor(0.), 'uniform_loss': tensor(-2.)}
    """

    def __init__(
        self, model: nn.Module, loss: str, *, weight: float = 1.0, base: nn.Module | None = None, **options: Any
    ) -> None:
        super().__init__()
        facts = LOSSES[loss]
        if facts.needs not in (("tokens",), ("tokens", "pairs")):
            usable = ", ".join(n for n, each in LOSSES.items() if each.needs in (("tokens",), ("tokens", "pairs")))
            raise ValueError(f"{loss} takes {' and '.join(facts.needs)}, not rows or pairs; choose one of {usable}.")
        known = list(inspect.signature(facts.function).parameters)[len(facts.needs) :]
        if unknown := [name for name in options if name not in known]:
            hint = did_you_mean(unknown[0], known)
            raise TypeError(f"{loss} has no option {unknown[0]!r}.{hint} There are: {', '.join(known)}.")
        if base is not None and not hasattr(base, "compute_loss_from_embeddings"):
            raise ValueError(
                f"base must have compute_loss_from_embeddings, and {type(base).__name__} has none; train with both as "
                "two datasets, loss={...}, as sentence-transformers does for several losses."
            )
        self.model, self.base, self.weight, self.options = model, base, weight, options
        self.loss, self.pairs, self.takes_queue = loss, "pairs" in facts.needs, "queue" in known

    def forward(
        self, sentence_features: Iterable[Mapping[str, Any]], labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the terms of the loss, whose sum is minimized."""
        columns = [self.model(dict(features))["sentence_embedding"] for features in sentence_features]
        return self.compute_loss_from_embeddings(columns, labels)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return the terms of the loss for embeddings (b, d), one tensor per column of the dataset."""
        terms: dict[str, Tensor] = {}
        if self.base is not None:
            given: Any = self.base
            found = given.compute_loss_from_embeddings(embeddings, labels)
            terms = dict(found) if isinstance(found, Mapping) else {"base": found}
        name = self.loss if self.loss not in terms else f"{self.loss}_{len(terms)}"
        return terms | {name: self.weight * self._value(embeddings)}

    def _value(self, columns: list[Tensor]) -> Tensor:
        function = LOSSES[self.loss].function
        if not self.pairs:
            return torch.stack([function(column, **self.options) for column in columns]).mean()
        if len(columns) < 2:
            raise ValueError(f"{self.loss} needs anchors and positives: two columns of texts, got {len(columns)}.")
        more = {"queue": torch.cat(columns[2:])} if self.takes_queue and len(columns) > 2 else {}
        value: Tensor = function(columns[0], columns[1], **more, **self.options)
        return value

    def get_config_dict(self) -> dict[str, Any]:
        """Return the settings, for the model card."""
        base = {} if self.base is None else {"base": type(self.base).__name__}
        return {"loss": self.loss, "weight": self.weight, **base, **self.options}

    @property
    def citation(self) -> str:
        """The paper of the loss, for the model card."""
        return LOSSES[self.loss].paper
