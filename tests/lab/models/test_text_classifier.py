"""Encoders with a head: the cures of the paper in them, L2 norms, stacked blocks, the uniformity loss."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.lab.tiny_text import SENTENCES, tiny_model, tokenizer
from torch import Tensor, nn

import uncollapse as uc
from uncollapse import backbones
from uncollapse.errors import UsageError
from uncollapse.io.hf_models import Origin, load_classifier
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.models.text_classifier import (
    L2Norm,
    UniformLoss,
    build_deepened,
    build_random,
    logits_on_cpu,
    put_cure,
    use_l2_norms,
)

KINDS = ("bert", "albert")
NORMS = {
    "bert": {"attention.residual": "attention.output.LayerNorm", "mlp.residual": "output.LayerNorm"},
    "albert": {"attention.residual": "attention.LayerNorm", "mlp.residual": "full_layer_layer_norm"},
}


@pytest.fixture(scope="module")
def origins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Origin]:
    return {kind: Origin(str(tiny_model(tmp_path_factory.mktemp(kind), kind, layers=3))) for kind in KINDS}


def made(origin: Origin, seed: int = 0) -> nn.Module:
    with use_seed(seed):
        return load_classifier(origin, 2).eval()


def batch(count: int = 4) -> dict[str, Tensor]:
    return dict(tokenizer()([text for text, _ in SENTENCES[:count]], padding=True, return_tensors="pt"))


def same(one: nn.Module, two: nn.Module) -> bool:
    first, second = one.state_dict(), two.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_l2_norm_by_hand() -> None:
    norm = nn.LayerNorm(3)
    norm.weight.data, norm.bias.data = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 0.0, 1.0])
    x = torch.tensor([[[3.0, 0.0, 4.0], [0.0, 0.0, 0.0]]])
    root = math.sqrt(3)
    expected = torch.tensor([[[0.6 * root, 0.0, 3 * 0.8 * root + 1], [0.0, 0.0, 1.0]]])
    torch.testing.assert_close(L2Norm(norm)(x), expected)
    assert L2Norm(norm)(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["attention.residual", "mlp.residual"])
def test_only_the_norm_behind_the_place_changes(origins: dict[str, Origin], kind: str, place: str) -> None:
    model, plain = made(origins[kind]), made(origins[kind])
    use_l2_norms(model, place)
    changed = [name for name, module in model.named_modules() if isinstance(module, L2Norm)]
    blocks = dict.fromkeys(block.path for block in backbones.find(plain).blocks)
    assert changed == [f"{path}.{NORMS[kind][place]}" for path in blocks]
    assert same(model, plain)
    assert float((logits_on_cpu(model, batch()) - logits_on_cpu(plain, batch())).abs().max()) > 1e-5
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]


def test_l2_at_all_norms(origins: dict[str, Origin]) -> None:
    model = made(origins["bert"])
    use_l2_norms(model, "norms")
    assert sum(isinstance(module, L2Norm) for module in model.modules()) == 6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["block", "attention.input", "attention.context", "attention.output", "mlp.norm"])
def test_no_norm_behind_the_place(origins: dict[str, Origin], kind: str, place: str) -> None:
    model = made(origins[kind])
    with pytest.raises(UsageError, match=f"LayerNorm.*{place}"):
        put_cure(model, "contra_norm", at=place, norm="l2", scale=0.1)
    assert same(model, made(origins[kind]))
    assert not any(isinstance(module, L2Norm) for module in model.modules())
    assert not uc.attachments(model)


def test_what_does_not_fit_the_model_is_a_sentence(origins: dict[str, Origin]) -> None:
    with pytest.raises(UsageError, match=r"'attention\.residual'"):
        put_cure(made(origins["bert"]), "contra_norm", at="attention.residul", norm="layer", scale=0.1)
    with pytest.raises(UsageError, match="9"):
        put_cure(made(origins["bert"]), "contra_norm", at="9", norm="layer", scale=0.1)
    with pytest.raises(UsageError, match="9"):
        put_cure(made(origins["bert"]), "contra_norm", at="9", norm="l2", scale=0.1)


def test_the_same_seed_draws_the_same_head(origins: dict[str, Origin]) -> None:
    origin = origins["bert"]
    one, two, other = made(origin), made(origin), made(origin, seed=1)
    assert same(one, two)
    differ = [name for name, tensor in one.state_dict().items() if not torch.equal(tensor, other.state_dict()[name])]
    assert differ == ["classifier.weight"]  # its bias begins at 0


def test_the_head_comes_from_the_random_numbers_of_the_caller(origins: dict[str, Origin]) -> None:
    torch.manual_seed(5)
    first = load_classifier(origins["bert"], 2).get_parameter("classifier.weight")
    second = load_classifier(origins["bert"], 2).get_parameter("classifier.weight")
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(load_classifier(origins["bert"], 2).get_parameter("classifier.weight"), first)


def blocks(model: nn.Module) -> list[dict[str, Tensor]]:
    return [dict(model.get_submodule(block.path).state_dict()) for block in backbones.find(model).blocks]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 3, 7])
def test_stacked(origins: dict[str, Origin], kind: str, depth: int) -> None:
    source, pretrained = made(origins[kind]), backbones.find(made(origins[kind])).blocks
    with use_seed(0):
        deep = build_deepened(origins[kind], 2, depth, repeated=True)
    found = blocks(deep)
    assert len(found) == depth
    for number, block in enumerate(found):
        expected = blocks(source)[number % 3]
        assert all(torch.equal(block[name], expected[name]) for name in expected), number
    inside = tuple(f"{block.path}." for block in (*pretrained, *backbones.find(deep).blocks))
    others = {name: t for name, t in deep.state_dict().items() if not name.startswith(inside)}
    assert any("word_embeddings" in name for name in others)
    assert all(torch.equal(tensor, source.state_dict()[name]) for name, tensor in others.items())


def test_stacked_to_the_same_depth_is_the_pretrained_model(origins: dict[str, Origin]) -> None:
    with use_seed(0):
        deep = build_deepened(origins["bert"], 2, 3, repeated=True).eval()
    assert torch.equal(logits_on_cpu(deep, batch()), logits_on_cpu(made(origins["bert"]), batch()))


def test_extended_with_random_blocks(origins: dict[str, Origin]) -> None:
    with use_seed(0):
        deep = build_deepened(origins["bert"], 2, 5, repeated=False)
    found, pretrained = blocks(deep), blocks(made(origins["bert"]))
    for number in range(3):
        assert all(torch.equal(found[number][name], pretrained[number][name]) for name in pretrained[number])
    name = "attention.self.query.weight"
    assert not any(torch.equal(found[number][name], each[name]) for number in (3, 4) for each in pretrained)
    assert float(found[4][name].std()) == pytest.approx(deep.config.initializer_range, rel=0.2)  # type: ignore[attr-defined]


def test_a_size_that_an_architecture_does_not_have(tmp_path: Path) -> None:
    config = transformers.DistilBertConfig(vocab_size=20, dim=16, hidden_dim=32, n_layers=2, n_heads=2)
    transformers.DistilBertModel(config).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="intermediate_size"):
        build_random(Origin(str(tmp_path)), 2, depth=3, width=8, heads=2)


@pytest.mark.parametrize("damage", ["renamed", "reshaped"])
def test_an_encoder_that_lacks_weights_is_refused(tmp_path: Path, damage: str) -> None:
    """Else it would be trained from random numbers without a word."""
    folder = tiny_model(tmp_path / "model")
    if damage == "renamed":
        weights = load_file(folder / "model.safetensors")
        save_file({f"student.{name}": tensor for name, tensor in weights.items()}, folder / "model.safetensors")
    else:
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(settings | {"intermediate_size": 48}))
    with pytest.raises(UsageError, match="missing"):
        load_classifier(Origin(str(folder)), 2)


def test_the_head_of_a_stack_comes_from_the_seed(origins: dict[str, Origin]) -> None:
    heads = []
    for seed in (0, 0, 1):
        with use_seed(seed):
            heads.append(build_deepened(origins["bert"], 2, 4, repeated=True).get_parameter("classifier.weight"))
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def uniformity(rows: list[Tensor], temperature: float) -> list[float]:
    """log Σ_j exp(f_i·f_j/τ) of each row."""
    unit = [row.double() / row.double().norm() for row in rows]
    return [math.log(sum(math.exp(float(u @ v) / temperature) for v in unit)) for u in unit]


@pytest.mark.parametrize("kind", KINDS)
def test_uniformity_of_the_last_tokens(origins: dict[str, Origin], kind: str) -> None:
    model, given, each = made(origins[kind]), batch(), []
    with torch.no_grad():
        last = model(**given, output_hidden_states=True).hidden_states[-1]
    for tokens, mask in zip(last, given["attention_mask"], strict=True):
        found = uniformity([token for token, real in zip(tokens, mask, strict=True) if real], 0.5)
        each.append(sum(found) / len(found))
    with UniformLoss(model, "tokens", 0.5).open() as loss, torch.no_grad():
        model(**given)
        assert float(loss()) == pytest.approx(sum(each) / len(each), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_uniformity_of_what_enters_the_classifier(origins: dict[str, Origin], kind: str) -> None:
    model, given = made(origins[kind]), batch()
    pooled: Any = model.get_submodule(kind)(**given).pooler_output
    with UniformLoss(model, "pooled", 0.8).open() as loss, torch.no_grad():
        model(**given)
        assert float(loss()) == pytest.approx(sum(uniformity(list(pooled.detach()), 0.8)), rel=1e-5)


def test_uniformity_of_the_features_of_what_enters_the_classifier(origins: dict[str, Origin]) -> None:
    model, given = made(origins["bert"]), batch()
    pooled: Any = model.get_submodule("bert")(**given).pooler_output
    total = 0.0
    for row in pooled.detach().double():
        unit = (row / row.norm()).tolist()
        total += sum(math.log(sum(math.exp(a * b / 0.8) for b in unit)) for a in unit)
    with UniformLoss(model, "features", 0.8).open() as loss, torch.no_grad():
        model(**given)
        assert float(loss()) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("on", ["tokens", "pooled", "features"])
def test_the_loss_reaches_the_encoder_and_leaves_no_hook(origins: dict[str, Origin], on: str) -> None:
    model = made(origins["bert"])
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    with UniformLoss(model, on, 1.0).open() as loss:
        model(**batch())
        loss().backward()
    for path in ("bert.embeddings.word_embeddings.weight", "bert.encoder.layer.2.output.dense.weight"):
        gradient = model.get_parameter(path).grad
        assert gradient is not None
        assert float(gradient.abs().max()) > 1e-6
    assert model.get_parameter("classifier.weight").grad is None
    assert hooks == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


def test_hooks_go_when_training_breaks_off(origins: dict[str, Origin]) -> None:
    model = made(origins["bert"])
    with pytest.raises(RuntimeError, match="broke"), UniformLoss(model, "pooled", 1.0).open():
        raise RuntimeError("broke")
    assert not model.get_submodule("classifier")._forward_pre_hooks


def test_a_model_without_classifier_has_no_pooled_rows(origins: dict[str, Origin]) -> None:
    encoder = made(origins["bert"]).get_submodule("bert")
    with pytest.raises(UsageError, match="classifier"), UniformLoss(encoder, "pooled", 1.0).open():
        pass
