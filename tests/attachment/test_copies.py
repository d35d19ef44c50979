"""Copies of models with cures, their state, and what a model keeps when it fails or is trained in parts."""

import copy
import dataclasses
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn

import uncollapse as uc

from .tiny_models import build, first

NAMES = ("bert", "albert", "gpt2", "llama", "timm_vit", "encoder", "encoder_pre_norm", "gcn", "mlp", "cnn")


def cured(name, cure="contra_norm", **options):
    """A tiny model with a cure, its output before and with it."""
    tiny = build(name)
    plain = tiny.output().detach()
    given = {"scale": 0.6, **options} if cure == "contra_norm" else options
    uc.attach(tiny.model, cure, **given, **tiny.where)
    output = tiny.output().detach()
    assert cure == "attn_scale" or (output - plain).abs().max() > 0.05
    return tiny, plain, output


def loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(model):
    return torch.optim.swa_utils.AveragedModel(model).module


def timm_averaged(model):
    pytest.importorskip("timm")
    from timm.utils import ModelEmaV3

    ema = ModelEmaV3(model)
    ema.update(model)
    return ema.module


WAYS = (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), loaded, averaged, timm_averaged)


@pytest.mark.parametrize("way", WAYS, ids=["deepcopy", "pickle", "save", "swa", "timm_ema"])
@pytest.mark.parametrize("name", NAMES)
def test_copies_are_models_of_their_own(name, way):
    tiny, plain, output = cured(name)
    copied = way(tiny.model)
    assert torch.equal(first(copied(**tiny.batch)), output)
    own = {id(module) for module in tiny.model.modules()}
    for attachment in uc.attachments(copied):
        for cure in attachment.cures.values():
            assert id(cure) not in own
            cure.fixed_scale = 0.0
    assert torch.equal(first(copied(**tiny.batch)), plain)  # its cures are off
    assert torch.equal(tiny.output(), output)
    uc.detach(copied)
    assert torch.equal(first(copied(**tiny.batch)), plain)
    assert list(copied.state_dict()) == list(build(name).model.state_dict())
    assert torch.equal(tiny.output(), output)
    uc.detach(tiny.model)
    assert torch.equal(tiny.output(), plain)


@pytest.mark.parametrize("cure", ["attn_scale", "feat_scale"])
def test_a_copy_of_a_learned_cure_is_free(cure):
    tiny = build("timm_vit")
    handle = uc.attach(tiny.model, cure, **tiny.where)
    before, copied = tiny.output(), copy.deepcopy(tiny.model)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            if ".uncollapse." in name:
                parameter.fill_(50.0)  # the weights of a new model are small
    assert (first(copied(**tiny.batch)) - before).abs().max() > 1e-3
    assert torch.equal(tiny.output(), before)
    assert all(parameter.abs().max() == 0 for made in handle.cures.values() for parameter in made.parameters())


def test_removal_of_the_original_leaves_the_copy():
    tiny, plain, output = cured("albert", layers=[0, 2])
    copied = copy.deepcopy(tiny.model)
    uc.detach(tiny.model)
    assert torch.equal(tiny.output(), plain)
    assert torch.equal(first(copied(**tiny.batch)), output)


@pytest.mark.parametrize("name", NAMES)
def test_state_goes_into_another_cured_model(name):
    wide = {"dim": 16} if name == "cnn" else {}
    tiny = build(name)
    own = tiny.model.state_dict()
    uc.attach(tiny.model, "contra_norm", scale=0.6, learnable=True, **wide, **tiny.where)
    with torch.no_grad():
        for parameter in tiny.model.parameters():
            parameter.mul_(1.1)
    state = tiny.model.state_dict()
    assert [key for key in state if ".uncollapse." not in f".{key}"] == list(own)
    assert {key.rpartition(".")[2] for key in state.keys() - own.keys()} == {"scale_param"}
    other = build(name, seed=1)
    uc.attach(other.model, "contra_norm", scale=0.1, learnable=True, **wide, **tiny.where)
    assert (first(other.model(**tiny.batch)) - tiny.output()).abs().max() > 0.01
    other.model.load_state_dict(state, strict=True)
    assert torch.equal(first(other.model(**tiny.batch)), tiny.output())


@pytest.mark.parametrize("name", ["bert", "timm_vit", "gcn"])
def test_functional_call(name):
    tiny, _, _ = cured(name, learnable=True)
    weights = {key: value.detach().clone() for key, value in tiny.model.named_parameters()}
    run = torch.func.functional_call
    assert torch.allclose(first(run(tiny.model, weights, (), tiny.batch)), tiny.output(), atol=1e-6)
    weights = {key: value * (".uncollapse." not in key) for key, value in weights.items()}
    uncured = first(run(tiny.model, weights, (), tiny.batch))
    uc.detach(tiny.model)
    assert torch.allclose(uncured, tiny.output(), atol=1e-6)


def test_a_parametrized_host():
    tiny = build("timm_vit")
    norm = tiny.model.blocks[1].norm2
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.Tanh())
    plain = tiny.output()
    with uc.attach(tiny.model, "contra_norm", scale=0.6, **tiny.where):
        output = tiny.output()
        assert (output - plain).abs().max() > 0.05
        nn.utils.parametrize.remove_parametrizations(norm, "weight", leave_parametrized=True)  # now the class changes
        assert torch.equal(tiny.output(), output)
        nn.utils.parametrize.register_parametrization(norm, "bias", nn.Tanh())
        assert (tiny.output() - plain).abs().max() > 0.05
    assert torch.equal(tiny.output(), plain)


