"""Folders that timm loads, as `uncollapse train vit --save` writes them."""

from pathlib import Path
from typing import Any

import pytest
import torch

import uncollapse as uc
from uncollapse.errors import UsageError
from uncollapse.io import models
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.vit import config as vision
from uncollapse.lab.experiments.vit.config import Config
from uncollapse.lab.runs import saved_models

CLASSES = ("ant", "bee", "cat")
TINY: dict[str, Any] = {"width": 24, "heads": 2, "depth": 2, "image": 16, "patch": 8}


def save(folder: Path, **changes: Any) -> Any:
    config = Config(seed=5, **TINY, **changes)
    vit = vision.build(config, len(CLASSES)).vit.eval()
    saved_models.save_vision_model(Runtime(save_to=folder), vit, config, CLASSES)
    return vit


@pytest.mark.parametrize("cure", ["none", "contra_norm", "attn_scale"])
def test_a_saved_model_comes_back_with_its_cure(tmp_path: Path, cure: str) -> None:
    vit = save(tmp_path / "saved", cure=cure)
    loaded = models.load_model(str(tmp_path / "saved"), load_cure=uc.load_cure)
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(loaded.model.eval()(images), vit(images))
    assert [attachment.cure for attachment in uc.attachments(loaded.model)] == ([] if cure == "none" else [cure])
    random = models.load_model(str(tmp_path / "saved"), random_weights=True, load_cure=uc.load_cure)
    assert not torch.equal(random.model.eval()(images), vit(images))
    if cure != "none":
        with pytest.raises(UsageError, match="load_cure"):
            models.load_model(str(tmp_path / "saved"))


def test_what_timm_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="part"):
        save(tmp_path / "saved", cure="none", talking_heads=True)
    with pytest.raises(UsageError, match="load"):
        models.load_model(str(tmp_path / "saved"), load_cure=uc.load_cure)
