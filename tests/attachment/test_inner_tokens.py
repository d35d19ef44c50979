"""Tokens of inner layers: the library's own hidden states, with the gradients of a model that returns them."""

import copy
import gc
import json
import runpy
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import uncollapse as uc
from uncollapse.attachment.inner_tokens import tokens
from uncollapse.backbones import torchvision_ops

torchvision_ops.declare()
transformers = pytest.importorskip("transformers")
timm = pytest.importorskip("timm")
pyg = pytest.importorskip("torch_geometric")

ROOT = Path(__file__).parents[2]
SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {**SIZES, "vocab_size": 40, "max_position_embeddings": 16, "pad_token_id": 0}
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(**TEXT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertModel(config, add_pooling_layer=False).double()


def text() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"input_ids": torch.randint(1, 40, (2, 5), generator=generator), "attention_mask": MASK}


def vit(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 3, "embed_dim": 16, "num_heads": 2}
    return timm.models.vision_transformer.VisionTransformer(**{**sizes, "depth": 3, **options}).double()


def encoder(layers: int = 3) -> Any:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).double()


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def sequences() -> Tensor:
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))


def spread(*layers: Tensor) -> Tensor:
    """A loss whose gradient is different in every token."""
    return torch.stack([uc.contra_uniform_loss(x) + x.sin().mean() for x in layers]).sum()


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def check_same(model: nn.Module, ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs)
    for mine, other in zip(gradients(model, ours), gradients(model, theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


def test_gradients_are_those_of_a_model_that_returns_its_inner_tokens() -> None:
    model, x = encoder(), sequences()
    inner = [x]
    for layer in model.layers:
        inner.append(layer(inner[-1]))
    theirs = inner[-1].square().mean() + spread(inner[0], inner[1], inner[2], inner[3])
    with tokens(model, ("embed", "first", 1, "last")) as t:
        out = model(x)
        ours = out.square().mean() + spread(*(t[layer] for layer in t))
    check_same(model, ours, theirs)
    assert hooks(model) == 0


def test_bert_with_padding() -> None:
    model, batch = bert(), text()
    hidden = model(**batch, output_hidden_states=True).hidden_states
    theirs = uc.contra_uniform_loss(hidden[-1], mask=MASK.bool()) + spread(hidden[1])
    with tokens(model, ("embed", "first", "last", -2)) as t:
        model(**batch)
        ours = uc.contra_uniform_loss(t["last"], mask=t.mask("last")) + spread(t["first"])
        for layer, place in (("embed", 0), ("first", 1), ("last", 3), (-2, 2)):
            torch.testing.assert_close(t[layer], hidden[place])
        assert torch.equal(t.real("last"), t["last"][MASK.bool()])
        assert t.real("last").shape == (8, 16)
        assert t.prefix("last").shape == (2, 0, 16)
        check_same(model, ours, theirs)
        model(batch["input_ids"])
        assert t.mask("last") is None
        assert t.real("last").shape == (10, 16)
        model(**batch)
        model.encoder(sequences())  # a part by itself: the mask of the pass before is not its own
        assert t.mask("last") is None


def test_vit_of_transformers_has_its_class_token_split_off() -> None:
    config = transformers.ViTConfig(**SIZES, image_size=8, patch_size=4, num_channels=1, num_labels=3)
    model = transformers.ViTForImageClassification(config).double()
    with tokens(model, ("last", "final"), at="block") as t:
        model(images())
        whole = torch.cat([t.prefix("last"), t["last"]], 1)
        assert t["last"].shape == (2, 4, 16)
        torch.testing.assert_close(model.vit.layernorm(whole)[:, 1:], t["final"])


@pytest.mark.parametrize("entrance", ["forward", "forward_features"])
def test_timm_with_registers_also_through_a_method(entrance: str) -> None:
    model = vit(reg_tokens=2, class_token=True)
    with tokens(model, ("first", "last", "final")) as t:
        for x in (images(), images(3)):
            final, (first, _, last) = model.forward_intermediates(x, indices=3, output_fmt="NLC", norm=False)
            run: Any = model if entrance == "forward" else model.forward_features
            run(x)
            torch.testing.assert_close(t["first"], first)
            torch.testing.assert_close(t["last"], last)
            torch.testing.assert_close(t["final"], final[:, 3:])
            torch.testing.assert_close(t.prefix("final"), final[:, :3])
            assert t.mask("final") is None
        check_same(model, spread(t["first"], t["final"]), spread(first, final[:, 3:]))


def test_places_within_blocks() -> None:
    model = vit()
    x = model.norm_pre(model._pos_embed(model.patch_embed(images())))
    block = model.blocks[0]
    with tokens(model, "first", at="attention.residual") as t:
        model(images())
        torch.testing.assert_close(t["first"], (x + block.attn(block.norm1(x)))[:, 1:])


def test_nodes_of_a_graph_network() -> None:
    torch.manual_seed(0)
    model = pyg.nn.GCN(4, 8, 3, out_channels=5, act=None).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    edges, graphs = torch.tensor([[0, 1, 3, 4, 5], [1, 2, 4, 5, 3]]), torch.tensor([0, 0, 0, 1, 1, 1])
    first = model.convs[0](x, edges)
    with tokens(model, ("first", "last")) as t:
        out = model(x, edges, batch=graphs)
        torch.testing.assert_close(t["first"], first)
        torch.testing.assert_close(t["last"], out)
        assert t.batch is graphs
        assert t.edge_index is edges
        assert t.mask("first") is None
        assert t.real("first").shape == (6, 8)
        check_same(model, spread(t["first"]), spread(first))
        with pytest.raises(ValueError, match="prefix"):
            t.prefix("first")
    with pytest.raises(RuntimeError, match="only inside"):
        t.batch  # noqa: B018
    assert t._reader.context.edge_index is None


def test_modules_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    with tokens(model, ("0", "last"), modules=["*"]) as t:
        out = model(x)
        torch.testing.assert_close(t["0"], model[0](x))
        assert t["last"] is out


def test_a_layer_that_runs_again_gives_its_last_run() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.block(self.block(x)))  # type: ignore[no-any-return]

    model, x = Loop(), torch.randn(2, 3, 4)
    with tokens(model, ("embed", "last"), modules=["block"]) as t:
        out = model(x)
        assert torch.equal(t["embed"], x)
        assert torch.equal(t["last"], out)


def test_passes_of_albert() -> None:
    config = transformers.AlbertConfig(**TEXT, embedding_size=8, hidden_dropout_prob=0.0)
    model = transformers.AlbertModel(config, add_pooling_layer=False).double()
    hidden = model(**text(), output_hidden_states=True).hidden_states
    with tokens(model, ("embed", "first", 1, "last")) as t:
        for _ in range(2):
            model(**text())
            for layer, expected in zip(t, hidden, strict=True):
                torch.testing.assert_close(t[layer], expected)
        check_same(model, spread(t["first"], t[1]), spread(hidden[1], hidden[2]))
        embedded = model.encoder.embedding_hidden_mapping_in(model.embeddings(text()["input_ids"]))
        for x in (embedded, embedded + 1):  # a part by itself: no hook tells where its passes begin
            passes = [x]
            for _ in range(3):
                passes.append(model.encoder.albert_layer_groups[0].albert_layers[0](passes[-1]))
            for layer, expected in zip(t, passes, strict=True):
                assert torch.equal(t[layer], expected)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"layers": ("first", "lost")}, r"'lost'.*'last'\?.*-3 to 2.*embed"),
        ({"layers": 3}, "no layer 3"),
        ({"layers": ()}, "selects none"),
        ({"layers": "final"}, "no layer 'final'"),
        ({"at": "attention.nowhere"}, r"'attention\.norm'\?.*block, "),
        ({"modules": ["layer.*"]}, "TransformerEncoder"),
    ],
)
def test_what_is_not_there_is_an_error_before_any_hook(asked: dict[str, Any], message: str) -> None:
    model = encoder()
    with pytest.raises(ValueError, match=message):
        tokens(model, **asked)
    assert hooks(model) == 0


