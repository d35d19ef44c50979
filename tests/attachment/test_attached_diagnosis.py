"""Diagnosing models with cures, and the advice of a diagnosis."""

from typing import Any

import pytest
import torch
from torch import nn

import uncollapse as uc
from uncollapse import backbones
from uncollapse.backbones import random_weights
from uncollapse.diagnosis.advice import suggest
from uncollapse.diagnosis.verdict import Subject

from .tiny_models import build

MODELS = ["bert", "timm_vit", "gpt2", "gcn", "encoder"]


@pytest.mark.filterwarnings("ignore:.*no batch")
@pytest.mark.parametrize("kind", ["complete", "dimensional", "both"])
@pytest.mark.parametrize("name", MODELS)
def test_advice_can_be_followed(name: str, kind: Any) -> None:
    """Every line of code that a diagnosis shows runs on the model that it was given for."""
    model = build(name).model
    stack = backbones.find(model)
    causal = stack.context((), {}).causal
    subject = Subject(stack.family, stack.architecture, causal, stack.places())
    tips = [t for onset in ("embed", "block 1") for t in suggest(kind, onset, subject)]
    assert len(tips) >= 2
    for tip in tips:
        keys = list(model.state_dict())
        exec(tip.code, {"uc": uc, "model": model})
        (attachment,) = uc.attachments(model)
        assert attachment.cure == tip.cure
        assert attachment.at == (tip.place,)
        uc.detach(model)
        assert list(model.state_dict()) == keys


def test_advice_for_layers_that_were_named() -> None:
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


def test_the_diagnosis_names_the_cures() -> None:
    model, batches = build("encoder").model, [torch.randn(4, 8, 16)]
    assert "cures" not in uc.diagnose(model, batches).settings
    with uc.attach(model, "contra_norm", scale=0.5, layers=1):
        d = uc.diagnose(model, batches)
    assert d.settings["cures"] == ["contra_norm (scale=0.5) at attention.residual in block 1 of TransformerEncoder"]
    assert "with contra_norm (scale=0.5) at attention.residual in block 1 of TransformerEncoder" in str(d)
    assert uc.Diagnosis.from_json(d.to_json()) == d


@pytest.mark.parametrize("name", MODELS)
def test_the_random_twin_has_the_cure_as_it_began(name: str) -> None:
    model = build(name).model
    uc.attach(model, "contra_norm", scale=0.5, learnable=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.125)
    stack = backbones.find(model)
    assert stack.reinitialize is not None
    twin = stack.reinitialize(model)
    (attachment,) = uc.attachments(twin)
    for cure in attachment.cures.values():
        assert torch.equal(next(cure.parameters()), torch.full_like(next(cure.parameters()), 0.5))
    own = [p for name, p in twin.named_parameters() if not random_weights.is_of_cure(name) and p.dim() > 1]
    assert all(p.unique().numel() > 1 or bool((p == 0).all()) for p in own)
    assert all(bool((p == 0.125).all()) for p in model.parameters())
