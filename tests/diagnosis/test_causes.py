"""Causes of collapse: models whose cause is known, what is not measured, and a model that is left as it was."""

import itertools
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import uncollapse as uc
from uncollapse.backbones import torchvision_ops
from uncollapse.diagnosis.causes import name_causes
from uncollapse.diagnosis.part_probe import own_loss
from uncollapse.diagnosis.parts import BlockParts, Change, Parts, Switch
from uncollapse.diagnosis.result import Layer, Summary
from uncollapse.diagnosis.verdict import Subject, evaluate
from uncollapse.registry import CURES, LOSSES

NO_BASELINE = uc.Plan(baseline=0)


def encoder(layers: int = 3, **options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **options)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class Convolutions(nn.Module):
    """Graph convolutions with ReLU, with or without residual connections."""

    def __init__(self, layers: int, residual: bool, scale: float = 1.0) -> None:
        super().__init__()
        conv = pytest.importorskip("torch_geometric").nn.GCNConv
        torch.manual_seed(0)
        sizes = [16, *[24] * (layers - 1), 3]
        self.convs = nn.ModuleList(conv(a, b) for a, b in itertools.pairwise(sizes))
        self.residual = residual
        with torch.no_grad():
            for conv in self.convs:
                conv.lin.weight.mul_(scale)
                conv.bias.normal_(0, 0.1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        *hidden, last = self.convs
        for number, conv in enumerate(hidden):
            y = conv(x, edge_index).relu()
            x = x + y if self.residual and number > 0 else y
        out: Tensor = last(x, edge_index)
        return out


def graph() -> Any:
    data = pytest.importorskip("torch_geometric").data.Data
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 80, (2, 400), generator=generator)
    nodes = torch.randn(80, 16, generator=generator)
    y = torch.randint(0, 3, (80,), generator=generator)
    return data(x=nodes, edge_index=edges, y=y, train_mask=torch.arange(80) < 40)


def attention_only(kind: str, depth: int = 6) -> nn.Module:
    torchvision_ops.declare()
    timm = pytest.importorskip("timm.models.vision_transformer")

    class Block(timm.Block):  # type: ignore[misc, name-defined]
        def forward(self, x: Tensor, **more: Any) -> Tensor:
            mixed: Tensor = self.drop_path1(self.attn(self.norm1(x)))
            return mixed

    torch.manual_seed(0)
    block = Block if kind == "attention only" else timm.Block
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "num_heads": 2, "num_classes": 3, "reg_tokens": 2}
    model: nn.Module = timm.VisionTransformer(depth=depth, block_fn=block, weight_init="jax", **sizes)
    return model


def images() -> Tensor:
    return torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def names(d: uc.Diagnosis) -> list[str]:
    return [cause.name for cause in d.verdict.causes]


def test_a_deep_graph_network_lacks_residuals_and_gradients() -> None:
    plain = uc.diagnose(Convolutions(16, residual=False, scale=0.5), [graph()], causes=True, plan=NO_BASELINE)
    assert names(plain) == ["no_residual", "vanishing_gradients"]
    assert [block.residual for block in plain.parts.blocks[1:-1]] == [0.0] * 14  # type: ignore[union-attr]
    assert [tip.cure for tip in plain.verdict.advice][-2:] == ["pre_activation_residual", "initialization"]
    assert "measured: " in plain.verdict.advice[-2].reason
    whole = uc.diagnose(Convolutions(16, residual=True, scale=0.5), [graph()], causes=True, plan=NO_BASELINE)
    assert "no_residual" not in names(whole)
    assert all((block.residual or 0) > 0.3 for block in whole.parts.blocks[1:-1])  # type: ignore[union-attr]
    assert not any(cause.name == "vanishing_gradients" for cause in whole.verdict.causes)


def test_attention_without_residual_and_mlp_mixes_tokens() -> None:
    d = uc.diagnose(attention_only("attention only"), [images()], causes=True, plan=NO_BASELINE)
    assert names(d) == ["no_residual", "mixing"]
    assert [tip.cure for tip in d.verdict.advice] == ["residual", "contra_norm", "centered_attention"]
    assert d.parts is not None
    assert (d.parts.switch("no mixing") or d.parts.switches[0]).cosine < 0.5
    assert {"MLP", "MLP off", "attention", "gradients"} <= d.parts.missing.keys()  # not measured, never zero
    assert d.parts.total("mlp") is None
    notes = list(d.parts.notes())
    assert len(notes) == len(set(d.parts.missing.values()))  # one per reason
    assert all(sum(what in note for note in notes) >= 1 for what in d.parts.missing)
    assert all(note in " ".join(str(d).split()) for note in notes)
    healthy = uc.diagnose(attention_only("whole"), [images()], causes=True, plan=NO_BASELINE)
    assert names(healthy) == []