def test_asking_too_early_too_late_or_for_something_else() -> None:
    model = encoder()
    with tokens(model, "last") as t:
        with pytest.raises(RuntimeError, match="reached layer 'last'"):
            t["last"]
        model(sequences())
        with pytest.raises(ValueError, match="'first'"):
            t["first"]
        with pytest.raises(RuntimeError, match="second time"):
            t.__enter__()
    with pytest.raises(RuntimeError, match="only inside"):
        t["last"]
    with t:  # it can be entered again
        assert torch.equal(model(sequences()), t["last"])


def test_two_at_once_and_a_cure_at_the_same_place() -> None:
    model, x = encoder(), sequences()
    plain = model.layers[0](x)
    with tokens(model, "first") as outer, tokens(model, ("first", "last")) as inner:
        model(x)
        assert torch.equal(outer["first"], inner["first"])
        with uc.attach(model, "contra_norm", scale=0.5, at="block", layers=0, after=None):
            model(x)
            torch.testing.assert_close(outer["first"], uc.contra_norm(plain, 0.5))
            torch.testing.assert_close(inner["last"], model.layers[2](model.layers[1](outer["first"])))
    assert hooks(model) == 0


@pytest.mark.parametrize("fails", [False, True])
def test_memory_is_freed_on_leaving(fails: bool) -> None:
    model, seen = encoder(), []

    def train() -> Any:
        with tokens(model, ("first", "last")) as t:
            out = model(sequences())
            seen.extend(weakref.ref(x) for x in (t._raw("first"), t._raw("last"), out))
            del out
            gc.collect()
            assert all(ref() is not None for ref in seen)
            spread(t["first"]).backward()
            if fails:
                raise KeyError("in the user's code")
        return t

    if fails:
        with pytest.raises(KeyError):
            train()
        assert all(ref() is None for ref in seen)
    else:
        t = train()
        assert all(ref() is None for ref in seen)
        assert not list(t._found)
    assert hooks(model) == 0


