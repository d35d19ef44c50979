"""Where a vision transformer begins: at random, with published weights, with a kept model, with a file."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.lab.experiments.vit.tiny_vision import CLASSES, images, timm, tiny_config, tiny_vit
from torch import nn

import uncollapse as uc
from uncollapse.errors import UsageError
from uncollapse.io import timm_models
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.vit import config as vision
from uncollapse.lab.experiments.vit.config import Config
from uncollapse.lab.runs import saved_models

CURED: dict[str, Any] = {"cure": "contra_norm", "scale": 0.3, "learnable": True}


def kept(folder: Path, **changes: Any) -> Path:
    """A model with weights of its own in a folder, as a run leaves it."""
    config = tiny_config(**changes)
    vit: Any = vision.build(config, len(CLASSES)).vit
    for number, parameter in enumerate(vit.parameters()):
        generator = torch.Generator().manual_seed(number)
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    saved_models.save_vision_model(Runtime(save_to=folder), vit, config, CLASSES)
    return folder


def begun(start: Path | str, classes: int = len(CLASSES), **changes: Any) -> Any:
    return vision.build(tiny_config(start=str(start), **changes), classes).vit.eval()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def same(model: nn.Module, weights: dict[str, torch.Tensor]) -> bool:
    own = {name: tensor for name, tensor in model.state_dict().items() if "uncollapse" not in name}
    return own.keys() == weights.keys() and all(torch.equal(own[name], weights[name]) for name in own)


def test_a_head_of_other_classes_begins_anew(tmp_path: Path) -> None:
    folder = kept(tmp_path / "model")
    config = tiny_config(start=str(folder))
    assert same(vision.build(config, len(CLASSES), tuple(CLASSES)).vit, tensors(folder))
    with pytest.warns(UserWarning, match="other classes"):
        model = vision.build(config, len(CLASSES), tuple(reversed(CLASSES))).vit
    assert not torch.equal(model.head.weight, tensors(folder)["head.weight"])
    assert torch.equal(model.norm.weight, tensors(folder)["norm.weight"])


def test_a_kept_model_goes_on_with_a_cure(tmp_path: Path) -> None:
    """The fine-tuning path: a vanilla checkpoint, ContraNorm added."""
    folder = kept(tmp_path / "model")
    plain, cured = begun(folder), begun(folder, **CURED)
    assert same(plain, tensors(folder))
    assert same(cured, tensors(folder))
    assert [attachment.cure for attachment in uc.attachments(cured)] == ["contra_norm"]
    assert not uc.attachments(plain)
    with torch.no_grad():
        assert torch.equal(plain(images()), saved_models.load_vision_model(folder)[0](images()))
        assert not torch.equal(plain(images()), cured(images()))


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_file_of_weights(tmp_path: Path, suffix: str, prefix: str) -> None:
    vit, path = tiny_vit(), tmp_path / f"vit{suffix}"
    weights = {prefix + name: tensor for name, tensor in vit.state_dict().items()}
    if suffix == ".pth":
        torch.save({"state_dict": weights, "epoch": 3}, path)
    else:
        safetensors.torch.save_file(weights, path)
    assert same(begun(path), vit.state_dict())


def test_a_cure_goes_on_with_what_it_learned(tmp_path: Path) -> None:
    folder = kept(tmp_path / "model", **CURED)
    before, after = saved_models.load_vision_model(folder)[0], begun(folder, **CURED)
    with torch.no_grad():
        assert torch.equal(before(images()), after(images()))
        assert not torch.equal(after(images()), begun(kept(tmp_path / "plain"), **CURED)(images()))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cure": "none"}, r"cure contra_norm, scale 0\.3, learnable True"),
        (CURED | {"scale": 0.2}, r"it was scale 0\.3\."),
        ({"cure": "feat_scale"}, "cure contra_norm"),
    ],
)
def test_another_cure_than_the_kept_one(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    folder = kept(tmp_path / "model", **CURED)
    with pytest.raises(UsageError, match=words):
        begun(folder, **changes)


def test_a_damaged_cure_is_a_sentence(tmp_path: Path) -> None:
    folder = kept(tmp_path / "model", **CURED)
    (folder / "uncollapse.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match="replaced"):
        begun(folder, **CURED)
    (folder / "settings.json").unlink()
    with pytest.raises(UsageError, match=r"settings\.json"):
        begun(folder, **CURED)


def test_other_sizes_of_images_and_patches_are_resized_as_timm_does(tmp_path: Path) -> None:
    folder = kept(tmp_path / "model")
    larger = begun(folder, image=48)
    expected = timm.create_model(f"local-dir:{folder}", pretrained=True, img_size=48)
    assert same(larger, expected.state_dict())
    assert larger.pos_embed.shape == (1, 37, 24)
    finer = begun(folder, patch=4)
    assert finer.patch_embed.proj.weight.shape == (24, 3, 4, 4)
    assert finer.pos_embed.shape == (1, 65, 24)
    assert torch.equal(finer.blocks[0].attn.qkv.weight, tensors(folder)["blocks.0.attn.qkv.weight"])


def test_a_head_of_another_number_of_classes_begins_anew(tmp_path: Path) -> None:
    folder = kept(tmp_path / "model")
    with pytest.warns(UserWarning, match="than 3"):
        vit = begun(folder, classes=3, init="timm", seed=4)
    drawn = vision.build(tiny_config(init="timm", seed=4), 3).vit
    assert torch.equal(vit.head.weight, drawn.head.weight)
    assert torch.equal(vit.norm.weight, tensors(folder)["norm.weight"])


def test_talking_heads_begin_as_the_model_without_them(tmp_path: Path) -> None:
    folder = kept(tmp_path / "model")
    vit = begun(folder, talking_heads=True)
    torch.testing.assert_close(vit(images()), saved_models.load_vision_model(folder)[0](images()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"depth": 4}, "--depth 2"),
        ({"depth": 1}, "--depth 2"),
        ({"heads": 4}, "--heads 3"),
        ({"width": 48}, "--width"),
        ({"model": "deit_tiny_distilled_patch16_224"}, "dist_token"),
        ({"model": "deit3_small_patch16_224"}, r"blocks\.0\.ls1\.gamma, .* and 1 more"),
    ],
)
def test_what_does_not_fit_is_told(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    folder = kept(tmp_path / "model")
    with pytest.raises(UsageError, match=words):
        begun(folder, **changes)


def test_a_kept_model_with_talking_heads_needs_them(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="head"):
        folder = kept(tmp_path / "model", talking_heads=True)
    assert same(begun(folder, talking_heads=True), tensors(folder))
    with pytest.raises(UsageError, match=r"blocks\.0\.attn\.after\.weight"):
        begun(folder)


def test_places_without_weights_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pth").write_text("no weights")
    cases = {
        "nowhere": "nowhere",
        tmp_path / "empty": "safetensors",
        tmp_path / "text.pth": "text.pth",
    }
    for start, words in cases.items():
        with pytest.raises(UsageError, match=words):
            begun(start)


def test_weights_that_could_run_code_are_not_loaded(tmp_path: Path) -> None:
    torch.save(tiny_vit(), tmp_path / "model.pth")  # a whole pickled module
    with pytest.raises(UsageError, match="code"):
        begun(tmp_path / "model.pth")


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """timm's smallest transformer, with weights in the place of those on the hub."""
    model = timm.create_model("test_vit")
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    file = tmp_path / "published.safetensors"
    safetensors.torch.save_file(model.state_dict(), file)
    overlay = {"pretrained_cfg_overlay": {"file": str(file)}}
    monkeypatch.setattr(timm_models, "_weight_options", lambda timm, name, way_out: overlay)
    return model, overlay


