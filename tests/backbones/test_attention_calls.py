"""Attention in tiles gives the output of torch's function, and the metrics of whole maps."""

from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import uncollapse as uc
from uncollapse.backbones import attention_calls, find
from uncollapse.backbones.attention_calls import TileReader, Tiles
from uncollapse.backbones.sites import Site
from uncollapse.diagnosis.layer_measures import measure_tiles

NAMES = ("attention_similarity", "attention_std", "attention_entropy")
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 90}


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.options)


def naive_maps(q: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
    """Whole maps in float64; a row that sees no key is 0."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1).double()
    logits = q.double() @ k.mT / q.shape[-1] ** 0.5
    logits = logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
    return logits.softmax(-1).nan_to_num(0)


def measure(model: nn.Module, inputs: tuple[Tensor, ...], mask: Tensor | None, prefix: int) -> tuple[Tensor, Any]:
    found: dict[str, Tensor] = {}

    def receive(site: Site, call: int, tiles: Tiles) -> None:
        found.update(measure_tiles(tiles, mask, prefix))

    with TileReader(model, [Site("", what="attention")], receive), torch.no_grad():
        return model(*inputs), found


@pytest.mark.parametrize("tile", [1, 40, 500, 1 << 19])
@pytest.mark.parametrize("kind", ["plain", "causal", "bool", "float", "groups"])
@pytest.mark.parametrize("prefix", [0, 2])
def test_tiles_give_the_output_and_the_metrics_of_whole_maps(
    monkeypatch: pytest.MonkeyPatch, tile: int, kind: str, prefix: int
) -> None:
    monkeypatch.setattr(attention_calls, "TILE", tile)
    torch.manual_seed(0)
    q, v = 2 * torch.randn(3, 4, 7, 5), torch.randn(3, 2 if kind == "groups" else 4, 7, 6)
    k = torch.randn(*v.shape[:2], 7, 5)
    mask = torch.arange(7) < torch.tensor([7, 4, 3])[:, None]
    allowed, options = None, {}
    if kind == "causal":
        allowed, options = torch.ones(7, 7).tril().bool().expand(3, 4, 7, 7), {"is_causal": True}
    elif kind in ("bool", "float"):
        allowed = mask[:, None, None] & mask[:, None, :, None]  # padded rows see nothing
        added = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)
        options = {"attn_mask": allowed if kind == "bool" else added}
    elif kind == "groups":
        options = {"enable_gqa": True, "scale": 5**-0.5}
    real = mask if kind in ("bool", "float") else None
    output, found = measure(Attention(**options), (q, k, v), real, prefix)
    torch.testing.assert_close(output, F.scaled_dot_product_attention(q, k, v, **options), rtol=1e-5, atol=1e-6)
    maps = naive_maps(q, k, allowed).expand(3, 4, 7, 7)
    for name in NAMES:
        expected = getattr(uc, name)(maps, real, prefix=prefix)
        torch.testing.assert_close(found[name].double(), expected, rtol=1e-5, atol=1e-6)


def test_half_precision_is_computed_in_float32() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 9, 8).bfloat16()
    output, found = measure(Attention(), (q, k, v), None, 0)
    assert output.dtype == torch.bfloat16
    expected = uc.attention_entropy(naive_maps(q, k, None))
    torch.testing.assert_close(found["attention_entropy"].double(), expected, rtol=1e-5, atol=1e-6)


def test_equal_logits_have_no_deviation_and_full_entropy() -> None:
    q = torch.zeros(2, 3, 11, 4)
    _, found = measure(Attention(), (q, q, q), None, 0)
    assert found["attention_std"].max() < 1e-9
    torch.testing.assert_close(found["attention_similarity"], torch.ones(2))
    torch.testing.assert_close(found["attention_entropy"], torch.ones(2))


def test_padding_may_hold_nan_and_real_tokens_may_not() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 6, 4)
    mask = (torch.arange(6) < 4).expand(2, 6)
    model = Attention(attn_mask=mask[:, None, None].expand(2, 1, 6, 6))
    _, clean = measure(model, (q, k, v), mask, 0)
    q[:, :, 5] = torch.nan  # a query of padding
    _, found = measure(model, (q, k, v), mask, 0)
    assert all(torch.equal(found[name], clean[name]) for name in NAMES)
    q[0, 0, 1] = torch.nan
    with pytest.raises(uc.errors.NotFiniteError, match="finite"):
        measure(model, (q, k, v), mask, 0)


def test_only_square_maps_of_the_named_modules_are_read() -> None:
    q, k, v = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    output, found = measure(Attention(), (q, k, v), None, 0)
    assert found == {}
    torch.testing.assert_close(output, F.scaled_dot_product_attention(q, k, v))


def models() -> dict[str, tuple[nn.Module, list[Any]]]:
    torch.manual_seed(0)
    ids, mask = torch.randint(5, 90, (2, 6, 12)), (torch.arange(12) < torch.arange(7, 13)[:, None]).long()
    texts = [{"input_ids": part, "attention_mask": mask} for part in ids]
    bert = transformers.BertModel(transformers.BertConfig(**SMALL))
    llama = transformers.LlamaModel(transformers.LlamaConfig(**SMALL, num_key_value_heads=2))
    vit = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2)
    return {"bert": (bert, texts), "llama": (llama, texts), "vit": (vit, [torch.randn(4, 3, 64, 64)])}


@pytest.mark.parametrize("name", ["bert", "llama", "vit"])
def test_a_diagnosis_measures_in_tiles_what_it_measures_in_whole_maps(name: str) -> None:
    model, batches = models()[name]
    assert all(block.fused is not None for block in find(model).blocks)
    tiled = uc.diagnose(model, batches, attention=True, plan=uc.Plan(baseline=0))
    if isinstance(model, transformers.PreTrainedModel):
        model.set_attn_implementation("eager")
    else:
        for block in model.blocks:
            block.attn.fused_attn = False
    assert all(block.fused is None for block in find(model).blocks)
    whole = uc.diagnose(model, batches, attention=True, plan=uc.Plan(baseline=0))
    for one, other in zip(tiled.layers, whole.layers, strict=True):
        assert one.measures.keys() == other.measures.keys()
        for measure_name in one.measures:
            assert one[measure_name] == pytest.approx(other[measure_name], rel=1e-4, abs=1e-6), measure_name
    assert "attention_entropy" in tiled.layers[1].measures


def test_nothing_is_left_on_the_model() -> None:
    model, batches = models()["bert"]
    uc.diagnose(model, batches, attention=True)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.config._attn_implementation == "sdpa"


def test_attention_with_two_maps_is_not_read_in_tiles() -> None:
    model = timm.create_model("vit_small_patch16_224", img_size=64, depth=1, attn_layer="diff")
    assert all(block.fused is None for block in find(model).blocks)