def test_a_new_pass_drops_the_tokens_of_the_one_before() -> None:
    model = encoder()
    with tokens(model, "first") as t:
        model(sequences())
        before = weakref.ref(t._raw("first"))
        alive = []
        model.layers[0].register_forward_pre_hook(lambda *_: alive.append(before() is not None))
        model(sequences())
        assert alive == [False]


def test_hooks_go_when_the_model_fails() -> None:
    model = encoder()
    with pytest.raises(AssertionError, match="embedding dimension"), tokens(model):
        model(torch.zeros(2, 5, 7, dtype=torch.float64))
    assert hooks(model) == 0
    assert torch.backends.mha.get_fastpath_enabled()


def test_without_gradients_and_on_the_fast_path() -> None:
    model = encoder().eval()
    with torch.no_grad(), tokens(model) as t:
        out = model(sequences(), src_key_padding_mask=~MASK.bool())
        assert torch.equal(t["last"], out)
        assert torch.equal(t.mask("last"), MASK.bool())  # type: ignore[arg-type]


def test_a_copy_of_the_model_does_not_replace_tokens() -> None:
    model = encoder()
    with tokens(model, "last") as t:
        out = model(sequences())
        copy.deepcopy(model)(sequences() + 1)
        assert torch.equal(t["last"], out)


def _bert_checkpointed() -> Any:
    model = bert().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _vit_checkpointed() -> Any:
    model = vit().train()
    model.set_grad_checkpointing(True)
    return model


@pytest.mark.parametrize(
    ("plain", "checkpointed", "run"),
    [
        (bert, _bert_checkpointed, lambda model: model(**text())),
        (vit, _vit_checkpointed, lambda model: model(images())),
    ],
)
def test_gradient_checkpointing(
    plain: Callable[[], Any], checkpointed: Callable[[], Any], run: Callable[[Any], Any]
) -> None:
    found = []
    for build in (plain, checkpointed):
        model = build().train()
        with tokens(model, ("first", "last"), at="attention.residual") as t:
            run(model)
            loss = spread(t["first"], t["last"])
            run(model)
            loss = loss + spread(t["first"])  # two passes, one backward
            held = t._raw("first")
            found.append([loss, *gradients(model, loss)])
            assert t._raw("first") is held  # and not what the backward pass computed again
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_is_an_error() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = encoder().layers

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
            return x

    model = Checkpointed().train()
    with tokens(model, modules="blocks.*") as t:
        model(sequences().requires_grad_())
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            t["last"]
        with torch.no_grad():
            out = model(sequences())
        assert torch.equal(t["last"], out)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_of_transformers_is_an_error_or_exact() -> None:
    """Old versions checkpoint a block with its hooks, new ones inside of them."""
    found = []
    for reentrant in (None, True):
        model = bert().train()
        if reentrant:
            model.gradient_checkpointing_enable({"use_reentrant": True})
        with tokens(model) as t:
            model(inputs_embeds=sequences().requires_grad_())
            if reentrant and not hasattr(type(model.encoder.layer[0]).forward, "__wrapped__"):
                with pytest.raises(RuntimeError, match="use_reentrant=False"):
                    t["last"]
                return
            spread(t["first"], t["last"]).backward()
            found.append([p.grad for p in model.encoder.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("when", "backend"), [("before", "aot_eager"), ("after", "eager"), ("inside", "eager")])
def test_compiled_models(when: str, backend: str) -> None:
    expected = _trained(encoder(1), lambda model: model)
    model = encoder(1)

    def prepared(model: Any) -> Any:
        made = torch.compile(model, backend=backend)
        if when == "after":
            made(sequences())
        return made

    if when == "inside":
        with tokens(model, ("embed", "last")) as t:
            model.compile(backend=backend)
            found = _step(model, model, t)
    else:
        found = _trained(model, prepared)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other)
    assert hooks(model) == 0
    torch.compiler.reset()


