"""Kept encoders of contrast, circle and moco come back as they were."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from uncollapse.errors import UsageError
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.contrastive import circle
from uncollapse.lab.experiments.contrastive import config as contrastive
from uncollapse.lab.experiments.contrastive.config import ContrastConfig
from uncollapse.lab.experiments.depth_probe.config import load_encoder
from uncollapse.lab.experiments.moco import config as momentum
from uncollapse.lab.experiments.moco.config import MomentumConfig
from uncollapse.lab.runs import saved_models

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
SIZES: dict[str, Any] = {"width": 0.03, "side": 16, "seed": 3}
CONTRAST = ContrastConfig(dim=5, falls=(0.5,), **SIZES)
MOCO = MomentumConfig(encoder="small_alexnet", dim=5, mlp=True, **SIZES)
RESNET = MomentumConfig(encoder="resnet18", dim=5, stem="cifar")


def kept(folder: Path, config: Any) -> Any:
    encoder: Any = (
        momentum.build_encoder(config) if isinstance(config, MomentumConfig) else contrastive.build_encoder(config)
    )
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter += 0.01
    saved_models.save_weights(Runtime(save_to=folder), encoder, config)
    return encoder.eval()


@pytest.mark.parametrize("config", [CONTRAST, MOCO, RESNET], ids=["contrast", "moco", "resnet"])
def test_it_comes_back(tmp_path: Path, config: Any) -> None:
    encoder = kept(tmp_path / "model", config)
    state = torch.get_rng_state()
    found = load_encoder(tmp_path / "model")
    assert torch.equal(torch.get_rng_state(), state)
    assert (found.config.side, found.config.falls) == (config.side, config.falls)
    assert not found.encoder.training
    with torch.no_grad():
        assert torch.equal(found.encoder(IMAGES), encoder(IMAGES))


def test_a_supervised_circle_has_a_head_too(tmp_path: Path) -> None:
    config = circle.Config(learned="supervised", **SIZES)
    encoder = contrastive.build_encoder(config)
    encoder.add_module("head", torch.nn.Linear(2, 7))
    saved_models.save_weights(Runtime(save_to=tmp_path / "model"), encoder.eval(), config)
    with torch.no_grad():
        assert torch.equal(load_encoder(tmp_path / "model").encoder(IMAGES), encoder(IMAGES))


def test_other_folders_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="saved model"):
        load_encoder(tmp_path)
    kept(tmp_path / "model", CONTRAST)
    path = tmp_path / "model" / "config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"dim": 6}))
    with pytest.raises(UsageError, match="SmallAlexNet"):
        load_encoder(tmp_path / "model")
    path.write_text(json.dumps(settings | {"dim": "many"}))
    with pytest.raises(UsageError, match="whole number"):
        load_encoder(tmp_path / "model")
    path.write_text("[]")
    with pytest.raises(UsageError, match="JSON object"):
        load_encoder(tmp_path / "model")
    path.write_text("{}")
    with pytest.raises(UsageError, match="another kind"):
        load_encoder(tmp_path / "model")
    path.write_text(json.dumps(settings))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UsageError, match=r"model\.safetensors"):
        load_encoder(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="model"):
        load_encoder(tmp_path / "model")
