from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from uncollapse.cli.app import app

MODELS = """
import torch
from torch import nn


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)


class Unknown(nn.Module):
    def __init__(self, gain=1.0):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.gain = gain

    def forward(self, x):
        for part in self.parts:
            x = self.gain * part(x)
        return x


def unknown():
    return Unknown()


def collapsed():
    return Unknown(gain=0.0)


def no_model():
    return "model"


def broken():
    raise RuntimeError("the builder\\nbroke")


def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 12, 16, generator=generator) for _ in range(3)]


def narrow_batches():
    return [torch.randn(2, 5, 8)]


def endless():
    while True:
        yield torch.zeros(1, 4, 16).normal_()


def one():
    return 1
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run the command in an empty folder that has models.py."""
    (tmp_path / "models.py").write_text(MODELS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def invoke(*arguments: object, stdin: str | None = None) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)

    return invoke
