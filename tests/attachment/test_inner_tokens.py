"""Tokens of inner layers: the library's own hidden states, with the gradients of a model that returns them."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import uncollapse as uc

from .by_hand import IMAGE, transformers
from .tiny_models import Tiny, double, first

MASK = torch.tensor([[1] * 7, [1] * 5 + [0] * 2]).bool()  # of the batches of `tiny_models`


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def loss_of(*layers: Tensor) -> Tensor:
    """Return a loss whose gradient is different in every token."""
    return torch.stack([uc.contra_uniform_loss(x) + x.sin().mean() for x in layers]).sum()


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True))


def check_same(model: nn.Module, ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(
        [ours, *gradients(model, ours)], [theirs, *gradients(model, theirs)], rtol=1e-9, atol=1e-12
    )


def vit(**options: Any) -> Any:
    sizes = {"img_size": 8, "patch_size": 4, "num_classes": 3, "embed_dim": 16, "num_heads": 2, "depth": 3}
    return VisionTransformer(**{**sizes, **options}).double()


def sequences(seed: int = 1) -> Tensor:
    return torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- family × layers ---


def hidden_states(tiny: Tiny) -> dict[Any, Tensor]:
    found = tiny.model(**tiny.batch, output_hidden_states=True).hidden_states
    return dict(zip(("embed", "first", -2, "last"), found, strict=True))


def of_encoder(tiny: Tiny) -> dict[Any, Tensor]:
    padding = tiny.batch["src_key_padding_mask"]
    embed = tiny.batch["src"]
    inner = [tiny.model.layers[0](embed, src_key_padding_mask=padding)]
    for layer in tiny.model.layers[1:]:
        inner.append(layer(inner[-1], src_key_padding_mask=padding))
    return {"embed": embed, "first": inner[0], 1: inner[1], "last": inner[2]}


def of_registers(tiny: Tiny) -> dict[Any, Tensor]:
    """Only patches, without the class token and registers."""
    final, (one, _, last) = tiny.model.forward_intermediates(tiny.batch["x"], indices=3, output_fmt="NLC", norm=False)
    return {"first": one, "last": last, "final": final[:, 3:]}


def of_convolutions(tiny: Tiny) -> dict[Any, Tensor]:
    inner = tiny.model.convs[0](tiny.batch["x"], tiny.batch["edge_index"])
    return {"first": inner.relu(), "last": tiny.model(**tiny.batch)}


def registers() -> Tiny:
    return Tiny(vit(reg_tokens=2, class_token=True), double("timm_vit").batch)


FAMILIES: dict[str, tuple[Callable[[], Tiny], Callable[[Tiny], dict[Any, Tensor]]]] = {
    **{name: (lambda name=name: double(name), hidden_states) for name in ("bert", "albert", "gpt2")},
    "encoder": (lambda: double("encoder"), of_encoder),
    "registers": (registers, of_registers),
    "gcn": (lambda: double("gcn"), of_convolutions),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_gradients_are_those_of_a_model_that_returns_them(name: str) -> None:
    build, read = FAMILIES[name]
    tiny = build()
    expected = read(tiny)
    if name == "gpt2":
        expected["final"] = expected.pop("last")  # its last hidden state has passed the norm
    before = hooks(tiny.model)  # those of transformers
    with uc.tokens(tiny.model, list(expected)) as t:
        tiny.output(**{key: value.flip(0) for key, value in tiny.batch.items() if value.is_floating_point()})
        tiny.output()  # replaces the pass before
        assert list(t) == list(expected)
        for layer, tokens in expected.items():
            torch.testing.assert_close(t[layer], tokens)
        if name == "registers":
            tiny.model.forward_features(tiny.batch["x"] + 1)  # by another method of the model
            assert (t["last"] - expected["last"]).abs().max() > 1e-3
            tiny.output()
        check_same(tiny.model, loss_of(*(t[layer] for layer in t)), loss_of(*expected.values()))
    assert hooks(tiny.model) == before


def test_masks_and_real_tokens() -> None:
    tiny = double("bert")
    with uc.tokens(tiny.model, "last") as t:
        tiny.output()
        assert torch.equal(t.mask("last"), MASK)
        assert torch.equal(t.real("last"), t["last"][MASK])
        assert t.prefix("last").shape == (2, 0, 16)
        tiny.output(attention_mask=None)
        assert t.mask("last") is None
        assert t.real("last").shape == (14, 16)
        tiny.output()
        tiny.model.encoder(sequences())  # a part by itself: the mask of the pass before is not its own
        assert t.mask("last") is None


def test_prefix_tokens_are_split_off() -> None:
    model, x = vit(reg_tokens=2, class_token=True), double("timm_vit").batch["x"]
    with uc.tokens(model, ("last", "final")) as t, uc.tokens(model, "final", tokens="all") as whole:
        final = model.forward_features(x)
        torch.testing.assert_close(t["final"], final[:, 3:])
        torch.testing.assert_close(t.prefix("final"), final[:, :3])
        torch.testing.assert_close(whole["final"], final)
        assert t.mask("final") is None
        hidden = torch.ones(2, 1, 7, 7, dtype=torch.bool)
        hidden[1, :, :, 5] = False
        model.forward_features(x, attn_mask=hidden)
        assert torch.equal(t.mask("last"), hidden[:, 0, 0, 3:])
        assert torch.equal(whole.mask("final"), hidden[:, 0, 0])
    config = transformers.ViTConfig(**IMAGE, num_labels=3)
    hf = transformers.ViTForImageClassification(config).double()
    with uc.tokens(hf, ("last", "final"), at="block") as t:
        hf(x)
        assert t["last"].shape == (2, 4, 16)
        joined = torch.cat([t.prefix("last"), t["last"]], 1)
        torch.testing.assert_close(hf.vit.layernorm(joined)[:, 1:], t["final"])


def test_places_within_blocks_and_modules_by_name() -> None:
    model, x = vit(), double("timm_vit").batch["x"]
    embedded, block = model.norm_pre(model._pos_embed(model.patch_embed(x))), model.blocks[0]
    with uc.tokens(model, "first", at="attention.residual") as t:
        model(x)
        torch.testing.assert_close(t["first"], (embedded + block.attn(block.norm1(embedded)))[:, 1:])
    layers = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    with uc.tokens(layers, ("0", "last"), modules=["*"]) as t:
        out = layers(sequences()[0])
        torch.testing.assert_close(t["0"], layers[0](sequences()[0]))
        assert t["last"] is out


class Around(nn.Module):
    """A module around a graph network, which alone is told the batch."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return self.network(x, edge_index)[batch == 0]


