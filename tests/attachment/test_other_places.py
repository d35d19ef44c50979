"""Cures that need tensors of other places: the input of their module, or what the first block had in the same pass."""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import uncollapse as uc

from .tiny_models import Tiny, build, first

LEARNED: dict[str, dict[str, Any]] = {
    "initial_residual": {"scale": 0.3, "learnable": True},
    "value_residual": {"scale": 0.5, "learnable": True},
    "neutreno": {"scale": 5.0},
}
TRANSFORMERS = ("bert", "gpt2", "timm_vit")


def cured(name: str, cure: str, **options: Any) -> Tiny:
    tiny = build(name)
    uc.attach(tiny.model, cure, **{**LEARNED.get(cure, {}), **options}, **tiny.where)
    return tiny


def gradients(tiny: Tiny, *outputs: Tensor) -> list[Tensor]:
    """Gradients of all parameters: of these outputs, or of a new one."""
    tiny.model.zero_grad()
    for output in outputs or (tiny.output(),):
        output.square().sum().backward()
    return current_gradients(tiny.model)


def current_gradients(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# --- by hand ---


def test_residual_of_convolutions() -> None:
    tiny = build("gcn", blocks=4)
    plain = copy.deepcopy(tiny.model)
    handle = uc.attach(tiny.model, "residual", scale=0.5)
    assert handle.blocks == (1, 2)  # the others change the number of features
    x = tiny.batch["x"]
    for number, conv in enumerate(plain.convs):
        out = conv(x, tiny.batch["edge_index"])
        x = out + 0.5 * x if number in (1, 2) else out
        x = x.relu() if number < 3 else x
    torch.testing.assert_close(tiny.output(), x)


def test_residual_of_named_modules() -> None:
    tiny = build("mlp")
    plain = copy.deepcopy(tiny.model)
    with pytest.raises(ValueError, match="at=…: block"):
        uc.attach(tiny.model, "residual", **tiny.where)
    uc.attach(tiny.model, "residual", at="block", scale=2.0, **tiny.where)
    x = tiny.batch["x"]
    for layer in plain.layers:
        x = x + torch.relu(layer(x) + 2 * x)
    torch.testing.assert_close(tiny.output(), x)


def test_residual_needs_a_module_that_it_bridges() -> None:
    with pytest.raises(ValueError, match="is the input of one"):
        uc.attach(build("gcn").model, "residual", at="block", layers=1)
    with pytest.raises(ValueError, match="number of features"):
        uc.attach(build("gcn").model, "residual", layers=[0, -1])


def test_initial_residual_of_convolutions() -> None:
    tiny = build("gcn", blocks=4)
    plain = copy.deepcopy(tiny.model)
    handle = uc.attach(tiny.model, "initial_residual", scale=0.3)
    assert handle.blocks == (1, 2)
    x, initial = tiny.batch["x"], torch.empty(0)
    for number, conv in enumerate(plain.convs):
        x = conv(x, tiny.batch["edge_index"])
        initial = x if number == 0 else initial
        x = 0.7 * x + 0.3 * initial if number in (1, 2) else x
        x = x.relu() if number < 3 else x
    torch.testing.assert_close(tiny.output(), x)


@pytest.mark.parametrize("layers", [None, "last"])
def test_initial_residual_of_blocks(layers: str | None) -> None:
    """x₀ is that of the first block, also if only later blocks are selected, and all tokens are mixed."""
    tiny = build("timm_vit")
    plain: Any = copy.deepcopy(tiny.model)
    uc.attach(tiny.model, "initial_residual", scale=0.3, layers=layers)
    x = initial = plain._pos_embed(plain.patch_embed(tiny.batch["x"]))
    for number, block in enumerate(plain.blocks):
        x = block(0.7 * x + 0.3 * initial if number >= (1 if layers is None else 2) else x)
    torch.testing.assert_close(tiny.output(), plain.forward_head(plain.norm(x)))


def test_the_first_block_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="from the second block on"):
        uc.attach(build("bert").model, "initial_residual", layers=0)


def test_layer_norm_scaling_by_hand() -> None:
    tiny = build("timm_vit")
    plain: Any = copy.deepcopy(tiny.model)
    uc.attach(tiny.model, "layer_norm_scaling")
    x = plain._pos_embed(plain.patch_embed(tiny.batch["x"]))
    for depth, block in enumerate(plain.blocks, start=1):
        x = x + block.attn(block.norm1(x) / depth**0.5)
        x = x + block.mlp(block.norm2(x) / depth**0.5)
    torch.testing.assert_close(tiny.output(), plain.forward_head(plain.norm(x)))