def _trained(model: Any, prepared: Callable[[Any], Any]) -> list[Tensor]:
    ready = prepared(model)
    with tokens(ready, ("embed", "last")) as t:
        _step(model, ready, t)
        return _step(model, ready, t)


def _step(model: Any, ready: Any, t: Any) -> list[Tensor]:
    out = ready(sequences())
    return gradients(model, out.square().mean() + spread(t["last"]))


def test_a_function_compiled_before_gives_an_error_and_one_compiled_inside_leaves_nothing() -> None:
    model = vit(depth=1)
    run = torch.compile(lambda x: model(x), backend="eager")
    run(images())
    with tokens(model) as t:
        run(images())
        with pytest.raises(RuntimeError, match="compile functions"):
            t["last"]
    torch.compiler.reset()
    with tokens(model) as t:
        run(images())
        assert t["last"].shape == (2, 4, 16)
    run(images())
    assert not t._found
    torch.compiler.reset()


@contextmanager
def one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_a_model_wrapped_in_ddp() -> None:
    model = bert()
    hidden = model(**text(), output_hidden_states=True).hidden_states
    theirs = gradients(model, spread(hidden[2]))
    with one_process():
        wrapped = nn.parallel.DistributedDataParallel(model)
        with tokens(wrapped, 1) as t:
            wrapped(**text())
            spread(t[1]).backward()
    for parameter, expected in zip(model.parameters(), theirs, strict=True):
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected)
    assert model.encoder.layer[1].output.dense.weight.grad is not None


def test_the_example_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["diverse_patch.py", "--epochs", "1", "--depth", "2", "--out", str(out)])
    runpy.run_path(str(ROOT / "examples" / "diverse_patch.py"), run_name="__main__")
    runs = {run["way"]: run for run in json.loads(out.read_text(encoding="utf-8"))["runs"]}
    assert len(runs) == 4
    others = [run["mean_cosine"] for way, run in runs.items() if way != "plain"]
    assert max(others) < runs["plain"]["mean_cosine"]


def test_kept_results_say_what_the_page_says() -> None:
    kept = json.loads((ROOT / "results" / "diverse_patch.json").read_text(encoding="utf-8"))
    plain, *others = kept["runs"]
    assert plain["way"] == "plain"
    assert all(run["mean_cosine"] < plain["mean_cosine"] for run in others)
    assert all(run["effective_rank"] > plain["effective_rank"] for run in others)


def test_the_batch_that_only_a_module_around_the_network_is_told() -> None:
    from torch_geometric.nn import GCN, global_mean_pool

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.head = GCN(4, 8, 2), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
            return self.head(global_mean_pool(self.network(x, edge_index), batch))

    model, batch = Classifier(), torch.tensor([0, 0, 1, 1, 1])
    with uc.tokens(model, "last") as t:
        model(torch.randn(5, 4), torch.tensor([[0, 2], [1, 3]]), batch)
        assert torch.equal(t.batch, batch)
        model.network(torch.randn(5, 4), torch.tensor([[0, 2], [1, 3]]))  # without the module around it
        assert t.batch is None


def test_a_diagnosis_between_the_pass_and_the_loss_does_not_replace_tokens() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2)
    with uc.tokens(model, "last") as t:
        out = model(torch.randn(2, 5, 16))
        diagnosis = uc.diagnose(model, [torch.randn(3, 7, 16)])
        assert len(diagnosis.layers) == 3
        assert torch.equal(t["last"], out)
        t["last"].sum().backward()