def test_edges_and_batch_of_a_graph_network() -> None:
    tiny = double("gcn")
    x, edges, graphs = tiny.batch.values()
    with uc.tokens(tiny.model, "first") as t:
        tiny.output()
        assert t.batch is graphs
        assert t.edge_index is edges
        assert t.mask("first") is None
        assert t.real("first").shape == (12, 16)
        with pytest.raises(ValueError, match="prefix"):
            t.prefix("first")
    with pytest.raises(RuntimeError, match="inside"):
        t.batch  # noqa: B018
    assert t._reader.context.edge_index is None
    with uc.tokens(Around(tiny.model), "last") as t:
        model: Any = t._model
        model(x, edges, graphs)
        assert t.batch is graphs
        tiny.model(x, edges)  # without the module around it
        assert t.batch is None


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(self.block(x)))  # type: ignore[no-any-return]


def test_layers_that_run_several_times() -> None:
    """A module gives its last run; passes of ALBERT are counted, also where no hook says where they begin."""
    model, x = Loop(), torch.randn(2, 3, 4)
    with uc.tokens(model, ("embed", "last"), modules=["block"]) as t:
        out = model(x)
        assert torch.equal(t["embed"], x)
        assert torch.equal(t["last"], out)
    tiny = double("albert")
    encoder = tiny.model.encoder
    embedded = encoder.embedding_hidden_mapping_in(tiny.model.embeddings(tiny.batch["input_ids"]))
    with uc.tokens(tiny.model, ("embed", "first", 1, "last")) as t:
        tiny.output()
        for start in (embedded, embedded + 1):  # a part by itself
            passes = [start]
            for _ in range(3):
                passes.append(encoder.albert_layer_groups[0].albert_layers[0](passes[-1]))
            for layer, expected in zip(t, passes, strict=True):
                assert torch.equal(t[layer], expected)


