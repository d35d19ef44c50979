"""What every cure keeps to in every family of models: cures × models, each at its own place.

A new cure or model is tested the day it is added to the registry or to `tiny_models`.
"""

import copy
import gc
import inspect
import io
import pickle
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

import uncollapse as uc
from uncollapse import backbones
from uncollapse.backbones import random_weights
from uncollapse.registry import CURES, Cure

from .by_hand import assert_clean
from .tiny_models import Tiny, build, convert, first

MODELS = ("bert", "hf_vit", "gpt2", "llama", "timm_vit", "encoder", "encoder_pre_norm", "decoder_pre_norm", "gcn")
WITH_VALUES = ("bert", "albert", "hf_vit", "gpt2", "llama", "timm_vit")  # torch computes them without a module
DECODERS = ("gpt2", "llama", "decoder_pre_norm")
OF_FIRST = ("initial_residual", "value_residual", "neutreno")  # they take a tensor of the first block
NAMES = ("bert", "albert", "gpt2", "llama", "timm_vit", "encoder", "encoder_pre_norm", "gcn", "mlp", "cnn")


def fits(cure: Cure, model: str, tiny: Tiny) -> bool:
    """Return whether the model has the place that the cure names, and the cure suits its kind."""
    if cure.acts_on != "tokens":
        return model == "gcn" if cure.acts_on == "edges" else model in WITH_VALUES
    places = uc.places(tiny.model)
    if cure.pre_norm and "attention.norm.input" not in places:
        return False
    if model in DECODERS and cure.mixes and not cure.takes("causal"):
        return False
    return any(place in places for place in (*cure.place, *cure.elsewhere))


def cured(name: str, cure: str = "contra_norm", **options: Any) -> tuple[Tiny, uc.Attachment]:
    """Return a model with a cure, of scale 0.6 where the cure has one."""
    tiny, known = build(name), inspect.signature(CURES[cure].layer).parameters
    scale = {"scale": 0.6} if "scale" in known else {}
    wide = {"dim": 16} if name == "cnn" and options.get("learnable") else {}
    return tiny, uc.attach(tiny.model, cure, **{**scale, **wide, **options}, **tiny.where)


def run(tiny: Tiny, model: nn.Module | None = None) -> Tensor:
    """Return the output of the model, or of another one for the same batch; edges are dropped in the same way."""
    torch.manual_seed(0)
    return first((model or tiny.model)(**tiny.batch)).detach()


def gradients(tiny: Tiny, model: nn.Module) -> list[Tensor | None]:
    torch.manual_seed(0)
    return list(
        torch.autograd.grad(first(model(**tiny.batch)).square().sum(), list(model.parameters()), allow_unused=True)
    )


def strengthen(handle: uc.Attachment) -> None:
    """Give learned parameters other values: many begin where the cure does nothing."""
    for parameter in handle.parameters():
        parameter.data.add_(torch.rand_like(parameter))


@pytest.mark.parametrize("name", CURES)
def test_every_cure_has_models(name: str) -> None:
    assert [model for model in MODELS if fits(CURES[name], model, build(model))]


@pytest.mark.parametrize("model", [*MODELS, "albert"])
@pytest.mark.parametrize("name", CURES)
def test_attach_train_copy_save_and_remove(name: str, model: str, tmp_path: Path) -> None:
    tiny, cure = build(model), CURES[name]
    keys, before = list(tiny.model.state_dict()), run(tiny)
    if not fits(cure, model, tiny):
        with pytest.raises((ValueError, RuntimeError), match=f"{name}|{cure.layer.__name__}"):
            run(cured_like(tiny, cure))
        uc.detach(tiny.model)
        assert torch.equal(run(tiny), before)
        return
    tiny, handle = cured(model, name)
    assert [key for key in tiny.model.state_dict() if ".uncollapse." not in f".{key}"] == keys
    added = handle.parameters()
    assert {id(p) for p in added} <= {id(p) for p in tiny.model.parameters()}
    torch.manual_seed(0)
    first(tiny.model.train()(**tiny.batch)).square().mean().backward()
    assert all(p.grad is not None and bool((p.grad != 0).any()) for p in added)
    strengthen(handle)
    tiny.model.train(cure.acts_on == "edges")  # those act in training only; nothing else drops out
    changed, own = run(tiny), gradients(tiny, tiny.model)
    assert (changed - before).abs().max() > 1e-5
    assert bool(changed.isfinite().all())
    uc.save_cure(tiny.model, tmp_path)
    loaded, (twin, _) = build(model).model, cured(model, name)
    uc.load_cure(loaded, tmp_path)
    twin.model.load_state_dict(tiny.model.state_dict(), strict=True)
    copies = [copy.deepcopy(tiny.model), pickle.loads(pickle.dumps(tiny.model)), loaded, twin.model]
    handle.remove()
    assert torch.equal(run(tiny), before)
    for copied in copies:
        copied.train(tiny.model.training)
        assert torch.equal(run(tiny, copied), changed)
        torch.testing.assert_close(gradients(tiny, copied), own)
        uc.detach(copied)
        assert torch.equal(run(tiny, copied), before)
        assert list(copied.state_dict()) == keys
        assert_clean(copied)
    assert_clean(tiny.model)


