"""The example on images runs, on digits and on a folder of images."""

import runpy
import sys
from pathlib import Path

import pytest
from tests.lab.data.image.made_up_images import folder

from uncollapse.backbones import torchvision_ops

torchvision_ops.declare()
pytest.importorskip("timm")
EXAMPLE = Path(__file__).parents[2] / "examples" / "vision.py"


@pytest.mark.parametrize("given", [False, True])
def test_it_prints_the_similarity_by_block(
    given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = [str(folder(tmp_path, each=8))] if given else []
    monkeypatch.setattr(sys, "argv", ["vision.py", *place])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    rows = {line.split("│")[1].strip(): line.split("│")[2:5] for line in printed.splitlines() if "│" in line}
    assert list(rows) == ["embed", *(f"block {number}" for number in range(6)), "final"]
    plain, cured, both = map(float, rows["final"])
    if given:  # images of one color, whose patches are all alike
        assert min(plain, cured, both) > 0.9
    else:
        assert max(cured, both) < plain