def test_published_weights_as_timm_loads_them(published: Any) -> None:
    config = Config(model="test_vit", start="pretrained", cure="none", drop_path=0.0)
    assert same(vision.build(config, 1000).vit, published[0].state_dict())
    sizes = Config(model="test_vit", start="pretrained", cure="none", image=96, drop_path=0.0)
    with pytest.warns(UserWarning, match="than 10"):
        found = vision.build(sizes, 10).vit
    expected = timm.create_model("test_vit", pretrained=True, num_classes=10, img_size=96, **published[1])
    for name, tensor in expected.state_dict().items():
        assert name.startswith("head.") or torch.equal(found.state_dict()[name], tensor)
    with pytest.raises(UsageError, match="--depth 6"):
        vision.build(Config(model="test_vit", start="pretrained", depth=3), 10)
    with pytest.raises(UsageError, match="--heads 2"):
        vision.build(Config(model="test_vit", start="pretrained", heads=4), 10)


def test_no_published_weights_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *place: None)
    with pytest.raises(UsageError, match="--start scratch"):
        vision.build(Config(model="test_vit", start="pretrained"), 10)


def test_a_folder_that_timm_wrote_is_a_start_too(tmp_path: Path) -> None:
    vit = tiny_vit()
    timm.models.save_for_hf(vit, tmp_path / "hub", safe_serialization=True)
    assert same(begun(tmp_path / "hub"), vit.state_dict())


def test_the_start_is_drawn_the_same_with_and_without_other_weights(tmp_path: Path) -> None:
    """Nothing of the run's own random numbers depends on where it begins."""
    folder = kept(tmp_path / "model")
    heads = [vision.build(tiny_config(start=s, mixing_loss=1.0, cutmix=1.0), 5) for s in ("scratch", str(folder))]
    first, second = (model.patch_head.state_dict() for model in heads if model.patch_head is not None)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_cure_saved_before_pre_norm_existed_is_the_one_without_it(tmp_path: Path) -> None:
    folder = kept(tmp_path / "model", **CURED)
    settings = json.loads((folder / "settings.json").read_text())
    del settings["pre_norm"]
    (folder / "settings.json").write_text(json.dumps(settings))
    begun(folder, **CURED)
    with pytest.raises(UsageError, match="pre_norm False"):
        begun(folder, **CURED, pre_norm=True)


def test_settings_of_an_older_version_are_another_cure(tmp_path: Path) -> None:
    folder = kept(tmp_path / "model", **CURED)
    settings = json.loads((folder / "settings.json").read_text())
    del settings["average"]
    (folder / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(UsageError, match="average None"):
        begun(folder, **CURED)