def test_massive_norms_are_found_where_nothing_is_collapsed() -> None:
    model: Any = attention_only("whole")
    with torch.no_grad():
        model.blocks[1].mlp.fc2.weight.mul_(300)
    d = uc.diagnose(model, [images()], causes=True, plan=NO_BASELINE)
    assert (d.verdict.kind, names(d)) == ("none", ["norm_growth"])
    assert [tip.cure for tip in d.verdict.advice] == ["layer_norm_scaling"]
    assert "Not a collapse, but: The residual stream grows" in str(d)


def test_advice_is_code_that_runs() -> None:
    for model, batch in ((Convolutions(8, False, 0.5), graph()), (attention_only("attention only"), images())):
        d = uc.diagnose(model, [batch], causes=True, plan=NO_BASELINE)
        for tip in d.verdict.advice:
            exec(tip.code, {"uc": uc, "torch": torch, "model": model})
            assert tip.cure in CURES or tip.cure in LOSSES or tip.place in ("training", "model")


@pytest.mark.parametrize("norm_first", [False, True])
def test_changes_and_gradients_equal_a_naive_computation(norm_first: bool) -> None:
    model, x = encoder(norm_first=norm_first).eval(), torch.randn(4, 12, 32, generator=torch.Generator().manual_seed(1))
    d = uc.diagnose(model, [x], causes=True, loss=lambda out, batch: out[:, 0, 0].square().sum(), plan=NO_BASELINE)
    assert d.parts is not None
    streams, y = [], x.clone().requires_grad_()
    for layer in model.layers:
        mixed: Tensor = y + layer._sa_block(layer.norm1(y), None, None) if norm_first else None  # type: ignore
        y = layer(y)
        streams.append((mixed, y))
    loss = streams[-1][1][:, 0, 0].square().sum()
    gradients = torch.autograd.grad(loss, [stream for _, stream in streams])
    for block, gradient in zip(d.parts.blocks, gradients, strict=True):
        assert block.gradient == pytest.approx(float(gradient.norm()), rel=1e-4, abs=1e-9)
        assert block.length is not None
    layers = [layer for layer in d.layers if layer.name != "final"]
    for number, block in enumerate(d.parts.blocks):  # the parts of the stream add up to the change by the block
        own = [block.changes[part].cosine for part in ("attention", "mlp", *(() if norm_first else ("norm",)))]
        change = layers[number + 1]["robust_cosine"] - layers[number]["robust_cosine"]
        assert sum(own) == pytest.approx(change, abs=1e-4)


def test_json_keeps_the_parts_and_old_files_load() -> None:
    d = uc.diagnose(encoder(), [torch.randn(8, 12, 32)], causes=True, plan=NO_BASELINE)
    assert uc.Diagnosis.from_json(d.to_json()) == d
    state = json.loads(uc.diagnose(encoder(), [torch.randn(8, 12, 32)], plan=NO_BASELINE).to_json())
    del state["parts"], state["verdict"]["causes"]
    assert uc.Diagnosis.of(state).parts is None
    assert all(len(line) <= 80 for table in d.tables()[1:] for line in _rendered(table, 80))