BAD = {
    "bert": lambda batch: {**batch, "input_ids": batch["input_ids"] + 50},
    "timm_vit": lambda batch: {"x": batch["x"][:, :2]},
    "encoder_pre_norm": lambda batch: {**batch, "src_key_padding_mask": batch["src_key_padding_mask"][:, :3]},
    "gcn": lambda batch: {**batch, "batch": batch["batch"][:5]},
    "mlp": lambda batch: {"x": batch["x"][..., :5]},
}


@pytest.mark.parametrize("name", BAD)
def test_a_forward_pass_that_fails_leaves_nothing(name):
    tiny, _, output = cured(name)
    with pytest.raises((ValueError, RuntimeError, AssertionError, IndexError)):
        tiny.model(**BAD[name](tiny.batch))
    assert torch.equal(tiny.output(), output)


def test_a_failure_within_a_block_frees_its_activations():
    """In a pre-norm block the change waits for the end of the block, which is never reached."""
    tiny, _, output = cured("encoder_pre_norm")
    seen = []

    def fail(module, args):
        seen.append(weakref.ref(args[0]))
        raise KeyError("in the middle")

    hook = tiny.model.layers[1].linear1.register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="middle"):
        tiny.output()
    hook.remove()
    gc.collect()
    assert [ref() for ref in seen] == [None]
    frames = [frame for m in tiny.model.modules() for frame in _frames(m)]
    assert [frame.key for frame in frames].count("torch block") == 3
    assert all(frame.carried is None and not frame.held and not frame.running for frame in frames)
    assert torch.equal(tiny.output(), output)


def _frames(module):
    port = module.__dict__.get("_uncollapse_hooks")
    return port.states if port is not None else []


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_a_pass_is_kept(name):
    """Whatever the cure was given, of a model that only runs, is freed."""
    tiny, _, _ = cured(name)
    seen = []

    def look(module, args, kwargs):
        seen.extend(weakref.ref(x) for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))

    cures = [c for a in uc.attachments(tiny.model) for c in a.cures.values()]
    for cure in cures:
        cure.register_forward_pre_hook(look, with_kwargs=True)
    with torch.no_grad():
        tiny.output()
    gc.collect()
    inputs = {id(value) for value in tiny.batch.values()}
    assert len(seen) >= len(cures)
    assert not [ref().shape for ref in seen if ref() is not None and id(ref()) not in inputs]


def test_a_diagnosis_sees_what_a_written_layer_would_show():
    tiny = build("mlp")
    written = copy.deepcopy(tiny.model)
    written.layers = nn.ModuleList(
        nn.Sequential(layer, uc.ContraNorm(None, 0.6, after=None)) for layer in written.layers
    )
    batches = [{"x": torch.randn(4, 6, 16)} for _ in range(2)]
    options = {"modules": ["layers.*"], "plan": uc.Plan(baseline=0)}
    plain = uc.diagnose(tiny.model, batches, **options)
    with uc.attach(tiny.model, "contra_norm", scale=0.6, **tiny.where):
        found = uc.diagnose(tiny.model, batches, **options)
    expected = uc.diagnose(written, batches, **options)
    assert [_figures(layer) for layer in found.layers] == [_figures(layer) for layer in expected.layers]
    assert [_figures(layer) for layer in found.layers] != [_figures(layer) for layer in plain.layers]


def test_a_diagnosis_compares_a_cured_model_with_a_random_one():
    tiny, _, output = cured("timm_vit", cure="contra_norm", learnable=True)
    batches = [{"x": torch.randn(4, 3, 8, 8)} for _ in range(2)]
    found = uc.diagnose(tiny.model, batches, plan=uc.Plan(baseline=1))
    assert len(found.baseline) == len(found.layers)
    assert torch.equal(tiny.output(), output)


def _figures(layer):
    """All numbers of a layer, to ten digits."""
    return repr(dataclasses.asdict(layer))


# --- where attachments are found ---


def test_attachments_are_found_from_the_whole_and_from_its_parts():
    tiny = build("bert")
    whole = nn.ModuleDict({"inner": tiny.model})
    plain = tiny.output()
    first_handle = uc.attach(tiny.model, "contra_norm", scale=0.5, layers=0)
    second = uc.attach(whole, "contra_norm", scale=0.5, layers=1)
    assert uc.attachments(whole) == uc.attachments(tiny.model.encoder) == (first_handle, second)
    assert not torch.equal(tiny.output(), plain)
    uc.detach(tiny.model)
    assert uc.attachments(whole) == ()
    assert torch.equal(tiny.output(), plain)


def test_a_copied_part_can_be_detached():
    tiny, x = build("encoder"), torch.randn(2, 5, 16)
    plain = tiny.model.layers[0](x)
    handle = uc.attach(tiny.model, "contra_norm", scale=0.5)
    copied = copy.deepcopy(tiny.model.layers[0])
    uc.detach(copied)
    assert torch.equal(copied(x), plain)
    assert uc.attachments(tiny.model) == (handle,)


def test_the_same_cure_at_the_same_place_is_a_warning():
    model = build("encoder").model
    uc.attach(model, "contra_norm", scale=0.5, layers="first 2")
    with pytest.warns(UserWarning, match="already: contra_norm"):
        uc.attach(model, "contra_norm", scale=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        uc.attach(model, "pair_norm")
        uc.attach(model, "contra_norm", scale=0.5, at="mlp.output")