# --- mistakes ---


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"layers": ("first", "lost")}, r"'lost'.*'last'\?"),
        ({"layers": 3}, "layer 3"),
        ({"layers": ()}, "none"),
        ({"layers": "final"}, "'final'"),
        ({"at": "attention.nowhere"}, r"'attention\.norm'\?"),
        ({"modules": ["layer.*"]}, "TransformerEncoder"),
        ({"tokens": "some"}, "tokens"),
    ],
)
def test_what_is_not_there_is_an_error_before_any_hook(asked: dict[str, Any], words: str) -> None:
    model = double("encoder").model
    with pytest.raises(ValueError, match=words):
        uc.tokens(model, **asked)
    assert hooks(model) == 0


def test_asking_too_early_too_late_or_for_something_else() -> None:
    tiny = double("encoder")
    with uc.tokens(tiny.model, "last") as t:
        with pytest.raises(RuntimeError, match="reached"):
            t["last"]
        tiny.output()
        with pytest.raises(ValueError, match="'first'"):
            t["first"]
        with pytest.raises(RuntimeError, match="already in use"):
            t.__enter__()
    with pytest.raises(RuntimeError, match="inside"):
        t["last"]
    with t:  # it can be entered again
        assert torch.equal(tiny.output(), t["last"])


# --- passes: what replaces tokens, what frees them ---


def test_two_at_once_and_a_cure_at_the_same_place() -> None:
    model, x = double("encoder").model, sequences()
    plain = model.layers[0](x)
    with uc.tokens(model, "first") as outer, uc.tokens(model, ("first", "last")) as inner:
        model(x)
        assert torch.equal(outer["first"], inner["first"])
        with uc.attach(model, "contra_norm", scale=0.5, at="block", layers=0, after=None):
            model(x)
            torch.testing.assert_close(outer["first"], uc.contra_norm(plain, 0.5))
            torch.testing.assert_close(inner["last"], model.layers[2](model.layers[1](outer["first"])))
    assert hooks(model) == 0


def test_a_copy_and_a_diagnosis_do_not_replace_tokens() -> None:
    model = double("encoder").model
    with uc.tokens(model, "last") as t:
        out = model(sequences())
        copy.deepcopy(model)(sequences() + 1)
        assert len(uc.diagnose(model, [sequences(3)]).layers) == 4
        assert torch.equal(t["last"], out)
        t["last"].sum().backward()


@pytest.mark.parametrize("fails", [False, True])
def test_memory_is_freed_by_the_next_pass_and_on_leaving(fails: bool) -> None:
    model, seen, alive = double("encoder").model, [], []
    model.layers[0].register_forward_pre_hook(lambda *_: alive.append([ref() is not None for ref in seen]))
    before = hooks(model)

    def train() -> Any:
        with uc.tokens(model, ("first", "last")) as t:
            for _ in range(2):
                out = model(sequences())
                seen[:] = [weakref.ref(x) for x in (t._raw("first"), t._raw("last"), out)]
                del out
                gc.collect()
                assert all(ref() is not None for ref in seen)
            loss_of(t["first"]).backward()
            if fails:
                raise KeyError("in the user's code")
        return t

    if fails:
        with pytest.raises(KeyError):
            train()
    else:
        assert not list(train()._found)
    assert alive == [[], [False] * 3]
    assert all(ref() is None for ref in seen)
    assert hooks(model) == before


def test_hooks_go_when_the_model_fails() -> None:
    model = double("encoder").model
    with pytest.raises(AssertionError, match="dimension"), uc.tokens(model):
        model(torch.zeros(2, 5, 7, dtype=torch.float64))
    assert hooks(model) == 0
    assert torch.backends.mha.get_fastpath_enabled()


def test_without_gradients_and_on_the_fast_path() -> None:
    tiny = double("encoder")
    with torch.no_grad(), uc.tokens(tiny.model) as t:
        out = tiny.output()
        assert torch.equal(t["last"], out)
        assert torch.equal(t.mask("last"), MASK)


# --- checkpointing, compiled code, DDP ---


