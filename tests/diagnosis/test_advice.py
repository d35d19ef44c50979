"""Advice can be followed: every line of code that a diagnosis shows runs on the model that it was given for."""

from typing import Any

import pytest
import torch
from tests.attachment.tiny_models import build
from torch import nn

import uncollapse as uc
from uncollapse import backbones
from uncollapse.diagnosis.advice import suggest
from uncollapse.diagnosis.verdict import Subject


@pytest.mark.filterwarnings("ignore:.*no batch")
@pytest.mark.parametrize("kind", ["complete", "dimensional", "both"])
@pytest.mark.parametrize("name", ["bert", "timm_vit", "gpt2", "gcn", "encoder"])
def test_advice_can_be_followed(name: str, kind: Any) -> None:
    model = build(name).model
    stack = backbones.find(model)
    subject = Subject(stack.family, stack.architecture, stack.context((), {}).causal, stack.places())
    tips = [tip for onset in ("embed", "block 1") for tip in suggest(kind, onset, subject)]
    assert len(tips) >= 2
    for tip in tips:
        keys = list(model.state_dict())
        exec(tip.code, {"uc": uc, "model": model})
        (attachment,) = uc.attachments(model)
        assert attachment.cure == tip.cure
        assert attachment.at == (tip.place,)
        uc.detach(model)
        assert list(model.state_dict()) == keys


@pytest.mark.parametrize(
    ("onset", "where"), [("block 1", "in each block up to block 1"), ("blocks.5", "in each block")]
)
def test_the_words_and_the_line_name_the_same_blocks(onset: str, where: str) -> None:
    tip = suggest("dimensional", onset, Subject("torch", "Model", False, ("block",)))[0]
    assert where in tip.reason
    assert ("layers=" in tip.code) == ("up to" in tip.reason)


def test_advice_for_modules_by_name() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
    with torch.no_grad():
        for layer in model:
            layer.weight.copy_(torch.ones(16, 16) + 0.001 * torch.eye(16))
    d = uc.diagnose(model, [torch.rand(4, 8, 16)], modules="*", layout="tokens")
    assert d.verdict.collapsed
    assert d.verdict.certainty in str(d)
    for tip in d.verdict.advice:
        assert tip.code in str(d)
        exec(tip.code, {"uc": uc, "model": model})
        assert len(uc.attachments(model)[0].cures) == 3
        uc.detach(model)


@pytest.mark.parametrize("kind", ["complete", "dimensional", "both"])
def test_stored_rows_that_are_alike_are_mended_first(kind: Any) -> None:
    tips = suggest(kind, "embeddings", Subject("embeddings", "embeddings", False, ("block",)))
    assert [tip.cure for tip in tips] == [*["all_but_the_top"] * (kind != "dimensional"), "uniform_loss"]
    for tip in tips:
        exec(tip.code, {"uc": uc, "x": torch.randn(50, 8) + 2, "loss": torch.zeros(())})
