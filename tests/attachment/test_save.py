"""Cures in files of their own. That every cure comes back as it was saved is in `test_contract`."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import uncollapse as uc
from uncollapse.errors import UsageError
from uncollapse.io.models import load_model

from .by_hand import TEXT, assert_clean, transformers
from .tiny_models import Tiny, build

SCALES = {"scale": 0.5, "learnable": True}


def cured(**options: Any) -> Tiny:
    """Return a model with two cures, whose parameters have changed as training would."""
    tiny = build("bert")
    places = {"at": ("attention.residual", "mlp.norm"), "layers": "last 2"}
    for cure, given in (("contra_norm", {**SCALES, **places, **options}), ("feat_scale", {"layers": 0})):
        for parameter in uc.attach(tiny.model, cure, **given).parameters():
            nn.init.uniform_(parameter)
    return tiny


def test_round_trip(tmp_path: Path) -> None:
    """Only the cure is in the files; they may lie next to those of `save_pretrained`."""
    tiny, other = cured(padding="counted"), build("bert")
    plain, output, folder = other.output(), tiny.output(), tmp_path / "new" / "folder"
    assert (output - plain).abs().max() > 1e-2
    assert uc.save_cure(tiny.model, folder) == folder
    assert sorted(path.name for path in folder.iterdir()) == ["uncollapse.json", "uncollapse.safetensors"]
    tensors = {key: tuple(tensor.shape) for key, tensor in load_file(folder / "uncollapse.safetensors").items()}
    scales = {f"0/block {n} {at}/scale_param" for at in ("attention.residual", "mlp.norm") for n in (1, 2)}
    assert scales < tensors.keys()
    assert list(tensors.values()) == [(16,)] * 6
    handles = uc.load_cure(other.model, folder)
    assert torch.equal(other.output(), output)
    assert [str(h) for h in handles] == [str(h) for h in uc.attachments(tiny.model)]
    for handle in handles:
        handle.remove()
    assert torch.equal(other.output(), plain)
    tiny.model.save_pretrained(folder)
    again = Tiny(transformers.BertModel.from_pretrained(folder).eval(), tiny.batch)
    assert not torch.equal(again.output(), output)
    uc.load_cure(again.model, folder)
    assert torch.equal(again.output(), output)


def test_loaded_with_the_model_that_it_lies_next_to(tmp_path: Path) -> None:
    """The command diagnoses a folder as it was saved: with its cure."""
    tiny = cured()
    tiny.model.save_pretrained(tmp_path)
    uc.save_cure(tiny.model, tmp_path)
    loaded = load_model(str(tmp_path), load_cure=uc.load_cure).model.eval()
    assert torch.equal(Tiny(loaded, tiny.batch).output(), tiny.output())
    random = load_model(str(tmp_path), random_weights=True, load_cure=uc.load_cure).model
    scales = uc.attachments(random)[0].parameters()
    assert len(scales) == 4
    assert all(bool((scale == 0.5).all()) for scale in scales)
    (tmp_path / "uncollapse.safetensors").unlink()
    with pytest.raises(UsageError, match="cure"):
        load_model(str(tmp_path), load_cure=uc.load_cure)


def test_named_modules_in_a_part_of_the_model(tmp_path: Path) -> None:
    tiny, other = build("mlp"), build("mlp")
    whole, same = nn.ModuleDict({"inner": tiny.model}), nn.ModuleDict({"inner": other.model})
    uc.attach(whole["inner"], "contra_norm", **SCALES, layers=-1, layout="tokens", **tiny.where)
    uc.save_cure(whole, tmp_path)
    assert json.loads((tmp_path / "uncollapse.json").read_text())["cures"][0]["root"] == "inner"
    uc.load_cure(same, tmp_path)
    assert (tiny.output() - build("mlp").output()).abs().max() > 1e-3
    assert torch.equal(other.output(), tiny.output())


def bert(**sizes: Any) -> Any:
    return transformers.BertModel(transformers.BertConfig(**{**TEXT, **sizes}))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: bert(num_hidden_layers=4), "3 blocks.*4"),
        (lambda: transformers.RobertaModel(transformers.RobertaConfig(**TEXT)), "RobertaModel"),
        (lambda: bert(hidden_size=24), r"scale_param.*\(16,\).*\(24,\)"),
        (lambda: nn.Linear(2, 2), "known"),
    ],
)
def test_wrong_model(tmp_path: Path, other: Any, words: str) -> None:
    uc.save_cure(cured().model, tmp_path)
    wrong = other()
    keys = list(wrong.state_dict())
    with pytest.raises(ValueError, match=words):
        uc.load_cure(wrong, tmp_path)
    assert list(wrong.state_dict()) == keys
    assert_clean(wrong)


def test_what_cannot_be_saved_or_loaded(tmp_path: Path) -> None:
    model = build("bert").model
    with pytest.raises(ValueError, match="no cure"):
        uc.save_cure(model, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"uncollapse\.json"):
        uc.load_cure(model, tmp_path)
    uc.attach(model, "contra_norm", scale=0.5)
    uc.save_cure(model, tmp_path)
    with pytest.raises(ValueError, match="already"):
        uc.load_cure(model, tmp_path)


@pytest.mark.parametrize("step", range(3))
def test_a_save_that_stops_leaves_the_cure_before_it_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """It stops before the weights, the description, or the weights get their name."""
    old, new, loaded, rename, done = *(build("bert").model for _ in range(3)), os.replace, 0
    for model, scale in ((old, 0.5), (new, 0.25)):
        uc.attach(model, "contra_norm", scale=scale, learnable=True)
    uc.save_cure(old, tmp_path)

    def stop(*names: Path) -> None:
        nonlocal done
        if done == step:
            raise KeyboardInterrupt
        done += 1
        rename(*names)

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        uc.save_cure(new, tmp_path)
    monkeypatch.undo()
    (found,) = uc.load_cure(loaded, tmp_path)
    assert {float(scale.detach().mean()) for scale in found.parameters()} == {0.5 if step < 2 else 0.25}
    uc.save_cure(new, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["uncollapse.json", "uncollapse.safetensors"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[:-20], "describe"),
        (lambda text: "[]", "describe"),
        (lambda text: text.replace('"schema": 1', '"schema": 9'), "schema 9"),
        (lambda text: text.replace('"sha256": "', '"sha256": "0'), "replaced"),
    ],
)
def test_broken_files(tmp_path: Path, change: Any, words: str) -> None:
    uc.save_cure(cured().model, tmp_path)
    model, path = build("bert").model, tmp_path / "uncollapse.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=words):
        uc.load_cure(model, tmp_path)
    assert not uc.attachments(model)
