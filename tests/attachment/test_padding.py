"""attach(padding=…): padding that counts, as in published code, against padding that does not."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import uncollapse as uc

from .by_hand import Before, assert_clean, assert_same
from .tiny_models import build

transformers: Any = pytest.importorskip("transformers")
SCALE = 0.7
IDS = torch.randint(5, 50, (2, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1] * 9, [1] * 4 + [0] * 5])
NORMS = {"bert": "attention.output.LayerNorm", "albert": "attention.LayerNorm"}


def published(x: Tensor) -> Tensor:
    """(1 + s)x − s·softmax(x̂x̂ᵀ)x over all tokens, token by token."""
    made = torch.empty_like(x)
    for b, rows in enumerate(x):
        unit = [row / row.norm() for row in rows]
        for i, row in enumerate(rows):
            weights = torch.stack([torch.exp(unit[i] @ other) for other in unit])
            mean = sum(w * other for w, other in zip(weights / weights.sum(), rows, strict=True))
            made[b, i] = (1 + SCALE) * row - SCALE * mean
    return made


def layers(model: nn.Module, ids: Tensor = IDS, mask: Tensor = MASK) -> Tensor:
    """Tokens of all layers (layers, b, n, d)."""
    with torch.no_grad():
        return torch.stack(model(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states)


def double(kind: str) -> nn.Module:
    return build(kind).model.double()


@pytest.mark.parametrize("kind", NORMS)
def test_counted_is_the_published_form(kind: str) -> None:
    """The layer of the published code stands in the forward pass itself, in front of the norm of the attention."""
    model = double(kind)
    plain, by_hand = layers(model), copy.deepcopy(model)
    for path in [name for name, _ in model.named_modules() if name.endswith(NORMS[kind])]:
        owner, _, name = path.rpartition(".")
        setattr(by_hand.get_submodule(owner), name, Before(by_hand.get_submodule(path), before=published))
    uc.attach(model, "contra_norm", scale=SCALE, identity=True, padding="counted")
    assert_same(layers(model), layers(by_hand), plain)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("options", [{}, {"axis": "features"}, {"dual": True}], ids=str)
def test_a_sentence_alone_and_in_a_batch(kind: str, options: dict[str, Any]) -> None:
    model = build(kind).model
    real, ones = IDS[1:, :4], MASK[1:, :4]
    differences = {}
    for padding in ("masked", "counted"):
        with uc.attach(model, "contra_norm", scale=SCALE, padding=padding, **options):
            alone, among = layers(model, real, ones)[:, 0], layers(model)[:, 1, :4]
        differences[padding] = (alone - among).abs().amax((1, 2))  # a layer each
    assert differences["masked"].max() < 1e-5
    assert differences["counted"][1:].min() > 1e-3


def test_without_padding_both_are_the_same() -> None:
    model, ones = double("bert"), torch.ones_like(MASK)
    found = []
    for padding in ("masked", "counted"):
        with uc.attach(model, "contra_norm", scale=SCALE, padding=padding):
            found.append(layers(model, IDS, ones))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cure", ["pair_norm", "feat_scale"])
def test_other_cures_of_tokens_count_padding_as_well(cure: str) -> None:
    model = double("bert")
    with uc.attach(model, cure, padding="counted") as attachment:
        for number, parameter in enumerate(attachment.parameters()):
            parameter.data.fill_(0.4 * (number % 2))  # FeatScale begins where it does nothing
        counted = layers(model)[1, 1, :4] - layers(model, IDS[1:, :4], MASK[1:, :4])[1, 0]
    assert counted.abs().max() > 1e-7  # 0 but for rounding where padding is masked


def test_saved_with_the_model_and_put_back(tmp_path: Path) -> None:
    model = double("bert")
    uc.attach(model, "contra_norm", scale=SCALE, padding="counted")
    uc.save_cure(model, tmp_path)
    other = double("bert")
    uc.load_cure(other, tmp_path)
    assert torch.equal(layers(other), layers(model))
    uc.save_cure(other, tmp_path / "again")
    assert (tmp_path / "again" / "uncollapse.json").read_bytes() == (tmp_path / "uncollapse.json").read_bytes()


def test_a_file_of_an_earlier_version_masks(tmp_path: Path) -> None:
    model = double("bert")
    uc.attach(model, "contra_norm", scale=SCALE)
    uc.save_cure(model, tmp_path)
    path = tmp_path / "uncollapse.json"
    described = json.loads(path.read_text(encoding="utf-8"))
    assert described["cures"][0].pop("padding") == "masked"
    path.write_text(json.dumps(described), encoding="utf-8")
    other = double("bert")
    uc.load_cure(other, tmp_path)
    assert torch.equal(layers(other), layers(model))


@pytest.mark.parametrize(
    ("kind", "cure", "options"),
    [("gcn", "contra_norm", {"scale": SCALE}), ("gcn", "drop_edge", {}), ("bert", "attn_scale", {})],
)
def test_refused_where_no_padding_is_met(kind: str, cure: str, options: dict[str, Any]) -> None:
    if kind == "gcn":
        pytest.importorskip("torch_geometric")
    model = build(kind).model
    with pytest.raises(ValueError, match=rf"{cure} in \w+ meets no padding of sequences\. Leave out padding\."):
        uc.attach(model, cure, padding="counted", **options)
    assert_clean(model)


def test_another_word_is_refused() -> None:
    model = build("bert").model
    with pytest.raises(ValueError, match='padding must be "masked" or "counted", got \'ignored\''):
        uc.attach(model, "contra_norm", scale=SCALE, padding="ignored")  # type: ignore[arg-type]
    assert_clean(model)


@pytest.mark.parametrize("kind", ["hf_vit", "timm_vit"])
@pytest.mark.parametrize("tokens", ["all", "patches"])
def test_images_have_no_padding_to_count(kind: str, tokens: Any) -> None:
    if kind == "timm_vit":
        pytest.importorskip("timm")
    tiny = build(kind)
    plain, found = tiny.output(), []
    for padding in ("masked", "counted"):
        with uc.attach(tiny.model, "contra_norm", scale=SCALE, tokens=tokens, padding=padding):
            found.append(tiny.output())
    assert torch.equal(*found)
    assert not torch.allclose(found[0], plain, atol=1e-3)


def test_vectors_are_one_set_as_ever() -> None:
    model = build("mlp").model.double()
    x = torch.randn(6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain = model(x)
    where: dict[str, Any] = {"modules": "layers.2", "layout": "vectors", "at": "block"}
    with uc.attach(model, "contra_norm", scale=SCALE, identity=True, padding="counted", **where):
        found = model(x)
    one, two, three = model.get_submodule("layers").children()
    y = x + torch.relu(one(x))
    y = y + torch.relu(two(y))
    expected = y + torch.relu(published(three(y)[None])[0])
    assert_same(found, expected, plain)
