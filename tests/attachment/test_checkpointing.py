"""Gradient checkpointing runs blocks again in the backward pass: with the same gradients, or an error."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import uncollapse as uc

from .by_hand import BY_NAME, SCALE
from .tiny_models import Tiny, build, first

BLOCKS = {
    **{"bert": "encoder.layer", "gpt2": "h", "llama": "layers", "timm_vit": "blocks", "mlp": "layers", "gcn": "convs"},
    **dict.fromkeys(("encoder", "encoder_pre_norm", "decoder_pre_norm"), "layers"),
    "albert": "encoder.albert_layer_groups.0.albert_layers",
}
TWO = ("attention.residual", "block")


class Again(nn.Module):
    """A block with its hooks, run again in the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def __getattr__(self, name: str) -> Any:  # torch's encoder looks at its layers
        return super().__getattr__(name) if name == "block" else getattr(self.block, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


def checkpointed(model: Any, path: str) -> Any:
    blocks = model.get_submodule(path)
    for number, block in enumerate(blocks):
        blocks[number] = Again(block)
    return model


def gradients(tiny: Tiny, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Two batches with other padding pass before one backward pass, which runs the blocks of both again."""
    torch.manual_seed(seed)
    tiny.model.zero_grad()
    given = tiny.batch
    if "edge_index" not in given:
        turned = {key: value.flip(0) if value.shape[0] == 2 else value for key, value in given.items()}
    else:
        turned = given
    mask = given.get("attention_mask", torch.ones(2, 7)).bool()
    outputs = [first(tiny.model(**batch)) for batch in (given, turned)]
    if "attention_mask" in given:
        outputs = [outputs[0][mask], outputs[1][mask.flip(0)]]
    loss = torch.stack([output.pow(3).mean() for output in outputs]).sum()
    loss.backward()
    found = {key: p.grad.clone() for key, p in tiny.model.named_parameters() if p.grad is not None}
    return loss.detach(), {key.replace(".block.", "."): value for key, value in found.items()}


def double(name: str, **options: Any) -> Tiny:
    tiny = build(name, **options)
    batch = {key: value.double() if value.is_floating_point() else value for key, value in tiny.batch.items()}
    return Tiny(tiny.model.double(), batch, tiny.where)


def assert_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    assert any("uncollapse" in key and g.abs().max() > 1e-6 for key, g in expected.items())
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-7, msg=key)


@pytest.mark.parametrize(
    ("name", "at"),
    [*((name, TWO) for name in BLOCKS if name not in ("mlp", "gcn")), ("mlp", "block"), ("mlp", "input")],
)
def test_blocks_with_their_hooks_are_run_again(name: str, at: Any) -> None:
    tiny = double(name)
    plain, _ = gradients(tiny)
    wide = {"dim": 16} if name == "mlp" else {}
    uc.attach(tiny.model, "contra_norm", scale=SCALE, learnable=True, at=at, **wide, **tiny.where)
    loss, expected = gradients(tiny)
    assert abs(loss - plain) > 1e-4
    checkpointed(tiny.model, BLOCKS[name])
    again, found = gradients(tiny)
    torch.testing.assert_close(again, loss, rtol=0, atol=1e-10)
    assert_gradients(found, expected)


CURES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("contra_norm", {"learnable": True, "scale": SCALE, "at": TWO}),
    ("contra_norm", {"learnable": True, "scale": SCALE, "at": "attention.input"}),
    ("feat_scale", {"at": "attention.output"}),
    ("attn_scale", {}),
)


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize(("cure", "options"), CURES, ids=[f"{c}-{o.get('at', '')}" for c, o in CURES])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_checkpointing_of_transformers(name: str, cure: str, options: dict[str, Any], reentrant: bool) -> None:
    """The library's own, in training mode: what drops out does so again."""
    if name == "llama" and options.get("at") == "attention.input":
        options = {**options, "at": "final.norm"}
    tiny = double(name)
    model: Any = tiny.model.train()
    plain, _ = gradients(tiny)
    for parameter in uc.attach(model, cure, **options).parameters():
        parameter.data.copy_(torch.linspace(-0.4, 0.8, parameter.numel()))
    loss, expected = gradients(tiny)
    runs: list[str] = []
    counting = next(m for n, m in model.named_modules() if n.endswith((".query", ".q_proj", ".c_attn")))
    counting.register_forward_hook(lambda *_: runs.append("run"))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    again, found = gradients(tiny)
    assert len(runs) == 2 * 2  # both batches, forward and again
    assert abs(loss - plain) > 1e-5
    torch.testing.assert_close(again, loss, rtol=0, atol=1e-10)
    assert_gradients(found, expected)


def test_a_sequential_in_segments() -> None:
    tiny = double("mlp", blocks=4)
    model, x = nn.Sequential(*tiny.model.layers).train(), tiny.batch["x"].requires_grad_()
    uc.attach(model, "contra_norm", scale=SCALE, modules=["*"], causal=False)
    runs = (model, lambda x: checkpoint_sequential(model, 2, x, use_reentrant=False))
    found = [torch.autograd.grad(run(x).square().sum(), list(model.parameters())) for run in runs]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-8)


class Masked(nn.Module):
    """A mask that its layers are not given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.inner(x)


def shared() -> Tiny:
    case = BY_NAME["encoder-pre-batch-first"]
    model = case.model()
    model.layers = nn.ModuleList([model.layers[0]] * 3)
    return Tiny(model, {"src": case.batch["src"]})


def masked() -> Tiny:
    tiny = double("mlp")
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    return Tiny(Masked(tiny.model), {**tiny.batch, "mask": mask}, {"modules": ["inner.layers.*"], "causal": False})


@pytest.mark.parametrize(
    ("make", "layers", "path"),
    [
        (lambda: double("albert"), [1], BLOCKS["albert"]),
        (shared, [0], "layers"),
        (masked, None, "inner.layers"),
        (lambda: double("gcn"), None, "convs"),
    ],
    ids=["chosen passes", "chosen calls", "mask of the model", "batch of graphs"],
)
def test_what_only_the_whole_model_knows_is_an_error(make: Any, layers: Any, path: str) -> None:
    tiny = make()
    uc.attach(tiny.model.train(), "contra_norm", scale=SCALE, layers=layers, **tiny.where)
    with pytest.raises(RuntimeError, match="checkpointing off"):
        first(checkpointed(tiny.model, path)(**tiny.batch)).sum().backward()


@pytest.mark.filterwarnings("error")
def test_a_choice_of_passes_that_is_gone_asks_for_nothing_any_more() -> None:
    """Blocks of ALBERT that a checkpoint runs again need no model around them unless passes are chosen."""
    model = build("albert").model
    uc.attach(model, "contra_norm", scale=SCALE)
    uc.attach(model, "feat_scale", layers=[0]).remove()
    x = torch.randn(2, 5, 16, requires_grad=True)
    checkpoint(model.get_submodule(BLOCKS["albert"])[0], x, use_reentrant=False).sum().backward()
    assert bool((x.grad != 0).any())
