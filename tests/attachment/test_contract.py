"""What every cure of the registry keeps to when it is attached; a new one is tested the day it is added."""

import copy
import inspect
from typing import Any

import pytest
import torch

import uncollapse as uc
from uncollapse.registry import CURES, Cure

from .tiny_models import Tiny, build, first

ARGUMENTS: dict[str, Any] = {"scale": 0.5}  # for all constructors that take it
MODELS = ("bert", "hf_vit", "gpt2", "llama", "timm_vit", "encoder", "encoder_pre_norm", "decoder_pre_norm", "gcn")
WITH_VALUES = ("bert", "hf_vit", "gpt2", "llama", "timm_vit")  # torch's attention computes them without a module
DECODERS = ("gpt2", "llama", "decoder_pre_norm")


def fits(cure: Cure, model: str, tiny: Tiny) -> bool:
    """Whether the model has the place that the cure names, and the cure suits its kind."""
    if cure.acts_on != "tokens":
        return model == "gcn" if cure.acts_on == "edges" else model in WITH_VALUES
    places = uc.places(tiny.model)
    if cure.pre_norm and "attention.norm.input" not in places:
        return False
    if model in DECODERS and cure.mixes and not cure.takes("causal"):
        return False
    return any(place in places for place in (*cure.place, *cure.elsewhere))


def given(cure: Cure) -> dict[str, Any]:
    return {name: ARGUMENTS[name] for name in inspect.signature(cure.layer).parameters if name in ARGUMENTS}


def attach_and_run(tiny: Tiny, cure: Cure) -> None:
    """A decoder of torch only learns when it runs that it is causal."""
    uc.attach(tiny.model, cure.name, **given(cure), **tiny.where)
    tiny.output()


@pytest.mark.parametrize("name", CURES)
def test_every_cure_has_models(name: str) -> None:
    assert [model for model in MODELS if fits(CURES[name], model, build(model))]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", CURES)
def test_attach_train_and_remove(name: str, model: str) -> None:
    tiny, cure = build(model), CURES[name]
    keys, before = list(tiny.model.state_dict()), tiny.output()
    if not fits(cure, model, tiny):
        with pytest.raises((ValueError, RuntimeError), match=f"{name}|{cure.layer.__name__}"):
            attach_and_run(tiny, cure)
        uc.detach(tiny.model)
        assert torch.equal(tiny.output(), before)
        return
    handle = uc.attach(tiny.model, name, **given(cure), **tiny.where)
    assert set(keys) <= set(tiny.model.state_dict())
    added = handle.parameters()
    assert {id(p) for p in added} <= {id(p) for p in tiny.model.parameters()}
    torch.manual_seed(0)
    first(tiny.model.train()(**tiny.batch)).square().mean().backward()
    assert all(p.grad is not None and bool((p.grad != 0).any()) for p in added)
    with torch.no_grad():
        for parameter in added:
            parameter.add_(torch.rand_like(parameter))
    tiny.model.train(cure.acts_on == "edges")  # those act in training only; nothing else drops out
    changed = tiny.output()
    assert (changed - before).abs().max() > 1e-5
    assert bool(changed.isfinite().all())
    if cure.acts_on != "edges":
        copied = copy.deepcopy(tiny.model)
        handle.remove()
        assert torch.equal(first(copied(**tiny.batch)), changed)
        uc.detach(copied)
        assert torch.equal(first(copied(**tiny.batch)), before)
    handle.remove()
    tiny.model.eval()
    assert torch.equal(tiny.output(), before)
    assert list(tiny.model.state_dict()) == keys


def disturbed(name: str, cure: str, token: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of a cured model before and after one token of each text was replaced."""
    tiny = build(name)
    for parameter in uc.attach(tiny.model, cure, **given(CURES[cure])).parameters():
        torch.nn.init.uniform_(parameter, 0.1, 0.9)
    other = tiny.batch["input_ids"].clone()
    other[:, token] = 3
    with torch.no_grad():
        return tiny.output(), first(tiny.model(**{**tiny.batch, "input_ids": other}))


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("name", CURES)
def test_no_token_of_a_decoder_depends_on_later_ones(name: str, model: str) -> None:
    if not fits(CURES[name], model, build(model)):
        return
    before, after = disturbed(model, name, token=4)
    torch.testing.assert_close(after[:, :4], before[:, :4])
    assert (after[:, 4] - before[:, 4]).abs().max() > 1e-4


@pytest.mark.parametrize("name", CURES)
def test_no_real_token_depends_on_padding(name: str) -> None:
    if not fits(CURES[name], "bert", build("bert")):
        return
    before, after = disturbed("bert", name, token=6)  # the second text has five tokens
    torch.testing.assert_close(after[1, :5], before[1, :5])
    assert (after[0] - before[0]).abs().max() > 1e-4
