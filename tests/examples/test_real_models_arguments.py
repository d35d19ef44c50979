"""The example with real models says what it needs before it loads anything."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("timm")

EXAMPLE = Path(__file__).parents[2] / "examples" / "real_models.py"


@pytest.mark.slow
def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--data", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no folder" in done.stderr