def use_checkpoints(model: Any, reentrant: bool = False) -> None:
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    else:
        model.set_grad_checkpointing(True)


@pytest.mark.parametrize("name", ["bert", "timm_vit"])
def test_gradient_checkpointing(name: str) -> None:
    found = []
    for checkpointed in (False, True):
        tiny = double(name)
        tiny.model.train()
        if checkpointed:
            use_checkpoints(tiny.model)
        torch.manual_seed(0)
        with uc.tokens(tiny.model, ("first", "last"), at="attention.residual") as t:
            tiny.output()
            loss = loss_of(t["first"], t["last"])
            tiny.output()
            loss = loss + loss_of(t["first"])  # two passes, one backward
            held = t._raw("first")
            found.append([loss, *gradients(tiny.model, loss)])
            assert t._raw("first") is held  # and not what the backward pass computed again
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = double("encoder").model.layers

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_is_an_error() -> None:
    model = Checkpointed().train()
    with uc.tokens(model, modules="blocks.*") as t:
        model(sequences().requires_grad_())
        with pytest.raises(RuntimeError, match="use_reentrant"):
            t["last"]
        with torch.no_grad():
            out = model(sequences())
        assert torch.equal(t["last"], out)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_of_transformers_is_an_error_or_exact() -> None:
    """Old versions checkpoint a block with its hooks, new ones inside of them."""
    found = []
    for reentrant in (False, True):
        model = double("bert").model.train()
        if reentrant:
            use_checkpoints(model, reentrant=True)
        torch.manual_seed(0)
        with uc.tokens(model) as t:
            model(inputs_embeds=sequences().requires_grad_())
            if reentrant and not hasattr(type(model.encoder.layer[0]).forward, "__wrapped__"):
                with pytest.raises(RuntimeError, match="use_reentrant"):
                    t["last"]
                return
            loss_of(t["first"], t["last"]).backward()
            found.append([p.grad for p in model.encoder.parameters()])
    torch.testing.assert_close(*found)


def step(model: Any, ready: Any, t: Any) -> list[Tensor]:
    return gradients(model, ready(sequences()).square().mean() + loss_of(t["last"]))


@pytest.mark.parametrize(("when", "backend"), [("before", "aot_eager"), ("after", "eager"), ("inside", "eager")])
def test_compiled_models(when: str, backend: str) -> None:
    model = double("encoder", blocks=1).model
    with uc.tokens(model, ("embed", "last")) as t:
        expected = step(model, model, t)
        if when == "inside":
            model.compile(backend=backend)
            found = step(model, model, t)
    if when != "inside":
        ready = torch.compile(model, backend=backend)
        if when == "after":
            ready(sequences())
        with uc.tokens(ready, ("embed", "last")) as t:
            step(model, ready, t)
            found = step(model, ready, t)
    torch.testing.assert_close(found, expected)
    assert hooks(model) == 0
    torch.compiler.reset()


def test_a_function_compiled_before_is_an_error_and_one_compiled_inside_leaves_nothing() -> None:
    tiny = double("timm_vit", blocks=1)
    x, model = tiny.batch["x"], tiny.model
    run = torch.compile(lambda x: model(x), backend="eager")
    run(x)
    with uc.tokens(model) as t:
        run(x)
        with pytest.raises(RuntimeError, match="compile"):
            t["last"]
    torch.compiler.reset()
    with uc.tokens(model) as t:
        run(x)
        assert t["last"].shape == (2, 4, 16)
    run(x)
    assert not t._found
    torch.compiler.reset()


def test_a_model_wrapped_in_ddp() -> None:
    tiny = double("bert")
    hidden = tiny.model(**tiny.batch, output_hidden_states=True).hidden_states
    theirs = gradients(tiny.model, loss_of(hidden[2]))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(tiny.model)
        with uc.tokens(wrapped, 1) as t:
            first(wrapped(**tiny.batch))
            loss_of(t[1]).backward()
    finally:
        torch.distributed.destroy_process_group()
    for parameter, expected in zip(tiny.model.parameters(), theirs, strict=True):
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected)
    assert tiny.model.encoder.layer[1].output.dense.weight.grad is not None
