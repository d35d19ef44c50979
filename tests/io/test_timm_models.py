"""Models of timm by name, with images."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from uncollapse.diagnosis.result import Diagnosis
from uncollapse.io import images
from uncollapse.io.models import load_model

timm = pytest.importorskip("timm")

Run = Callable[..., Result]


def test_crops_of_photographs_without_data(run: Run) -> None:
    result = run("diagnose", "timm:test_vit", "--random-weights", "--json", "--no-baseline", "--batch-size", 16)
    assert result.exit_code == 0, result.stderr
    name = "test_vit (random weights)"
    assert result.stderr == f"No data was given, so {name} reads 64 crops of scikit-learn's two photographs.\n"
    found = Diagnosis.from_json(result.stdout)
    assert (found.model, found.family, found.sequences, found.batches) == (name, "timm", 64, 4)


def test_crops_differ_and_are_square() -> None:
    crops = images.built_in_crops()
    assert {crop.size for crop in crops} == {(224, 224)}
    assert len({crop.tobytes() for crop in crops}) == len(crops) == 64


def test_images_of_a_folder(run: Run, pictures: Path) -> None:
    result = run("diagnose", "timm:test_vit", "--random-weights", "--images", pictures, "--json", "--no-baseline")
    assert Diagnosis.from_json(result.stdout).sequences == 6
    assert "broken.png" in result.stderr


def test_only_broken_images(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    result = run("diagnose", "timm:test_vit", "--random-weights", "--images", tmp_path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "None of the 1 image files can be read" in result.stderr


def test_a_checkpoint_is_read_back(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(3)
    model = timm.create_model("test_vit")
    save_file(model.state_dict(), tmp_path / "vit.safetensors")
    loaded = load_model("timm:test_vit", checkpoint=tmp_path / "vit.safetensors")
    assert loaded.name == "test_vit"
    assert all(torch.equal(a, b) for a, b in zip(loaded.model.parameters(), model.parameters(), strict=True))


def test_what_cannot_be_loaded(run: Run) -> None:
    cases = {
        "vit_tiny_patch16_244": "Did you mean",
        "deit_small": "mean 'deit_small_patch16_224'?",
        "test_vit": "cannot be downloaded",
        "test_vit.none": "none",
    }
    for name, words in cases.items():
        result = run("diagnose", f"timm:{name}")
        assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
        assert words in result.stderr
