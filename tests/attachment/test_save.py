"""Cures in files of their own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import uncollapse as uc
from uncollapse import io

transformers = pytest.importorskip("transformers")

IDS = torch.randint(0, 40, (2, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])


def bert(layers: int = 3, width: int = 16, kind: str = "Bert") -> Any:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=40, hidden_size=width, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=24
    )
    torch.manual_seed(1)
    return getattr(transformers, f"{kind}Model")(config).eval()


def output(model: nn.Module) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(input_ids=IDS, attention_mask=MASK).last_hidden_state
    return out


def trained(model: nn.Module) -> Tensor:
    """Change every parameter of the cures, as training would, and give the output."""
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for attachment in uc.attachments(model):
            for cure in attachment.cures.values():
                for parameter in cure.parameters():
                    parameter.add_(torch.rand(parameter.shape, generator=draw))
    return output(model)


def test_round_trip(tmp_path: Path) -> None:
    model = bert()
    plain = output(model)
    uc.attach(model, "contra_norm", scale=0.5, at=("attention.residual", "mlp.norm"), layers="last 2", learnable=True)
    uc.attach(model, "feat_scale", at="attention.output", layers=0)
    cured = trained(model)
    assert not torch.allclose(cured, plain, atol=1e-2)
    assert uc.save_cure(model, tmp_path / "new" / "folder") == tmp_path / "new" / "folder"
    other = bert()
    handles = uc.load_cure(other, tmp_path / "new" / "folder")
    assert torch.equal(output(other), cured)
    assert [str(h) for h in handles] == [str(h) for h in uc.attachments(model)]
    for handle in handles:
        handle.remove()
    assert torch.equal(output(other), plain)


def test_holds_the_cure_alone(tmp_path: Path) -> None:
    model = bert()
    uc.attach(model, "contra_norm", scale=0.5, learnable=True)
    uc.save_cure(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["uncollapse.json", "uncollapse.safetensors"]
    tensors = load_file(tmp_path / "uncollapse.safetensors")
    assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == {
        f"0/block {n} attention.residual/scale_param": (16,) for n in range(3)
    }


def test_with_save_pretrained(tmp_path: Path) -> None:
    """The way of the documentation: both into one folder, the model first out of it."""
    model = bert()
    uc.attach(model, "contra_norm", scale=0.5, learnable=True)
    cured = trained(model)
    model.save_pretrained(tmp_path)
    uc.save_cure(model, tmp_path)
    again = transformers.BertModel.from_pretrained(tmp_path).eval()
    assert not torch.equal(output(again), cured)
    uc.load_cure(again, tmp_path)
    assert torch.equal(output(again), cured)


def test_names_and_graphs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    build = lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))  # noqa: E731
    model, other = build(), build()
    other.load_state_dict(model.state_dict())
    where = {"modules": ["0", "2"], "layers": -1, "layout": "tokens", "causal": False}
    uc.attach(model, "contra_norm", scale=0.5, learnable=True, **where)
    uc.save_cure(model, tmp_path)
    uc.load_cure(other, tmp_path)
    assert torch.equal(other(x), model(x))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda: bert(layers=4), "3 blocks.*4"),
        (lambda: bert(kind="Roberta"), "RobertaModel"),
        (lambda: bert(width=24), r"scale_param.*\(16,\).*\(24,\)"),
        (lambda: nn.Linear(2, 2), "known model"),
    ],
)
def test_wrong_model(tmp_path: Path, other: Any, said: str) -> None:
    model = bert()
    uc.attach(model, "contra_norm", scale=0.5, learnable=True)
    uc.save_cure(model, tmp_path)
    wrong = other()
    keys = list(wrong.state_dict())
    with pytest.raises(ValueError, match=said):
        uc.load_cure(wrong, tmp_path)
    assert list(wrong.state_dict()) == keys
    assert not uc.attachments(wrong)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in wrong.modules())


def test_what_cannot_be_saved_or_loaded(tmp_path: Path) -> None:
    model = bert()
    with pytest.raises(ValueError, match="no cure"):
        uc.save_cure(model, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"uncollapse\.json"):
        uc.load_cure(model, tmp_path)
    uc.attach(model, "contra_norm", scale=0.5)
    uc.save_cure(model, tmp_path)
    with pytest.raises(ValueError, match="already: contra_norm"):
        uc.load_cure(model, tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[:-20], "describe"),
        (lambda text: "[]", "describe"),
        (lambda text: text.replace('"schema": 1', '"schema": 9'), "schema 9"),
        (lambda text: text.replace('"sha256": "', '"sha256": "0'), "replaced"),
    ],
)
def test_broken_files(tmp_path: Path, change: Any, said: str) -> None:
    model = bert()
    handle = uc.attach(model, "contra_norm", scale=0.5)
    uc.save_cure(model, tmp_path)
    handle.remove()
    path = tmp_path / "uncollapse.json"
    text = path.read_text()
    assert json.loads(text)["cures"][0]["cure"] == "contra_norm"
    path.write_text(change(text))
    with pytest.raises(ValueError, match=said):
        uc.load_cure(model, tmp_path)
    assert not uc.attachments(model)


def test_loaded_with_the_model_that_it_lies_beside(tmp_path: Path) -> None:
    """The command diagnoses a folder as it was saved: with its cure."""
    model = bert()
    uc.attach(model, "contra_norm", scale=0.5, learnable=True)
    cured = trained(model)
    model.save_pretrained(tmp_path)
    uc.save_cure(model, tmp_path)
    loaded = io.load_model(str(tmp_path), load_cure=uc.load_cure).model.eval()
    assert torch.equal(output(loaded), cured)
    random = io.load_model(str(tmp_path), random_weights=True, load_cure=uc.load_cure).model
    scales = [p for a in uc.attachments(random) for cure in a.cures.values() for p in cure.parameters()]
    assert len(scales) == 3
    assert all(bool((scale == 0.5).all()) for scale in scales)
    (tmp_path / "uncollapse.safetensors").unlink()
    with pytest.raises(io.UsageError, match="cure"):
        io.load_model(str(tmp_path), load_cure=uc.load_cure)
