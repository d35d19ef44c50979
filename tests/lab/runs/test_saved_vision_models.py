"""Kept vision transformers: timm alone loads them, and with their cure they come back as they were."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.lab.experiments.vit.tiny_vision import CLASSES, images, timm, tiny_config

import uncollapse as uc
from uncollapse.errors import UsageError
from uncollapse.lab.data.image.augmentation import InputSpec, evaluation_transform
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.vit import config as vision
from uncollapse.lab.experiments.vit.config import Config
from uncollapse.lab.experiments.vit.patch_losses import PatchLosses
from uncollapse.lab.runs import saved_models

DISTILLED = "deit_tiny_distilled_patch16_224"


def trained_vision(config: Config) -> torch.nn.Module:
    """A transformer after two steps with whatever losses the settings have; its head of patches is left behind."""
    model = vision.build(config, len(CLASSES)).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    weights = {"cosine": config.cosine_loss, "contrast": config.contrast_loss, "mixing": config.mixing_loss}
    patches = torch.full((4, 16, len(CLASSES)), 1 / len(CLASSES))
    with PatchLosses(model.vit, weights, form=config.contrast_form).open() as losses:
        for _ in range(2):
            loss = torch.nn.functional.cross_entropy(model(images()), torch.arange(4))
            (loss + losses(model.patch_head, patches)).backward()
            optimiser.step()
    vit: torch.nn.Module = model.vit.eval()
    return vit


ALL_LOSSES = {"cosine_loss": 1.0, "contrast_loss": 1.0, "mixing_loss": 1.0, "cutmix": 1.0, "drop_path": 0.3}


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", DISTILLED, "vit_little_patch16_reg4_gap_256"])
@pytest.mark.parametrize("form", ["paper", "released"])
def test_an_exported_transformer_is_timms_own(tmp_path: Path, name: str, form: str) -> None:
    """After training with DiversePatch's losses timm alone loads the folder, and computes exactly the same."""
    config = tiny_config(model=name, contrast_form=form, crop="padded", **ALL_LOSSES)
    vit = trained_vision(config)
    saved_models.save_vision_model(Runtime(save_to=tmp_path / "model"), vit, config, CLASSES)
    plain = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True).eval()
    assert set(safetensors.torch.load_file(tmp_path / "model" / "model.safetensors")) == set(plain.state_dict())
    with torch.no_grad():
        assert torch.equal(plain(images()), vit(images()))
        again, classes = saved_models.load_vision_model(tmp_path / "model")
        assert torch.equal(again(images()), vit(images()))
    assert classes == CLASSES
    assert tuple(plain.pretrained_cfg["label_names"]) == CLASSES
    settings = json.loads((tmp_path / "model" / "settings.json").read_text())
    assert Config(**settings) == config
    drops = [module.drop_prob for module in plain.modules() if type(module).__name__ == "DropPath"]
    assert not any(drops)


@pytest.mark.parametrize("crop", ["padded", "resized"])
def test_timm_prepares_pictures_as_they_were_judged(tmp_path: Path, crop: str) -> None:
    from PIL import Image

    config = tiny_config(model="vit_tiny_patch16_224", crop=crop)
    vit: Any = vision.build(config, len(CLASSES)).vit
    saved_models.save_vision_model(Runtime(save_to=tmp_path / "model"), vit, config, CLASSES)
    plain = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True)
    facts = timm.data.resolve_model_data_config(plain)
    picture = Image.effect_noise((50, 40), 80).convert("RGB")
    judged: Any = evaluation_transform(InputSpec(32, vit.pretrained_cfg["mean"], vit.pretrained_cfg["std"]), crop=crop)
    assert torch.equal(timm.data.create_transform(**facts)(picture), judged(picture))
    again = saved_models.load_vision_model(tmp_path / "model")[0]
    found = timm.data.resolve_model_data_config(again)
    assert {**found, "input_size": list(found["input_size"])} == {**facts, "input_size": list(facts["input_size"])}


@pytest.mark.parametrize("cure", ["contra_norm", "feat_scale", "attn_scale"])
def test_a_transformer_comes_back_with_its_cure(tmp_path: Path, cure: str) -> None:
    config = tiny_config(cure=cure, scale=0.5, learnable=cure == "contra_norm")
    vit = trained_vision(config)
    saved_models.save_vision_model(Runtime(save_to=tmp_path / "model"), vit, config, CLASSES)
    plain = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True).eval()
    state = torch.get_rng_state()
    again, _ = saved_models.load_vision_model(tmp_path / "model")
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        expected = vit(images())
        assert torch.equal(again(images()), expected)
        assert not torch.equal(plain(images()), expected)
        uc.load_cure(plain, tmp_path / "model")
        assert torch.equal(plain(images()), expected)
    assert not again.training


def test_talking_heads_come_back_with_load_vision_alone(tmp_path: Path) -> None:
    config = tiny_config(talking_heads=True)
    vit = trained_vision(config)
    with pytest.warns(UserWarning, match="talking heads"):
        saved_models.save_vision_model(Runtime(save_to=tmp_path / "model"), vit, config, CLASSES)
    with torch.no_grad():
        assert torch.equal(saved_models.load_vision_model(tmp_path / "model")[0](images()), vit(images()))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True)


def test_a_folder_of_another_kind_is_no_transformer(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"settings\.json"):
        saved_models.load_vision_model(tmp_path)
    for name in ("settings.json", "config.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(UsageError, match="vision transformer"):
        saved_models.load_vision_model(tmp_path)
    saved_models.save_vision_model(Runtime(), None, None, CLASSES)  # nothing is kept unasked


def test_a_damaged_transformer_is_one_sentence(tmp_path: Path) -> None:
    config, folder = tiny_config(cure="contra_norm"), tmp_path / "model"
    saved_models.save_vision_model(Runtime(save_to=folder), vision.build(config, len(CLASSES)).vit, config, CLASSES)
    (folder / "uncollapse.json").write_text("{}")
    with pytest.raises(UsageError, match=r"cure.*loaded"):
        saved_models.load_vision_model(folder)
    (folder / "model.safetensors").write_bytes(b"half")
    with pytest.raises(UsageError, match=r"model\.safetensors"):
        saved_models.load_vision_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"model\.safetensors"):
        saved_models.load_vision_model(folder)