def cured_like(tiny: Tiny, cure: Cure) -> Tiny:
    """Attach a cure that does not fit; a decoder of torch only learns when it runs that it is causal."""
    scale = {"scale": 0.6} if "scale" in inspect.signature(cure.layer).parameters else {}
    uc.attach(tiny.model, cure.name, **scale, **tiny.where)
    return tiny


def disturbed(model: str, cure: str, token: int) -> tuple[Tensor, Tensor]:
    """Return outputs of a cured model before and after one token of each text was replaced."""
    tiny, handle = cured(model, cure)
    for parameter in handle.parameters():
        nn.init.uniform_(parameter, 0.1, 0.9)
    other = tiny.batch["input_ids"].clone()
    other[:, token] = 3
    with torch.no_grad():
        return tiny.output(), tiny.output(input_ids=other)


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


# --- copies ---


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(model: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(model).module


def averaged_by_timm(model: nn.Module) -> nn.Module:
    ema = ModelEmaV3(model)
    ema.update(model)
    return ema.module


@pytest.mark.parametrize("way", [copy.deepcopy, saved, averaged, averaged_by_timm])
@pytest.mark.parametrize("name", NAMES)
def test_copies_are_models_of_their_own(name: str, way: Any) -> None:
    tiny, plain = build(name), run(build(name))
    tiny, _ = cured(name, **({"layers": [0, 2]} if name == "albert" else {}))
    output = run(tiny)
    assert (output - plain).abs().max() > 0.05
    copied = way(tiny.model)
    own = {id(module) for module in tiny.model.modules()}
    for attachment in uc.attachments(copied):
        for cure in attachment.cures.values():
            assert id(cure) not in own
            cure.fixed_scale = 0.0
    assert torch.equal(run(tiny, copied), plain)  # its cures are off
    assert torch.equal(run(tiny), output)
    uc.detach(tiny.model)
    assert torch.equal(run(tiny), plain)
    for attachment in uc.attachments(copied):
        for cure in attachment.cures.values():
            cure.fixed_scale = 0.6
    assert torch.equal(run(tiny, copied), output)


@pytest.mark.parametrize("name", ["bert", "timm_vit", "gcn"])
def test_functional_call(name: str) -> None:
    tiny, _ = cured(name, learnable=True)
    weights, call = (
        {key: value.detach().clone() for key, value in tiny.model.named_parameters()},
        torch.func.functional_call,
    )
    torch.testing.assert_close(first(call(tiny.model, weights, (), tiny.batch)), tiny.output())
    weights = {key: value * (".uncollapse." not in key) for key, value in weights.items()}
    uncured = first(call(tiny.model, weights, (), tiny.batch))
    uc.detach(tiny.model)
    torch.testing.assert_close(uncured, tiny.output())


def test_a_parametrized_host() -> None:
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


# --- failures, and what outlives a pass ---

BAD = {
    "bert": lambda batch: {**batch, "input_ids": batch["input_ids"] + 50},
    "timm_vit": lambda batch: {"x": batch["x"][:, :2]},
    "encoder_pre_norm": lambda batch: {**batch, "src_key_padding_mask": batch["src_key_padding_mask"][:, :3]},
    "gcn": lambda batch: {**batch, "batch": batch["batch"][:5]},
    "mlp": lambda batch: {"x": batch["x"][..., :5]},
}


@pytest.mark.parametrize("name", BAD)
def test_a_forward_pass_that_fails_leaves_nothing(name: str) -> None:
    tiny, _ = cured(name)
    output = run(tiny)
    with pytest.raises((ValueError, RuntimeError, AssertionError, IndexError)):
        tiny.model(**BAD[name](tiny.batch))
    assert torch.equal(run(tiny), output)


def test_a_failure_within_a_block_frees_its_activations() -> None:
    """In a pre-norm block the change waits for the end of the block, which is never reached."""
    tiny, _ = cured("encoder_pre_norm")
    output, seen = run(tiny), []

    def fail(module: nn.Module, args: Any) -> None:
        seen.append(weakref.ref(args[0]))
        raise KeyError("in the middle")

    hook = tiny.model.layers[1].linear1.register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="middle"):
        tiny.output()
    hook.remove()
    gc.collect()
    assert [ref() for ref in seen] == [None]
    states = [s for m in tiny.model.modules() if "_uncollapse_hooks" in m.__dict__ for s in m._uncollapse_hooks.states]
    assert [state.key for state in states].count("torch block") == 3
    assert all(state.context is state.carried is None and not state.held and not state.running for state in states)
    assert torch.equal(run(tiny), output)


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize(("name", "cure"), [*((n, "contra_norm") for n in NAMES), *(("timm_vit", c) for c in OF_FIRST)])
def test_nothing_outlives_a_pass_and_its_graph(name: str, cure: str, with_gradients: bool) -> None:
    tiny, handle = cured(name, cure)
    seen: list[Any] = []

    def look(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.extend(weakref.ref(x) for x in (*args, *kwargs.values()) if isinstance(x, Tensor))

    for one in handle.cures.values():
        one.register_forward_pre_hook(look, with_kwargs=True)
    with torch.set_grad_enabled(with_gradients):
        output = tiny.output()
    if with_gradients:
        output.sum().backward()
    del output
    gc.collect()
    inputs = {id(value) for value in tiny.batch.values()}
    assert len(seen) >= len(handle.cures)
    assert not [ref().shape for ref in seen if ref() is not None and id(ref()) not in inputs]


# --- dtypes and devices ---

# bfloat16 has 8 bits: 2^-8 of outputs of size 1 to 4, after three blocks
BOUNDS = {torch.bfloat16: 0.08, torch.float16: 0.01, torch.float64: 2e-6}
IN_OTHER_DTYPES = [name for name in NAMES if name not in ("albert", "llama", "cnn")]


def check_precision(tiny: Tiny, output: Tensor, exact: Tensor, plain: Tensor, bound: float) -> None:
    """The output is close, far closer than without the cure, and learned scales get finite gradients."""
    assert (output.float() - exact).abs().max() < min(bound, 0.3 * (exact - plain).abs().max())
    output.float().square().sum().backward()
    scales = [p.grad for name, p in tiny.model.named_parameters() if name.endswith("scale_param")]
    assert scales
    assert all(g is not None and torch.isfinite(g).all() for g in scales)
    assert any(g.abs().max() > 0 for g in scales)


@pytest.mark.parametrize("name", IN_OTHER_DTYPES)
def test_autocast(name: str) -> None:
    plain, (tiny, handle), seen = run(build(name)), cured(name, learnable=True), []
    exact = run(tiny)
    for module in tiny.model.modules():
        if not isinstance(module, uc.ContraNorm):
            module.register_forward_hook(
                lambda m, args, out: seen.append((m, first(out).dtype)) if first(out) is not None else None
            )
    with torch.autocast("cpu", torch.bfloat16):
        output = tiny.output()
        cured_dtypes, _ = list(seen), seen.clear()
        check_precision(tiny, output, exact, plain, 0.04)
        handle.remove()
        assert output.dtype == tiny.output().dtype
    assert cured_dtypes == seen  # of every module, so of the stream
    assert seen


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", IN_OTHER_DTYPES)
def test_models_of_another_dtype(name: str, dtype: torch.dtype) -> None:
    """Converted after the cure came in, and before: the same."""
    plain, (tiny, _) = run(build(name)), cured(name, learnable=True)
    exact, batch = run(tiny), convert(tiny.batch, dtype)
    output = first(tiny.model.to(dtype)(**batch))
    assert output.dtype == dtype
    assert {p.dtype for p in tiny.model.parameters()} == {dtype}
    check_precision(tiny, output, exact, plain, BOUNDS[dtype])
    before = build(name)
    handle = uc.attach(before.model.to(dtype), "contra_norm", scale=0.6, learnable=True, **before.where)
    assert all(torch.equal(scale, torch.full_like(scale, 0.6)) for scale in handle.parameters())
    near = 1e-6 if dtype == torch.float64 else 0.0  # a start of 0.6 was rounded to float32 before
    torch.testing.assert_close(first(before.model(**batch)), output, atol=near, rtol=0)


def test_a_model_without_memory_gets_its_cure_with_the_weights() -> None:
    layer = {"d_model": 16, "nhead": 2, "dim_feedforward": 32, "batch_first": True}
    with torch.device("meta"):
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer), 2)
    handle = uc.attach(model, "contra_norm", scale=0.5, learnable=True)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    trained = nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer), 2).eval()
    uc.attach(trained, "contra_norm", scale=0.5, learnable=True)
    model.load_state_dict(trained.state_dict())
    x = torch.randn(2, 5, 16)
    assert torch.equal(model.eval()(x), trained(x))
    handle.remove()
    assert (model(x) - trained(x)).abs().max() > 0.1


