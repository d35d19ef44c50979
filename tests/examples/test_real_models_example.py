"""The example on real models says which folder or file is missing, without a traceback."""

import sys
from pathlib import Path
from typing import Any

import pytest

from uncollapse.backbones import torchvision_ops

torchvision_ops.declare()
pytest.importorskip("timm")
sys.path.append(str(Path(__file__).parents[2] / "examples"))

import real_models  # noqa: E402


def test_a_missing_file_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def minilm(data: Path, save: Any, out: Path) -> None:
        real_models.paragraphs(data, 1)

    monkeypatch.setattr(real_models, "SUBJECTS", {"minilm": minilm})
    monkeypatch.setattr(sys, "argv", ["real_models.py", "--data", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"minilm: .*valid\.txt'\. --help lists the files"):
        real_models.main()


def test_a_missing_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["real_models.py", "--data", str(tmp_path / "none")])
    with pytest.raises(SystemExit):
        real_models.main()
    assert "there is no folder" in capsys.readouterr().err
