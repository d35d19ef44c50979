"""Whole diagnoses of small real models: values against a naive reference, and a model that is left as it was."""

import copy
import gc
import math
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import uncollapse as uc
from uncollapse.backbones import torchvision_ops
from uncollapse.backbones.select import Layers
from uncollapse.diagnosis.result import Layer
from uncollapse.diagnosis.stats import scalar


class Recurrent(nn.Module):
    """One layer that runs three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.layer(x)
        return x


def encoder(layers: int = 3, dim: int = 32, **options: object) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(dim, 4, 64, batch_first=True, **options)  # type: ignore[arg-type]
    return nn.TransformerEncoder(block, layers, enable_nested_tensor=False)


def batches(count: int = 3, size: int = 4, n: int = 10, dim: int = 32) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([10, 7, 4, 9])[:size, None]
    padding = torch.arange(n) >= lengths
    return [
        {"src": torch.randn(size, n, dim, generator=generator), "src_key_padding_mask": padding} for _ in range(count)
    ]


def by_hand(model: nn.TransformerEncoder, data: list[dict[str, Tensor]]) -> list[list[Tensor]]:
    """Layer -> the real tokens of each sequence, by running the blocks one after the other."""
    found: list[list[Tensor]] = [[] for _ in range(len(model.layers) + 1)]
    with torch.no_grad():
        for batch in data:
            x, padding = batch["src"], batch["src_key_padding_mask"]
            for number in range(len(model.layers) + 1):
                found[number] += [row[~hidden] for row, hidden in zip(x, padding, strict=True)]
                if number < len(model.layers):
                    x = model.layers[number](x, src_key_padding_mask=padding)
    return found


def test_measures_equal_naive_references_with_padding() -> None:
    model, data = encoder().eval(), batches()
    d = uc.diagnose(model, data, plan=uc.Plan(rank_samples=4, baseline=0))
    assert [layer.name for layer in d.layers] == ["embed", "block 0", "block 1", "block 2"]
    assert (d.batches, d.sequences, d.tokens) == (3, 12, 90)
    for layer, sequences in zip(d.layers, by_hand(model, data), strict=True):
        rows = torch.cat(sequences)
        each = {
            name: [float(getattr(uc, name)(s.double())) for s in sequences]
            for name in ("mean_cosine", "effective_rank")
        }
        for name, values in each.items():
            summary = layer.measures[name]
            assert summary.count == 12
            assert summary.mean == pytest.approx(sum(values) / 12, rel=1e-4, abs=1e-5)
            spread = torch.tensor(values, dtype=torch.float64)
            assert summary.std == pytest.approx(float(spread.std(correction=0)), rel=1e-3, abs=1e-5)
            assert summary.quantiles[2] == pytest.approx(float(spread.quantile(0.5)), rel=1e-4, abs=1e-5)
        assert layer["dataset_rank"] == pytest.approx(float(uc.effective_rank(rows.double(), center=True)), rel=1e-4)
        assert layer["uniformity"] == pytest.approx(float(uc.uniformity(rows.double())), rel=1e-4)
        sigma = torch.linalg.svdvals((rows - rows.mean(0)).double())
        assert layer.spectrum == pytest.approx((sigma / sigma.sum()).tolist(), abs=1e-5)
        assert layer.spectrum_ranks == tuple(range(1, 33))


def test_batches_may_be_split_as_one_likes() -> None:
    model, (whole,) = encoder().eval(), batches(1)
    parts = [{key: value[i : i + 1] for key, value in whole.items()} for i in range(4)]
    one, many = (uc.diagnose(model, b, plan=uc.Plan(baseline=0)) for b in ([whole], iter(parts)))
    for a, b in zip(one.layers, many.layers, strict=True):
        for name in a.measures:
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-5), name


def fingerprint(model: nn.Module) -> tuple[object, ...]:
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in model.modules()]
    return hooks, {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state().clone()


def assert_untouched(model: nn.Module, before: tuple[object, ...]) -> None:
    hooks, state, rng = fingerprint(model)
    assert hooks == before[0]
    assert all(torch.equal(state[key], value) for key, value in before[1].items())  # type: ignore[attr-defined, index]
    assert torch.equal(rng, before[2])  # type: ignore[arg-type]
    assert torch.is_grad_enabled()
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("attention", [False, True])
def test_the_model_is_left_as_it_was(attention: bool) -> None:
    model = encoder(dropout=0.5).train()
    model.layers[1].eval()
    before = fingerprint(model)
    uc.diagnose(model, batches(), attention=attention)
    assert_untouched(model, before)


def test_the_model_is_left_as_it_was_after_an_exception() -> None:
    model = encoder().train()
    before = fingerprint(model)
    bad = [*batches(1), {"src": torch.full((1, 5, 32), torch.nan)}]
    with pytest.raises(ValueError, match=r"embed.*NaN"):
        uc.diagnose(model, bad, attention=True)
    assert_untouched(model, before)
    with pytest.raises(AssertionError, match="embedding dimension"):  # torch's own
        uc.diagnose(model, [{"src": torch.zeros(1, 5, 7)}])
    assert_untouched(model, before)

    def stop() -> Iterator[dict[str, Tensor]]:
        yield from batches(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        uc.diagnose(model, stop())
    assert_untouched(model, before)


def test_a_layer_that_goes_wrong_is_named() -> None:
    model = encoder()
    with torch.no_grad():
        model.layers[1].norm2.weight[0] = torch.inf
    with pytest.raises(ValueError, match="block 1"):
        uc.diagnose(model, batches())


def test_a_layer_with_numbers_too_large_to_square_is_named_at_once() -> None:
    class Exploding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[2](self.layers[1](self.layers[0](x) * 1e20))  # type: ignore[no-any-return]

    def data() -> Iterator[Tensor]:
        yield torch.randn(4, 16, 32)
        pytest.fail("a second batch was read")

    with pytest.raises(ValueError, match=r"layers\.1.*overflow"):
        uc.diagnose(Exploding(), data(), modules=["layers.*"])


def test_outputs_do_not_change_under_measurement() -> None:
    model, (batch,) = encoder().eval(), batches(1)
    seen: list[Tensor] = []
    uc.diagnose(model, [batch], call=lambda m, b: seen.append(m(**b)), plan=uc.Plan(baseline=0))
    real = ~batch["src_key_padding_mask"]
    assert torch.allclose(seen[0][real], model(**batch)[real], atol=1e-6)


def test_memory_does_not_grow_with_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scalar, "VALUES", 64)  # all samples are full soon; what waits is empty every 16 batches
    model = encoder(2, 16)
    alive: dict[int, int] = {}

    def data() -> Iterator[Tensor]:
        for done in range(65):
            if done in (16, 32, 64):
                gc.collect()
                alive[done] = sum(o.numel() for o in gc.get_objects() if type(o) is Tensor)
            yield torch.randn(4, 32, 16)

    uc.diagnose(model, data(), plan=uc.Plan(baseline=0, rank_samples=4))
    assert alive[16] == alive[32] == alive[64]


def test_baseline_is_a_random_model_and_can_be_left_out() -> None:
    model = encoder()
    d = uc.diagnose(model, batches(), plan=uc.Plan(baseline=2))
    assert [layer.name for layer in d.baseline] == [layer.name for layer in d.layers]
    assert d.baseline[0].tokens == 60
    assert d.baseline[-1]["mean_cosine"] != d.layers[-1]["mean_cosine"]
    assert d.settings["baseline_batches"] == 2
    assert uc.diagnose(model, batches(), plan=uc.Plan(baseline=0)).baseline == ()
    again = uc.diagnose(model, batches(), plan=uc.Plan(baseline=2))
    assert again.baseline == d.baseline


def test_a_model_that_cannot_be_made_again_is_measured_without_baseline() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x * self.weight)

    d = uc.diagnose(Odd(), [torch.randn(64, 16)], modules=["layer"])
    assert d.baseline == ()
    assert any("no random model" in caution for caution in d.verdict.cautions)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_quantized_model_is_measured_without_baseline() -> None:
    torchvision_ops.declare()
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    cases: list[tuple[nn.Module, Tensor]] = [
        (transformers.BertModel(config), torch.randint(50, (8, 10))),
        (encoder(), torch.randn(8, 10, 32)),  # its packed weights would have stayed, and been called random
    ]
    for model, batch in cases:
        quantized = torch.ao.quantization.quantize_dynamic(model.eval(), {nn.Linear}, dtype=torch.qint8)
        d = uc.diagnose(quantized, [batch])
        assert d.baseline == ()
        assert any("quantized" in caution for caution in d.verdict.cautions)


def test_places_within_a_block() -> None:
    model, data = encoder(), batches(1)
    d = uc.diagnose(model, data, at=("block", "attention.residual", "mlp.residual"), plan=uc.Plan(baseline=0))
    assert [(layer.name, layer.place) for layer in d.layers][4:] == [
        *((f"block {i}", "attention.residual") for i in range(3)),
        *((f"block {i}", "mlp.residual") for i in range(3)),
    ]
    with pytest.raises(ValueError, match=r"nowhere.*attention.residual"):
        uc.diagnose(model, data, at=("nowhere",))


def test_attention_measures_and_where_there_are_none() -> None:
    d = uc.diagnose(encoder(), batches(), attention=True)
    assert math.isnan(d.layers[0]["attention_std"])
    assert all(0 < layer["attention_std"] < 1 and layer["attention_similarity"] > 0 for layer in d.layers[1:])
    assert d.layers[1].measures["attention_entropy"].count == 12
    assert [layer.path for layer in d.layers] == ["layers.0", "layers.0", "layers.1", "layers.2"]
    assert "attention_std" in d.baseline[1].measures
    with pytest.raises(ValueError, match="maps"):
        uc.diagnose(Recurrent(), [torch.randn(2, 8, 16)], modules=["layer"], attention=True)


def test_a_layer_that_runs_again_is_a_layer_each_time() -> None:
    d = uc.diagnose(Recurrent(), [torch.randn(4, 8, 16)], modules=["layer"])
    assert [layer.name for layer in d.layers] == ["embed", "layer", "layer (call 2)", "layer (call 3)"]
    assert len({layer["mean_cosine"] for layer in d.layers}) == 4


def test_pairs_give_alignment() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    data = [torch.randn(32, 8) for _ in range(3)]
    close = [x + 0.01 * torch.randn_like(x) for x in data]
    d = uc.diagnose(model, data, modules=["0", "2"], pairs=close)
    with torch.no_grad():
        want = uc.alignment(model(torch.cat(data)), model(torch.cat(close)))
        uniform = uc.uniformity(model(torch.cat(data)))
    assert d.layers[-1]["alignment"] == pytest.approx(float(want), rel=1e-4)
    assert d.layers[-1]["pooled_uniformity"] == pytest.approx(float(uniform), rel=1e-4)
    with pytest.raises(ValueError, match="ended after"):
        uc.diagnose(model, data, modules=["0"], pairs=close[:1])
    with pytest.raises(ValueError, match="match"):
        uc.diagnose(model, data, modules=["0"], pairs=[x[:5] for x in close])


def test_pairs_of_sequences_are_pooled_over_real_tokens() -> None:
    model, (batch,) = encoder().eval(), batches(1)
    d = uc.diagnose(model, [batch], pairs=[batch], plan=uc.Plan(baseline=0))
    assert all(layer["alignment"] == pytest.approx(0, abs=1e-6) for layer in d.layers)


def test_how_batches_reach_the_model() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    x, labels = torch.randn(16, 8), torch.zeros(16)
    plain = uc.diagnose(model, [x], modules=["?"], plan=uc.Plan(baseline=0)).layers
    for batch in ((x, labels), [x, labels], {"input": x, "labels": labels}):
        assert uc.diagnose(model, [batch], modules=["?"], plan=uc.Plan(baseline=0)).layers == plain
    assert (
        uc.diagnose(model, [{"a": x}], modules=["?"], plan=uc.Plan(baseline=0), call=lambda m, b: m(b["a"])).layers
        == plain
    )
    with pytest.raises(ValueError, match="takes input"):
        uc.diagnose(model, [{"nothing": x}], modules=["?"])


def test_bad_arguments_say_what_was_expected() -> None:
    model, x = encoder(), [torch.randn(2, 4, 32)]
    with pytest.raises(ValueError, match="0 batches"):
        uc.diagnose(model, [])
    with pytest.raises(ValueError, match="rank_samples"):
        uc.diagnose(model, x, plan=uc.Plan(rank_samples=0))
    with pytest.raises(ValueError, match="tokens"):
        uc.diagnose(model, x, tokens="cls")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="baseline"):
        uc.diagnose(model, x, plan=uc.Plan(baseline=-1))
    with pytest.raises(ValueError, match="no activations"):
        uc.diagnose_activations([])
    with pytest.raises(ValueError, match="layer 1"):
        uc.diagnose_activations([torch.randn(2, 3, 4), torch.randn(0, 3, 4)])
    with pytest.raises(ValueError, match="shape"):
        uc.diagnose_activations({"a": torch.randn(4)})
    with pytest.raises(ValueError, match="several ways"):
        uc.diagnose_activations([torch.randn(2, 16, 4, 4)])
    with pytest.raises(ValueError, match=r"one Tensor; pass \[x\]"):
        uc.diagnose_activations(torch.randn(8, 32, 16))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no rows"):
        uc.diagnose_rows([])
    with pytest.raises(ValueError, match=r"\(m, d\)"):
        uc.diagnose_rows([torch.randn(2, 3, 4)])


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (None, ["embed", "block 0", "block 1", "block 2"]),
        (-1, ["block 2"]),
        ("last 2", ["block 1", "block 2"]),
        (["embed", "1:"], ["embed", "block 1", "block 2"]),
        (slice(0, 2), ["block 0", "block 1"]),
        ("embed", ["embed"]),
    ],
)
def test_layers_select_blocks(layers: Layers | None, expected: list[str]) -> None:
    model, data = encoder(), batches(1)
    every = {layer.name: layer for layer in uc.diagnose(model, data).layers}
    found = uc.diagnose(model, data, layers=layers)
    assert [layer.name for layer in found.layers] == [layer.name for layer in found.baseline] == expected
    assert all(layer.measures == every[layer.name].measures for layer in found.layers)
    partial = not {"block 0", "block 1", "block 2"} <= set(expected)
    assert any("Only some" in caution for caution in found.verdict.cautions) == partial
    assert ("layers" in found.settings) == partial


def test_layers_must_include_what_the_verdict_reads() -> None:
    model, data = encoder(), batches(1)
    with pytest.raises(ValueError, match="layers"):
        uc.diagnose(model, data, layers="embed", plan=uc.Plan(embed=False))
    with pytest.raises(ValueError, match="layers"):
        uc.diagnose(model, data, layers=7)


def test_layers_of_shared_weights_are_passes() -> None:
    """ALBERT runs one layer several times; passes that are not selected are not measured as repetitions."""
    torchvision_ops.declare()
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24}
    torch.manual_seed(0)
    model = transformers.AlbertModel(transformers.AlbertConfig(vocab_size=40, embedding_size=16, **size))
    data = [{"input_ids": torch.randint(0, 40, (4, 8))}]
    every = {layer.name: layer.measures for layer in uc.diagnose(model, data, plan=uc.Plan(baseline=0)).layers}
    for layers in ("first 2", "last 2"):
        found = uc.diagnose(model, data, layers=layers, plan=uc.Plan(baseline=0))
        assert len(found.layers) == 2
        assert all(layer.measures == every[layer.name] for layer in found.layers)


@pytest.mark.parametrize("wrap", [torch.compile, lambda m: m])
def test_compiled_models_are_measured_without_their_compiled_code(wrap: object) -> None:
    model = encoder(1)
    plain = uc.diagnose(copy.deepcopy(model), batches(1), plan=uc.Plan(baseline=0))
    model.compile(backend="eager")
    model(**batches(1)[0])
    measured = uc.diagnose(wrap(model), batches(1), plan=uc.Plan(baseline=0))  # type: ignore[operator]
    assert [a["mean_cosine"] for a in measured.layers] == pytest.approx([a["mean_cosine"] for a in plain.layers])


def test_half_precision() -> None:
    model, (batch,) = encoder(), batches(1)
    want = uc.diagnose(model, [batch], plan=uc.Plan(baseline=0))
    half = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}
    got = uc.diagnose(copy.deepcopy(model).bfloat16(), [half], plan=uc.Plan(baseline=0))
    assert got.layers[-1]["effective_rank"] == pytest.approx(want.layers[-1]["effective_rank"], rel=0.05)


def test_very_wide_layers_use_a_sample() -> None:
    x = torch.randn(4, 100, 2000, generator=torch.Generator().manual_seed(0))
    (layer,) = uc.diagnose_activations([x]).layers
    rows = x.reshape(-1, 2000)
    assert layer["dataset_rank"] == pytest.approx(float(uc.effective_rank(rows, center=True)), rel=1e-5)
    assert len(layer.spectrum) == 256
    assert layer.spectrum_ranks[-1] == 400


def test_sequences_with_one_token_and_none() -> None:
    mask = torch.tensor([[True] * 6, [True] + [False] * 5, [False] * 6])
    x = torch.randn(3, 6, 16).masked_fill(~mask[..., None], torch.inf)
    (layer,) = uc.diagnose_activations([x], mask=mask).layers
    assert layer.tokens == 7
    assert layer.measures["mean_cosine"].count == 1


def test_rows_are_streamed_with_their_pairs() -> None:
    x, y = torch.randn(1000, 12), torch.randn(1000, 12)
    d = uc.diagnose_rows(x.split(300), pairs=y.split(300))
    layer: Layer = d.layers[0]
    assert d.tokens == 1000
    assert layer["alignment"] == pytest.approx(float(uc.alignment(x, y)), rel=1e-5)
    assert layer["uniformity"] == pytest.approx(float(uc.uniformity(x)), rel=1e-5)
    assert layer["dataset_rank"] == pytest.approx(float(uc.effective_rank(x.double(), center=True)), rel=1e-6)


def test_rows_have_intervals_and_the_distance_to_the_optimum() -> None:
    views = torch.randn(2, 3000, 12, generator=torch.Generator().manual_seed(0))
    x, y = (view.split(700) for view in views)
    d = uc.diagnose_rows(x, pairs=y, t=1.0, alpha=1.0, level=0.9, draws=100)
    layer = d.layers[0]
    assert set(layer.intervals) == {"uniformity", "alignment"}
    for name, count in {"uniformity": 1024, "alignment": 3000}.items():
        found = layer.intervals[name]
        assert found.value == pytest.approx(layer[name], rel=1e-6)
        assert found.low < found.value < found.high
        assert (found.level, found.draws, found.rows) == (0.9, 100, count)
    assert layer["alignment"] == pytest.approx(float(uc.alignment(torch.cat(x), torch.cat(y), 1.0)), rel=1e-5)
    assert layer["uniformity"] == pytest.approx(uc.uniformity_optimum(12, 1.0), abs=0.02)
    assert layer["uniformity_gap"] == uc.uniformity_gap(layer["uniformity"], 12, 1.0)
    assert {"t": 1.0, "alpha": 1.0, "level": 0.9, "draws": 100}.items() <= d.settings.items()
    assert d.verdict.cautions[0].startswith(f"Alignment {layer['alignment']:.3f} (90 %: ")


def test_few_pairs_have_the_interval_of_the_function() -> None:
    x, y = torch.randn(200, 12), torch.randn(200, 12)
    found = uc.diagnose_rows(x.split(64), pairs=y.split(64), seed=4).layers[0].intervals["alignment"]
    expected = uc.alignment_interval(x, y, seed=4)
    assert found.value == pytest.approx(expected.value, rel=1e-5)
    assert found.high - found.low == pytest.approx(
        expected.high - expected.low, rel=0.2
    )  # rows are kept in another order


def test_no_draws_give_no_intervals_and_models_have_none() -> None:
    d = uc.diagnose_rows([torch.randn(50, 4)], draws=0)
    assert d.layers[0].intervals == {}
    assert "uniformity_gap" in d.layers[0].measures
    model = uc.diagnose(encoder(1), batches(1), plan=uc.Plan(baseline=0))
    assert all(not layer.intervals and "uniformity_gap" not in layer.measures for layer in model.layers)


@pytest.mark.parametrize("t", [2.0, 1000.0])
def test_rows_that_are_all_the_same(t: float) -> None:
    """Rounding may leave their uniformity a little above 0, the more the sharper the potential is."""
    for seed in range(5):
        row = torch.randn(1, 128, generator=torch.Generator().manual_seed(seed))
        d = uc.diagnose_rows([row.repeat(300, 1)], t=t, draws=40)
        assert d.layers[0]["uniformity_gap"] == pytest.approx(100, abs=0.1)
        assert d.verdict.kind != "none"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"draws": -1}, "0 for no intervals, got -1"),
        ({"level": 1.5}, "level"),
        ({"t": 0.0}, "t must be positive"),
        ({"t": 1e7}, "t must be at most 1e\\+06, up to which the optimum is known"),
        ({"alpha": -2.0}, "exponent of a distance"),
    ],
)
def test_bad_options_of_rows(options: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        uc.diagnose_rows([torch.randn(50, 4)], **options)  # type: ignore[arg-type]


def test_a_wrapper_that_calls_a_method_of_the_model() -> None:
    torchvision_ops.declare()
    timm = pytest.importorskip("timm")

    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shape = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
            self.vit = timm.models.VisionTransformer(**shape)

        def forward(self, x: Tensor) -> Tensor:
            return self.vit.forward_features(x)

    d = uc.diagnose(Features(), [torch.randn(4, 3, 32, 32) for _ in range(3)], plan=uc.Plan(baseline=0))
    assert d.layers[1].tokens == 3 * 4 * 16  # every batch, without the class token
    both = uc.diagnose(
        Features(), [torch.randn(4, 3, 32, 32)], pairs=[torch.randn(4, 3, 32, 32)], plan=uc.Plan(baseline=0)
    )
    assert 0 < both.layers[1]["alignment"] < 4


def test_padding_that_only_the_layers_are_told() -> None:
    class Loose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            hidden = torch.arange(x.shape[1]) >= lengths[:, None]
            for block in self.blocks:
                x = block(x, src_key_padding_mask=hidden)
            return x

    batch = (torch.randn(4, 10, 16), torch.tensor([10, 6, 5, 3]))
    assert uc.diagnose(Loose(), [batch], plan=uc.Plan(baseline=0)).layers[1].tokens == 24


def test_places_come_beside_the_residual_stream() -> None:
    d = uc.diagnose(encoder(), batches(1), at=("attention.residual",), attention=True, plan=uc.Plan(baseline=0))
    assert [layer.place for layer in d.layers] == ["block"] * 4 + ["attention.residual"] * 3
    assert d.verdict.evidence[0].layer == "block 2"


def test_one_batch_instead_of_several_is_told() -> None:
    with pytest.raises(ValueError, match="one dict"):
        uc.diagnose(encoder(), batches(1)[0])


def test_empty_batches_and_batches_of_padding_are_left_out_with_a_remark() -> None:
    (good,) = batches(1)
    empty = {name: tensor[:0] for name, tensor in good.items()}
    padding = good | {"src_key_padding_mask": torch.ones(4, 10, dtype=torch.bool)}
    model = encoder()
    mixed, alone = uc.diagnose(model, [padding, empty, good, empty]), uc.diagnose(model, [good])
    assert [layer.measures for layer in mixed.layers] == [layer.measures for layer in alone.layers]
    assert mixed.baseline == alone.baseline
    assert (mixed.batches, mixed.sequences) == (1, 4)
    assert any("3 batches were left out" in caution for caution in mixed.verdict.cautions)
    assert not any("left out" in caution for caution in alone.verdict.cautions)
    for nothing in ([empty], [padding, padding]):
        with pytest.raises(ValueError, match="only padding"):
            uc.diagnose(model, nothing)


def test_an_empty_batch_uses_up_its_second_view() -> None:
    model, x = encoder(), torch.randn(3, 8, 6, 32, generator=torch.Generator().manual_seed(0))
    views = x + 0.1
    plan = uc.Plan(baseline=0)
    some = uc.diagnose(model, [x[0], x[1][:0], x[2]], pairs=list(views), plan=plan)
    want = uc.diagnose(model, [x[0], x[2]], pairs=[views[0], views[2]], plan=plan)
    assert some.layers[-1]["alignment"] == want.layers[-1]["alignment"]


def test_a_batch_counts_although_its_second_view_is_only_padding() -> None:
    model, (good, other) = encoder().eval(), batches(2)
    blank = good | {"src_key_padding_mask": torch.ones(4, 10, dtype=torch.bool)}
    plan = uc.Plan(baseline=0)
    found = uc.diagnose(model, [good, other], pairs=[blank, good], plan=plan)
    plain = uc.diagnose(model, [good, other], plan=plan)
    alone = uc.diagnose(model, [other], pairs=[good], plan=plan)
    assert (found.batches, found.sequences) == (2, 8)
    for one, two, three in zip(found.layers, plain.layers, alone.layers, strict=True):
        assert {name: one.measures[name] for name in two.measures} == two.measures
        assert one["alignment"] == three["alignment"]
    assert any("1 batch has a second view that is only padding" in caution for caution in found.verdict.cautions)
    assert not any("left out" in caution for caution in found.verdict.cautions)


def test_a_batch_of_padding_uses_up_its_second_view() -> None:
    model, (good, other) = encoder().eval(), batches(2)
    blank = good | {"src_key_padding_mask": torch.ones(4, 10, dtype=torch.bool)}
    plan = uc.Plan(baseline=0)
    found = uc.diagnose(model, [blank, good], pairs=[good, other], plan=plan)
    alone = uc.diagnose(model, [good], pairs=[other], plan=plan)
    assert [layer.measures for layer in found.layers] == [layer.measures for layer in alone.layers]
    assert any("1 batch was left out" in caution for caution in found.verdict.cautions)


def test_pairs_that_are_left_over_are_mentioned() -> None:
    model, data, plan = encoder().eval(), batches(3), uc.Plan(baseline=0)
    said = [uc.diagnose(model, data[:count], pairs=data, plan=plan).verdict.cautions for count in (2, 3)]
    assert ["more pairs than batches" in " ".join(cautions) for cautions in said] == [True, False]
    x = torch.randn(12, 8)
    with pytest.raises(ValueError, match="after the 2 parts"):
        uc.diagnose_rows(x.split(4)[:2], pairs=x.split(4))


@pytest.mark.parametrize(
    ("model", "data", "says"),
    [
        ("bert-base-uncased", [torch.zeros(1)], "from_pretrained"),
        (numpy.ones((4, 8)), [torch.zeros(1)], "diagnose_activations"),
        (encoder(1), "some text", "Tokenize"),
        (encoder(1), ["some text", "more"], "Tokenize"),
        (encoder(1), [numpy.ones((2, 5, 32), dtype="float32")], "from_numpy"),
        (encoder(1), [{"src": numpy.ones((2, 5, 32), dtype="float32")}], "from_numpy"),
        (encoder(1), None, "NoneType"),
    ],
)
def test_what_is_not_a_model_or_not_batches_has_a_remedy(model: Any, data: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        uc.diagnose(model, data)


def test_a_model_may_take_text() -> None:
    class OfText(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder(2)

        def forward(self, texts: list[str]) -> Tensor:
            found: Tensor = self.encoder(torch.randn(len(texts), 10, 32))
            return found

    assert uc.diagnose(OfText(), [[["a", "b", "c"]]]).sequences == 3


def test_a_model_without_weights_is_told() -> None:
    with pytest.raises(ValueError, match="no weights"):
        uc.diagnose(encoder().to("meta"), batches(1))


def test_a_last_part_of_one_row_does_not_count_as_a_cosine() -> None:
    x = torch.ones(65, 8)
    layer = uc.diagnose_rows(x.split(64)).layers[0]
    assert layer.measures["mean_cosine"].count == 1
    assert layer["mean_cosine"] == pytest.approx(1, abs=1e-5)


def test_a_random_twin_beside_sets_of_one_token_has_no_nan_in_words() -> None:
    d = uc.diagnose(encoder(), [{"src": torch.randn(64, 1, 32)}])
    assert not any("nan" in caution for caution in d.verdict.cautions)


def test_named_layers_of_torch_with_padding() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 3)  # packs padded batches
    by_name = uc.diagnose(model, batches(1), modules=["layers.*"], plan=uc.Plan(baseline=0))
    for one, other in zip(by_name.layers, uc.diagnose(model, batches(1), plan=uc.Plan(baseline=0)).layers, strict=True):
        assert (one.tokens, one["mean_cosine"]) == (other.tokens, other["mean_cosine"])


class Kinds(nn.Module):
    """Two kinds of nodes in a dictionary, the way of `HeteroConv`."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, nodes: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.lin(x) for name, x in nodes.items()}


def test_kinds_of_nodes_are_not_compared_with_each_other() -> None:
    model, nodes = nn.Sequential(Kinds(), Kinds()), {"paper": torch.randn(6, 4), "author": torch.randn(5, 4)}
    with pytest.raises(ValueError, match=r"paper.*author.*diagnose_activations"):
        uc.diagnose(model, [nodes], modules=["0", "1"], call=lambda model, batch: model(batch))
    uc.attach(model, "contra_norm", scale=0.1, modules=["0", "1"], causal=False)
    with pytest.raises(ValueError, match=r"paper.*author"):
        model(nodes)