# --- where attachments are found, and what they say ---


def test_attachments_are_found_from_the_whole_and_from_its_parts() -> None:
    tiny = build("bert")
    whole, plain, layer = nn.ModuleDict({"inner": tiny.model}), tiny.output(), tiny.model.encoder.layer[0]
    handles = tuple(uc.attach(model, "contra_norm", scale=0.5, layers=n) for n, model in enumerate((tiny.model, whole)))
    assert uc.attachments(whole) == uc.attachments(tiny.model.encoder) == handles
    assert not torch.equal(tiny.output(), plain)
    x = torch.randn(2, 5, 16)
    with_cure, copied = layer(x), copy.deepcopy(layer)
    uc.detach(copied)  # a copied part
    assert uc.attachments(whole) == handles
    assert torch.equal(layer(x), with_cure)
    uc.detach(tiny.model)
    assert uc.attachments(whole) == ()
    assert torch.equal(copied(x), layer(x))
    assert not torch.equal(layer(x), with_cure)
    assert torch.equal(tiny.output(), plain)


def test_the_same_cure_at_the_same_place_is_a_warning() -> None:
    model = build("encoder").model
    uc.attach(model, "contra_norm", scale=0.5, layers="first 2")
    with pytest.warns(UserWarning, match="already"):
        uc.attach(model, "contra_norm", scale=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        uc.attach(model, "pair_norm")
        uc.attach(model, "contra_norm", scale=0.5, at="mlp.output")


@pytest.mark.parametrize("cure", [name for name, entry in CURES.items() if entry.acts_on != "edges"])
@pytest.mark.parametrize("name", ["timm_vit", "bert", "gcn"])
@pytest.mark.filterwarnings("ignore:The model already has this cure there")
def test_the_same_cure_twice_comes_out_in_any_order(name: str, cure: str) -> None:
    """As when a notebook cell runs twice."""
    tiny = build(name)
    plain, options = tiny.output(), {"scale": 0.5} if cure in ("gfsa", "contra_norm") else {}
    try:
        one, two = (uc.attach(tiny.model, cure, **options, **tiny.where) for _ in range(2))
    except ValueError:
        pytest.skip(f"{cure} does not fit {name}")
    tiny.output()
    one.remove()
    with_two = tiny.output()
    two.remove()
    assert torch.equal(tiny.output(), plain)
    alone = uc.attach(tiny.model, cure, **options, **tiny.where)
    for module, other in zip(alone.cures.values(), two.cures.values(), strict=True):
        module.load_state_dict(other.state_dict())
    assert torch.equal(tiny.output(), with_two)


@pytest.mark.parametrize("name", ["bert", "timm_vit", "gpt2", "gcn", "encoder"])
def test_the_random_twin_of_a_diagnosis_has_the_cure_as_it_began(name: str) -> None:
    tiny, _ = cured(name, learnable=True)
    for parameter in tiny.model.parameters():
        nn.init.constant_(parameter, 0.125)
    twin = backbones.find(tiny.model).reinitialize(tiny.model)
    (attachment,) = uc.attachments(twin)
    assert all(torch.equal(p, torch.full_like(p, 0.6)) for p in attachment.parameters())
    own = [p for name, p in twin.named_parameters() if not random_weights.is_of_cure(name) and p.dim() > 1]
    assert all(p.unique().numel() > 1 or bool((p == 0).all()) for p in own)
    assert all(bool((p == 0.125).all()) for p in tiny.model.parameters())


def test_a_diagnosis_sees_a_cure_as_a_written_layer_and_names_it() -> None:
    tiny = build("mlp")
    written = copy.deepcopy(tiny.model)
    written.layers = nn.ModuleList(nn.Sequential(one, uc.ContraNorm(None, 0.6, after=None)) for one in written.layers)
    batches = [{"x": torch.randn(4, 6, 16)} for _ in range(2)]
    options: dict[str, Any] = {"modules": ["layers.*"], "plan": uc.Plan(baseline=0)}
    plain, expected = uc.diagnose(tiny.model, batches, **options), uc.diagnose(written, batches, **options)
    with uc.attach(tiny.model, "contra_norm", scale=0.6, layers=1, **tiny.where):
        found = uc.diagnose(tiny.model, batches, **options)
    assert repr(found.layers) != repr(plain.layers)
    with uc.attach(tiny.model, "contra_norm", scale=0.6, **tiny.where):
        assert repr(uc.diagnose(tiny.model, batches, **options).layers) == repr(expected.layers)
        assert uc.diagnose(tiny.model, batches, modules=["layers.*"]).baseline  # the random twin runs
    assert "cures" not in plain.settings
    assert found.settings["cures"] == ["contra_norm (scale=0.6) at block in block 1 of Perceptron"]
    assert f"with {found.settings['cures'][0]}" in str(found)
    assert uc.Diagnosis.from_json(found.to_json()) == found
