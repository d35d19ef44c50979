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


def bert() -> Any:
    import transformers

    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24
    )
    return transformers.BertModel(config).eval()


def vit() -> Any:
    import timm

    return timm.create_model("vit_tiny_patch16_224", depth=3, embed_dim=24, num_heads=3, img_size=32)


def gpt2() -> Any:
    import transformers

    return transformers.GPT2Model(transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=3, n_head=2))


def gcn() -> Any:
    from torch_geometric.nn import GCN

    return GCN(8, 16, 3, 4)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 3)


MODELS = [bert, vit, gpt2, gcn, encoder]


@pytest.mark.filterwarnings("ignore:.*no batch")
@pytest.mark.parametrize("kind", ["complete", "dimensional", "both"])
@pytest.mark.parametrize("build", MODELS)
def test_advice_can_be_followed(build: Any, kind: Any) -> None:
    """Every line of code that a diagnosis shows runs on the model that it was given for."""
    model = build()
    stack = backbones.find(model)
    causal = stack.context((), {}).causal
    tips = [t for onset in ("embed", "block 1") for t in suggest(kind, onset, subject(stack, causal))]
    assert len(tips) >= 2
    for tip in tips:
        keys = list(model.state_dict())
        exec(tip.code, {"uc": uc, "model": model})
        (attachment,) = uc.attachments(model)
        assert attachment.cure == tip.cure
        assert attachment.at == (tip.place,)
        uc.detach(model)
        assert list(model.state_dict()) == keys


def subject(stack: Any, causal: bool) -> Subject:
    return Subject(stack.family, stack.architecture, causal, stack.places())


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


def test_the_diagnosis_tells_the_cures() -> None:
    model, batches = encoder(), [torch.randn(4, 8, 16)]
    assert "cures" not in uc.diagnose(model, batches).settings
    with uc.attach(model, "contra_norm", scale=0.5, layers=1):
        d = uc.diagnose(model, batches)
    assert d.settings["cures"] == ["contra_norm (scale=0.5) at attention.residual in block 1 of TransformerEncoder"]
    assert "with contra_norm (scale=0.5) at attention.residual in block 1 of TransformerEncoder" in str(d)
    assert uc.Diagnosis.from_json(d.to_json()) == d


@pytest.mark.parametrize("build", MODELS)
def test_the_random_twin_has_the_cure_as_it_began(build: Any) -> None:
    model = build()
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
