"""Losses in the interface of sentence-transformers: what they compute, combine, refuse and train."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import uncollapse as uc


class Identity(nn.Module):
    """Stands for a SentenceTransformer; it counts its calls."""

    calls = 0

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        self.calls += 1
        features["sentence_embedding"] = features["x"]
        return features


class Squares(nn.Module):
    """Stands for a loss of sentence-transformers."""

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor) -> Tensor:
        return embeddings[0].square().sum() * labels


def columns(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(6, 4, generator=generator, dtype=torch.float64)} for _ in range(count)]


def test_a_loss_of_rows_is_the_mean_over_columns() -> None:
    given = columns(3)
    found = uc.SentenceLoss(Identity(), "koleo_loss", weight=0.5)(given)
    expected = sum(uc.koleo_loss(c["x"]) for c in columns(3)) / 3 * 0.5
    torch.testing.assert_close(found["koleo_loss"], expected)
    assert "sentence_embedding" not in given[0], "the features of the trainer are not changed"


def test_a_loss_of_pairs_takes_anchors_positives_and_negatives() -> None:
    x, y, z = (c["x"] for c in columns(3))
    found = uc.SentenceLoss(Identity(), "info_nce", temperature=0.05)
    torch.testing.assert_close(found(columns(2))["info_nce"], uc.info_nce(x, y, temperature=0.05))
    torch.testing.assert_close(found(columns(3))["info_nce"], uc.info_nce(x, y, temperature=0.05, queue=z))
    torch.testing.assert_close(uc.SentenceLoss(Identity(), "align_loss")(columns(3))["align_loss"], uc.align_loss(x, y))


def test_losses_add_up_and_share_the_embeddings() -> None:
    model = Identity()
    inner = uc.SentenceLoss(model, "align_loss", base=Squares())
    loss = uc.SentenceLoss(model, "uniform_loss", weight=0.1, t=3.0, base=inner)
    terms = loss(columns(2), torch.tensor(2.0))
    x, y = (c["x"] for c in columns(2))
    assert list(terms) == ["base", "align_loss", "uniform_loss"]
    torch.testing.assert_close(terms["base"], 2 * x.square().sum())
    torch.testing.assert_close(terms["uniform_loss"], 0.1 * uc.uniform_loss(x, 3.0, y=y))
    assert model.calls == 2
    assert loss.get_config_dict() == {"loss": "uniform_loss", "weight": 0.1, "base": "SentenceLoss", "t": 3.0}


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"loss": "patch_mixing_loss"}, ValueError, "patch_mixing_loss"),
        ({"loss": "uniform_loss", "temperatur": 1}, TypeError, "temperatur"),
        ({"loss": "uniform_loss", "base": nn.Linear(1, 1)}, ValueError, "Linear"),
        ({"loss": "uniforms"}, KeyError, "uniforms"),
    ],
)
def test_refusals(options: dict[str, Any], error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        uc.SentenceLoss(Identity(), **options)


def test_pairs_need_two_columns() -> None:
    with pytest.raises(ValueError, match="two columns"):
        uc.SentenceLoss(Identity(), "align_loss")(columns(1))
