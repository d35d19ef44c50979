"""A transform as the last module of a sentence-transformers model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import uncollapse as uc
from uncollapse.backbones import torchvision_ops
from uncollapse.embeddings.linear_map import TransformModule

DIM = 6
ROWS = torch.randn(300, DIM, generator=torch.Generator().manual_seed(0)) + 2


class Bag(nn.Module):
    """Embeds a text by its letters, in place of an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(256, DIM)

    def tokenize(self, texts: list[str], **_: Any) -> dict[str, Any]:
        ids = [torch.tensor(list(text.encode()[:8].ljust(8))) for text in texts]
        return {"input_ids": torch.stack(ids)}

    preprocess = tokenize

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        features["sentence_embedding"] = self.letters(features["input_ids"]).mean(1)
        return features


@pytest.mark.parametrize("method", ["center", "all_but_the_top", "whiten", "pca", "none"])
def test_it_transforms_the_embedding_and_is_saved(method: Any, tmp_path: Path) -> None:
    transform = uc.EmbeddingTransform(method, k=1, dims=3).fit(ROWS)
    module = transform.as_module()
    found = module({"sentence_embedding": ROWS, "input_ids": 1})
    assert torch.equal(found["sentence_embedding"], transform.transform(ROWS))
    assert found["input_ids"] == 1
    assert module.get_sentence_embedding_dimension() == transform.n_features_out_
    module.save(str(tmp_path / "1_Transform"))
    loaded = TransformModule.load(str(tmp_path), "1_Transform", local_files_only=True)
    assert torch.equal(loaded({"sentence_embedding": ROWS})["sentence_embedding"], found["sentence_embedding"])
    assert uc.EmbeddingTransform.load(tmp_path / "1_Transform").method_ == method
    assert not list(module.parameters())


def test_a_model_encodes_saves_and_loads_with_it(tmp_path: Path) -> None:
    torchvision_ops.declare()
    library = pytest.importorskip("sentence_transformers")
    texts = [f"sentence {number}" for number in range(60)]
    plain = library.SentenceTransformer(modules=[Bag()], device="cpu")
    before = plain.encode(texts)
    transform = uc.EmbeddingTransform("all_but_the_top", k=1).fit(before)
    model = library.SentenceTransformer(modules=[*plain, transform.as_module()], device="cpu")
    after = model.encode(texts)
    torch.testing.assert_close(torch.tensor(after), torch.tensor(transform.transform(before)), rtol=1e-5, atol=1e-5)
    assert abs(float(uc.mean_cosine(torch.tensor(after)))) < float(uc.mean_cosine(torch.tensor(before)))
