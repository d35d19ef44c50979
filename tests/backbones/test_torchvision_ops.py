import os
import subprocess
import sys

import pytest

pytest.importorskip("torchvision")
pytest.importorskip("transformers")
pytest.importorskip("timm")

AFTER = """
import sys
from uncollapse.backbones import torchvision_ops
assert "torchvision" not in sys.modules, "heavy import before it is needed"
torchvision_ops.declare()
torchvision_ops.declare()
import torchvision
import timm
from transformers import ViTConfig, ViTModel
torchvision_ops.declare()
sizes = dict(hidden_size=8, num_attention_heads=1, intermediate_size=8, image_size=8, patch_size=4)
print(type(ViTModel(ViTConfig(num_hidden_layers=1, **sizes))).__name__, timm.__name__)
"""


def test_vision_models_can_be_imported_after_it() -> None:
    run = subprocess.run(
        [sys.executable, "-c", AFTER], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["ViTModel", "timm"]


def test_nothing_happens_without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    from uncollapse.backbones import torchvision_ops

    monkeypatch.setattr(torchvision_ops, "_library", None)
    monkeypatch.setattr(torchvision_ops, "find_spec", lambda name: None)
    torchvision_ops.declare()
    assert torchvision_ops._library is None


def test_nothing_happens_where_it_loads() -> None:
    from uncollapse.backbones import torchvision_ops

    torchvision_ops.declare()
    assert torchvision_ops._loads()  # now it does, so that a further call declares nothing