def test_layer_scale_by_hand() -> None:
    tiny = build("encoder_pre_norm")
    plain: Any = copy.deepcopy(tiny.model)
    handle = uc.attach(tiny.model, "layer_scale")
    assert all(torch.equal(p, torch.full_like(p, 0.1)) for p in handle.parameters())
    x, padding = tiny.batch["src"], tiny.batch["src_key_padding_mask"]
    with torch.no_grad():
        for layer in plain.layers:
            x = x + 0.1 * layer._sa_block(layer.norm1(x), None, padding)
            x = x + 0.1 * layer._ff_block(layer.norm2(x))
        torch.testing.assert_close(tiny.output()[~padding], x[~padding])


def test_depth_of_shared_blocks_is_refused() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model.layers[1] = model.layers[0]
    with pytest.raises(ValueError, match="depth"):
        uc.attach(model, "layer_norm_scaling")


def attention_by_hand(attn: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Map, values and head-wise context of timm's attention."""
    q, k, v = attn.qkv(x).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
    maps = (q @ k.mT * attn.scale).softmax(-1)
    return maps, v, maps @ v


@pytest.mark.parametrize("cure", ["value_residual", "neutreno", "centered_attention", "gfsa", "output_gate"])
def test_cures_of_attention_by_hand(cure: str) -> None:
    tiny = build("timm_vit")
    plain: Any = copy.deepcopy(tiny.model)
    options = {"gfsa": {"scale": 0.5}, "output_gate": {}}.get(cure, {"scale": 0.7})
    handle = uc.attach(tiny.model, cure, **options)
    gates = {key.split()[1]: made for key, made in handle.cures.items()}
    x, initial = plain._pos_embed(plain.patch_embed(tiny.batch["x"])), None
    for number, block in enumerate(plain.blocks):
        inputs = block.norm1(x)
        maps, v, context = attention_by_hand(block.attn, inputs)
        initial = v if initial is None else initial
        match cure:
            case "value_residual" if number:
                context = maps @ (0.7 * initial + 0.3 * v)
            case "neutreno" if number:
                context = context + 0.7 * (initial - v)
            case "centered_attention":
                context = context - 0.7 * v.mean(-2, keepdim=True)
            case "gfsa":
                context = context + 0.5 * (maps + 3 * (maps @ maps - maps)) @ v
            case "output_gate":
                gate = torch.sigmoid(inputs @ gates[str(number)].weight.mT)
                context = context * gate.unflatten(-1, (4, 4)).transpose(1, 2)
        x = x + block.attn.proj(context.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.norm2(x))
    torch.testing.assert_close(tiny.output(), plain.forward_head(plain.norm(x)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])  # with padding; causal; with shared values
def test_gfsa_in_transformers(name: str, implementation: str) -> None:
    """A(Av) of the model's own attention function is the map that the model returns, applied twice."""
    tiny = build(name, blocks=1)
    model: Any = tiny.model
    maps = _maps(build(name, blocks=1))
    model.set_attn_implementation(implementation)
    saved, config = {}, model.config.to_dict()
    handle = uc.attach(model, "gfsa", scale=0.5, order=3)
    (made,) = handle.cures.values()
    made.register_forward_pre_hook(
        lambda m, args, kwargs: saved.update(heads=args[0], v=args[1], **kwargs), with_kwargs=True
    )
    tiny.output()
    real = tiny.batch["attention_mask"].bool()[:, None, :, None].expand_as(saved["v"])
    expected = maps @ saved["v"]
    torch.testing.assert_close(saved["heads"][real], expected[real], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(saved["second"][real], (maps @ expected)[real], rtol=1e-4, atol=1e-5)
    assert model.config.to_dict() == config
    found = uc.diagnose(model, [tiny.batch], plan=uc.Plan(baseline=0))  # which reads maps by eager attention
    assert found.layers
    assert model.config._attn_implementation == implementation


def _maps(tiny: Tiny) -> Tensor:
    model: Any = tiny.model
    model.set_attn_implementation("eager")
    found: Tensor = model(**tiny.batch, output_attentions=True).attentions[0]
    return found


# --- one pass, several passes, recomputation ---


@pytest.mark.parametrize("cure", LEARNED)
def test_shared_blocks_take_the_first_call(cure: str) -> None:
    tiny = build("albert")
    plain = tiny.output()
    uc.attach(tiny.model, cure, **LEARNED[cure])
    output = tiny.output()
    assert (output - plain).abs().max() > 1e-4
    assert torch.equal(tiny.output(), output)


def use_checkpoints(tiny: Tiny, reentrant: bool) -> None:
    """Checkpoint every block, as the library of the model does."""
    model: Any = tiny.model
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return
    for block in model.blocks:
        inner = block.__class__.__call__
        block.__class__ = type(
            "Checkpointed",
            (block.__class__,),
            {"__call__": lambda self, x, inner=inner: checkpoint(inner, self, x, use_reentrant=reentrant)},
        )


@pytest.mark.parametrize("cure", LEARNED)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_checkpointing_gives_the_same_gradients(name: str, cure: str) -> None:
    expected = gradients(cured(name, cure))
    tiny = cured(name, cure)
    use_checkpoints(tiny, reentrant=False)
    assert_same(gradients(tiny), expected)


@pytest.mark.parametrize("cure", LEARNED)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_two_passes_before_the_backward_passes(name: str, cure: str) -> None:
    """Each recomputation finds the tensor of its own pass."""
    tiny, plain = cured(name, cure), cured(name, cure)
    key = "x" if name == "timm_vit" else "input_ids"
    other = dict(tiny.batch, **{key: tiny.batch[key].flip(-1)})
    use_checkpoints(tiny, reentrant=False)
    outputs = [[first(one.model(**batch)) for batch in (one.batch, other)] for one in (tiny, plain)]
    assert_same(gradients(tiny, *outputs[0]), gradients(plain, *outputs[1]))


@pytest.mark.parametrize("cure", LEARNED)
def test_reentrant_checkpointing_is_refused(cure: str) -> None:
    tiny = cured("timm_vit", cure)
    use_checkpoints(tiny, reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        tiny.model(tiny.batch["x"].requires_grad_())


@pytest.mark.parametrize("cure", LEARNED)
def test_a_pass_without_the_first_block(cure: str) -> None:
    tiny = cured("bert", cure)
    tiny.output()
    model: Any = tiny.model
    model.encoder.layer = model.encoder.layer[1:]
    with pytest.raises(RuntimeError, match="first block, which did not run"):
        tiny.output()


@pytest.mark.parametrize("cure", LEARNED)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_copies_between_and_after_passes(name: str, cure: str) -> None:
    tiny = cured(name, cure)
    output = tiny.output()  # its graph lives while the model is copied
    for copied in (copy.deepcopy(tiny.model), pickle.loads(pickle.dumps(tiny.model))):
        assert torch.equal(first(copied(**tiny.batch)), output)
    own = gradients(tiny, output)
    assert_same(gradients(Tiny(copied, tiny.batch)), own)


@pytest.mark.parametrize("cure", LEARNED)
def test_nothing_outlives_the_graph(cure: str) -> None:
    tiny = cured("timm_vit", cure)
    seen = []

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.extend(weakref.ref(x) for x in (*args, *kwargs.values()))

    (attachment,) = uc.attachments(tiny.model)
    for made in attachment.cures.values():
        made.register_forward_pre_hook(look, with_kwargs=True)
    tiny.output().sum().backward()
    gc.collect()
    assert len(seen) >= 4
    assert [ref for ref in seen if ref() is not None] == []


def test_a_changed_tensor_is_not_the_first_one() -> None:
    """A model may change the tensor in place after the first block had it."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True)) for _ in range(3)))
    x = torch.randn(4, 6)
    plain = copy.deepcopy(model)
    uc.attach(model, "initial_residual", scale=0.5, modules=["0.0", "1.0", "2.0"], layout="vectors")
    initial = plain[0][0](x)
    y = initial.relu()
    for layer in plain[1:]:
        y = (0.5 * layer[0](y) + 0.5 * initial).relu()
    torch.testing.assert_close(model(x), y)


@pytest.mark.parametrize("cure", ["value_residual", "neutreno", "gfsa", "output_gate", "initial_residual"])
def test_saved_and_loaded(cure: str, tmp_path: Any) -> None:
    tiny = cured("bert", cure)
    for attachment in uc.attachments(tiny.model):
        for parameter in attachment.parameters():
            nn.init.uniform_(parameter)
    uc.save_cure(tiny.model, tmp_path)
    other = build("bert")
    assert (other.output() - tiny.output()).abs().max() > 1e-5
    uc.load_cure(other.model, tmp_path)
    assert torch.equal(other.output(), tiny.output())


@pytest.mark.parametrize("cure", ["gfsa", "output_gate", "centered_attention"])
@pytest.mark.parametrize("name", ["timm_vit", "gpt2"])
def test_cures_of_attention_copied(name: str, cure: str) -> None:
    tiny = build(name)
    plain = tiny.output()
    uc.attach(tiny.model, cure, **({"scale": 0.5} if cure == "gfsa" else {}), **tiny.where)
    output = tiny.output()
    for copied in (copy.deepcopy(tiny.model), pickle.loads(pickle.dumps(tiny.model))):
        assert torch.equal(first(copied(**tiny.batch)), output)
        uc.detach(copied)
        assert torch.equal(first(copied(**tiny.batch)), plain)
    assert torch.equal(tiny.output(), output)