def _rendered(table: Any, width: int) -> list[str]:
    from rich.console import Console

    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(table)
    assert "…" not in captured.get()
    return [line.rstrip() for line in captured.get().splitlines()]


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_the_model_is_left_as_it_was(error: type[BaseException] | None) -> None:
    model, calls = encoder(dropout=0.5).train(), [0]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state().clone()

    def call(model: nn.Module, batch: Tensor) -> Any:
        calls[0] += 1
        if error is not None and calls[0] == 5:
            model.layers[1].register_forward_pre_hook(lambda m, a: (_ for _ in ()).throw(error()), prepend=True)  # type: ignore
        return model(batch)

    def measure() -> None:
        uc.diagnose(model, [torch.ones(4, 8, 32)], causes=True, call=call, loss=lambda out, _: out.sum())

    if error is KeyboardInterrupt:
        with pytest.raises(error):
            measure()
    else:
        measure()  # a switch that fails is reported as not measured
    model.layers[1]._forward_pre_hooks.clear()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(m.training for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_losses_of_models_and_batches() -> None:
    logits, y = torch.randn(6, 3), torch.arange(6) % 3
    expected = F.cross_entropy(logits, y)
    assert own_loss(logits, (torch.zeros(6), y)) == expected
    assert own_loss(logits, {"x": torch.zeros(6), "labels": y}) == expected
    assert own_loss({"loss": expected, "logits": logits}, None) == expected
    assert own_loss(logits, torch.zeros(6)) is None
    assert own_loss(torch.randn(2, 3, 3), (None, torch.zeros(2).long())) is None
    with pytest.raises(ValueError, match="loss"):
        uc.diagnose(encoder(), [torch.randn(4, 8, 32)], loss=lambda out, batch: out.sum())
    with pytest.raises(ValueError, match="one number"):
        uc.diagnose(encoder(), [torch.randn(4, 8, 32)], causes=True, loss=lambda out, batch: out)


def findings(kind: str, embed: float = 0.1) -> Any:
    cosines, share = {"complete": (0.99, 0.5), "dimensional": (0.1, 0.05), "none": (0.1, 0.8)}[kind]

    def layer(name: str, cosine: float, share: float) -> Layer:
        values = {"robust_cosine": cosine, "rank_share": share, "dataset_rank_share": share, "dataset_rank": 3.0}
        return Layer(name, "block", "", 64, 4096, {key: Summary(value) for key, value in values.items()})

    layers = (layer("embed", embed, 0.8), layer("block 0", cosines, share), layer("block 1", cosines, share))
    return evaluate(layers, (), Subject("torch", "Model", False, ("block",), blocks=2), 64)


def parts(base: tuple[float, float], alone: tuple[float, float], residual: float = 0.5) -> Parts:
    blocks = tuple(BlockParts(f"block {n}", residual=residual, length=1.0) for n in range(4))
    return Parts("block 1", blocks, (Switch("nothing", *base), Switch("no mixing", *alone)))


def test_rules_name_what_was_measured_and_nothing_else() -> None:
    first = lambda kind, *given, **more: name_causes(findings(kind, **more), parts(*given))[0].name  # noqa: E731
    assert first("complete", (0.99, 0.5), (0.2, 0.5)) == "mixing"
    assert first("complete", (0.99, 0.5), (0.95, 0.5)) == "unknown"
    assert first("complete", (0.99, 0.5), (0.2, 0.5), embed=0.95) == "input"
    assert first("complete", (0.99, 0.5), (0.95, 0.5), 0.0) == "no_residual"
    assert first("dimensional", (0.1, 0.05), (0.1, 0.06)) == "few_directions"
    assert first("dimensional", (0.1, 0.05), (0.1, 0.5)) == "mixing"
    assert name_causes(findings("none"), parts((0.1, 0.8), (0.1, 0.8), 0.0)) == ()
    nothing = Parts("block 1", (BlockParts("block 0"),), (Switch("nothing", 0.99, 0.5),))
    assert name_causes(findings("complete"), nothing)[0].name == "unknown"


def test_mixing_says_how_much_the_measured_blocks_add() -> None:
    blocks = tuple(BlockParts(f"block {n}", {"attention": Change(0.25, 0.0)}, residual=0.5) for n in range(2))
    whole = Parts("block 1", blocks, (Switch("nothing", 0.99, 0.5), Switch("no mixing", 0.2, 0.5)))
    evidence = name_causes(findings("complete"), whole)[0].evidence
    assert evidence[-1] == "Summed over the measured blocks, attention raises the cosine by 0.50."


@pytest.mark.parametrize("left", [False, True], ids=["padding on the right", "padding on the left"])
def test_short_texts_in_long_padding_are_measured(left: bool) -> None:
    x = torch.randn(6, 2048, 32, generator=torch.Generator().manual_seed(0))
    padding = torch.ones(6, 2048, dtype=torch.bool)
    padding[1:, :4] = False  # the first sequence is only padding
    short = {"src": x[1:, :4], "src_key_padding_mask": padding[1:, :4]}
    long = (
        {"src": x.roll(-4, 1), "src_key_padding_mask": padding.roll(-4, 1)}
        if left
        else {"src": x, "src_key_padding_mask": padding}
    )
    found, expected = (uc.diagnose(encoder(), [b], causes=True, plan=NO_BASELINE).parts for b in (long, short))
    assert found is not None
    assert expected is not None
    for one, other in zip(found.switches, expected.switches, strict=True):
        assert (one.name, one.cosine) == (other.name, pytest.approx(other.cosine, abs=1e-5))


def test_a_loss_that_is_not_finite_is_left_out() -> None:
    """As of a batch without any label that counts; the rest of the diagnosis can be stored."""
    model = nn.Sequential(encoder(), nn.Flatten(), nn.Linear(8 * 32, 3))
    batch = torch.randn(4, 8, 32), torch.full((4,), -100)
    d = uc.diagnose(model, [batch], causes=True, plan=NO_BASELINE)
    assert d.parts is not None
    assert {switch.loss for switch in d.parts.switches} == {None}
    assert d.parts.missing["loss"] == "not finite, got nan"
    assert "gradients" in d.parts.missing
    assert uc.Diagnosis.from_json(d.to_json()) == d
