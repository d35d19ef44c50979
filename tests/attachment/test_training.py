"""Cures learn: in a frozen model, in a Trainer that is resumed, and when checkpointing runs blocks again."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import uncollapse as uc
from uncollapse.attachment.write_hooks import Recomputation

from .by_hand import BY_NAME, SCALE, TEXT, transformers
from .tiny_models import Tiny, build, double, first


@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize(("name", "cure"), [("encoder", "pair_norm"), ("gcn", "drop_edge")])
def test_a_cure_is_in_the_mode_of_its_module(name: str, cure: str, mode: bool) -> None:
    model = build(name).model.train(mode)
    handle = uc.attach(model, cure)
    assert {module.training for one in handle.cures.values() for module in one.modules()} == {mode}
    model.train(not mode)
    assert {one.training for one in handle.cures.values()} == {not mode}


@pytest.mark.parametrize("name", ["bert", "timm_vit", "encoder", "encoder_pre_norm", "gcn"])
def test_the_cure_of_a_frozen_model_learns(name: str) -> None:
    """Also with an optimizer that was made before."""
    tiny = build(name)
    optimizer = torch.optim.SGD(tiny.model.parameters(), lr=1.0)
    tiny.model.requires_grad_(False)
    own = copy.deepcopy(tiny.model.state_dict())
    handle = uc.attach(tiny.model, "contra_norm", scale=0.6, learnable=True, **tiny.where)
    assert len([p for p in tiny.model.parameters() if p.requires_grad]) == len(handle.cures)
    optimizer.add_param_group({"params": handle.parameters()})
    torch.manual_seed(0)
    goal, losses = torch.randn_like(tiny.output()), []
    for _ in range(5):
        loss = (tiny.output() - goal).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1e-3
    state = tiny.model.state_dict()
    assert all(torch.equal(state[key], value) for key, value in own.items())


def test_a_warning_if_the_parameters_of_a_cure_are_frozen() -> None:
    """PEFT freezes all parameters of a model, also those of a cure that was attached before."""
    tiny = build("bert")
    handle = uc.attach(tiny.model, "contra_norm", scale=0.1, learnable=True)
    tiny.model.requires_grad_(False)
    tiny.model.train()
    with pytest.warns(UserWarning, match="frozen"):
        tiny.output()
    for parameter in handle.parameters():
        parameter.requires_grad_(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny.output().sum().backward()
    assert all(parameter.grad is not None for parameter in handle.parameters())


def train(where: Path, resume: str | None = None) -> Any:
    """Train three steps with a Trainer, with dropout and padding."""
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT))
    uc.attach(model, "contra_norm", scale=0.3, learnable=True)
    tokens = torch.randint(3, 40, (12, 6), generator=torch.Generator().manual_seed(1))
    rows = [
        {"input_ids": row, "attention_mask": (torch.arange(6) < 3 + i % 4).long(), "labels": i % 2}
        for i, row in enumerate(tokens)
    ]
    options = {"max_steps": 3, "save_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "seed": 3}
    quiet = {"report_to": [], "logging_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    arguments = transformers.TrainingArguments(output_dir=str(where), **options, **quiet)
    transformers.Trainer(model=model, args=arguments, train_dataset=rows).train(resume_from_checkpoint=resume)
    return model


def test_a_resumed_training_ends_as_one_that_was_not_interrupted(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    whole = train(tmp_path / "whole")
    learned = [p for name, p in whole.named_parameters() if "uncollapse" in name]
    assert len(learned) == 3
    assert all((p - 0.3).abs().min() > 0 for p in learned)
    resumed = train(tmp_path / "resumed", str(tmp_path / "whole" / "checkpoint-1"))
    for (name, p), (_, q) in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0, msg=name)


# --- gradient checkpointing runs blocks again in the backward pass: with the same gradients, or an error ---

BLOCKS = {
    **{"bert": "encoder.layer", "gpt2": "h", "llama": "layers", "timm_vit": "blocks", "mlp": "layers", "gcn": "convs"},
    **dict.fromkeys(("encoder", "encoder_pre_norm", "decoder_pre_norm"), "layers"),
    "albert": "encoder.albert_layer_groups.0.albert_layers",
}
LEARNED: dict[str, Any] = {"learnable": True, "scale": SCALE}
TWO = {**LEARNED, "at": ("attention.residual", "block")}
OF_FIRST: dict[str, dict[str, Any]] = {  # cures that take a tensor of the first block
    "initial_residual": {"scale": 0.3, "learnable": True},
    "value_residual": {"scale": 0.5, "learnable": True},
    "neutreno": {"scale": 5.0},
}
ROWS: list[tuple[str, str, str, dict[str, Any]]] = [  # model, way, cure, options
    *((name, "wrapped", "contra_norm", TWO) for name in BLOCKS if name not in ("mlp", "gcn")),
    *(("mlp", "wrapped", "contra_norm", {**LEARNED, "at": at, "dim": 16}) for at in ("block", "input")),
    *(("timm_vit", "wrapped", cure, options) for cure, options in OF_FIRST.items()),
]
for model in ("bert", "gpt2", "llama"):
    third = "final.norm" if model == "llama" else "attention.input"
    own = [("contra_norm", TWO), ("contra_norm", {**LEARNED, "at": third}), ("feat_scale", {}), ("attn_scale", {})]
    ROWS += [(model, way, cure, given) for way in ("library", "reentrant") for cure, given in own]
    ROWS += [(model, "library", cure, options) for cure, options in OF_FIRST.items() if model != "llama"]


class Again(nn.Module):
    """A block with its hooks, run again in the backward pass."""

    def __init__(self, block: nn.Module, reentrant: bool = False) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def __getattr__(self, name: str) -> Any:  # torch's encoder looks at its layers
        return super().__getattr__(name) if name == "block" else getattr(self.block, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=self.reentrant, **kwargs)


def wrap(model: Any, path: str, reentrant: bool = False) -> Any:
    blocks = model.get_submodule(path)
    for number, block in enumerate(blocks):
        blocks[number] = Again(block, reentrant)
    return model


def gradients(tiny: Tiny) -> tuple[Tensor, dict[str, Tensor]]:
    """Run two batches with other tokens and padding before one backward pass, which runs the blocks of both again."""
    torch.manual_seed(0)
    tiny.model.zero_grad()
    turned = {key: value.flip(0) if value.shape[0] == 2 else value for key, value in tiny.batch.items()}
    mask = tiny.batch.get("attention_mask", torch.ones(2, 7)).bool()
    outputs = [first(tiny.model(**batch)) for batch in (tiny.batch, turned)]
    if "attention_mask" in tiny.batch:
        outputs = [outputs[0][mask], outputs[1][mask.flip(0)]]
    loss = torch.stack([output.pow(3).mean() for output in outputs]).sum()
    loss.backward()
    found = {key: p.grad.clone() for key, p in tiny.model.named_parameters() if p.grad is not None}
    return loss.detach(), {key.replace(".block.", "."): value for key, value in found.items()}


@pytest.mark.parametrize(("name", "way", "cure", "options"), ROWS, ids=[f"{r[0]}-{r[1]}-{r[2]}" for r in ROWS])
def test_checkpointing_gives_the_same_gradients(name: str, way: str, cure: str, options: dict[str, Any]) -> None:
    """In training mode: what drops out does so again. Each run finds the padding and the tensors of its own pass."""
    tiny, runs = double(name), []
    model = tiny.model.train(way != "wrapped")
    plain, _ = gradients(tiny)
    for parameter in uc.attach(model, cure, **options, **tiny.where).parameters():
        parameter.data.copy_(torch.linspace(-0.4, 0.8, parameter.numel()).view_as(parameter))
    loss, expected = gradients(tiny)
    assert abs(loss - plain) > 1e-5
    if way == "wrapped":
        wrap(model, BLOCKS[name])
    else:
        counting = next(m for n, m in model.named_modules() if n.endswith((".query", ".q_proj", ".c_attn")))
        counting.register_forward_hook(lambda *_: runs.append("run"))
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": way == "reentrant"})
        model.enable_input_require_grads()
    again, found = gradients(tiny)
    assert len(runs) == (0 if way == "wrapped" else 2 * 2)  # both batches, forward and again
    assert not any(
        isinstance(value, Recomputation) for m in model.modules() for value in vars(m).values()
    )  # it is gone
    torch.testing.assert_close(again, loss, rtol=0, atol=1e-10)
    assert set(found) == set(expected)
    assert cure == "neutreno" or any("uncollapse" in key and g.abs().max() > 1e-6 for key, g in expected.items())
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-7, msg=key)


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
    wrap(tiny.model, path)
    with pytest.raises(RuntimeError, match="checkpointing off"):
        tiny.output().sum().backward()


@pytest.mark.parametrize("cure", OF_FIRST)
def test_reentrant_checkpointing_would_lose_the_gradient_of_the_first_block(cure: str) -> None:
    tiny = build("timm_vit")
    uc.attach(tiny.model.train(), cure, **OF_FIRST[cure], **tiny.where)
    wrap(tiny.model, "blocks", reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant"):
        tiny.output(x=tiny.batch["x"].requires_grad_())


@pytest.mark.filterwarnings("error")
def test_a_choice_of_passes_that_is_gone_asks_for_nothing_any_more() -> None:
    """Blocks of ALBERT that a checkpoint runs again need no model around them unless passes are chosen."""
    tiny = build("albert")
    uc.attach(tiny.model, "contra_norm", scale=SCALE)
    alone = tiny.output()
    some = uc.attach(tiny.model, "pair_norm", layers=[0, 2], at="mlp.output")
    assert (tiny.output() - alone).abs().max() > 0.1
    some.remove()
    assert torch.equal(tiny.output(), alone)
    x = torch.randn(2, 5, 16, requires_grad=True)
    checkpoint(tiny.model.get_submodule(BLOCKS["albert"])[0], x, use_reentrant=False).sum().backward()
    assert bool((x.grad != 0).any())
