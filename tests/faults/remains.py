"""What is on the disk after a fault: whether it is whole, and what it says apart from times."""

import json
import runpy
from pathlib import Path
from typing import Any

import safetensors.torch

import uncollapse as uc
from uncollapse.lab.engine.checkpoints import STATE, read_files

TIMES = ("seconds", "date", "created", "pace", "state")  # differ from run to run; the monitor's state has its seconds


def check_whole(folder: Path) -> None:
    """Every file that has its name is complete: it can be read to its end, and checksums are right."""
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or not path.is_file():
            continue
        content = path.read_bytes()
        match path.suffix:
            case ".json":
                json.loads(content)
            case ".html":
                assert content.rstrip().endswith(b"</html>"), path
            case ".md":
                assert content.endswith(b"\n"), path
            case ".safetensors":
                safetensors.torch.load(content)
    for state in folder.rglob(f"step-*/{STATE}"):
        if not any(part.startswith(".") for part in state.relative_to(folder).parts):
            facts = json.loads(state.read_text())
            read_files(state.parent, facts["step"], facts["identity"])
    if (folder / "out" / "uncollapse.json").exists():
        uc.load_cure(runpy.run_path(str(folder / "models.py"))["encoder"](), folder / "out")


def said(folder: Path) -> dict[str, Any]:
    """What all JSON and Markdown files of a finished command say, apart from times."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".json":
            found[name] = _lasting(json.loads(path.read_text(encoding="utf-8")))
        elif path.suffix == ".jsonl":
            found[name] = [_lasting(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
        elif path.suffix in (".md", ".html", ".safetensors"):
            found[name] = path.suffix if path.suffix == ".html" else path.read_bytes()
    return found


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lasting(item) for key, item in value.items() if key not in TIMES}
    return [_lasting(item) for item in value] if isinstance(value, list) else value
