"""Run the Python of Markdown pages and of notebooks with what is installed. This file is run alone, outside the source.

    python snippets.py PLACE PLAIN FILE...

PLACE is the folder that the package must come from. PLAIN is 1 where no optional library is installed: what needs one
is left out. The pieces of a file share their names, as a reader runs them, in the folder that this is started in.
"""

import importlib.util
import re
import sys
from pathlib import Path

import torch

import uncollapse
from uncollapse.backbones import torchvision_ops

BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.M | re.S)
IMPORT = re.compile(r"^\s*(?:from|import) (\w+)", flags=re.M)
REPORT = ".report("  # needs plotly


def pieces(path: Path) -> list[str]:
    """The snippets of a page; a notebook is one piece."""
    text = path.read_text(encoding="utf-8")
    return BLOCK.findall(text) if path.suffix == ".md" else [text]


def is_plain(source: str) -> bool:
    """Whether it runs with nothing but what every installation has."""
    return REPORT not in source and all(importlib.util.find_spec(name) for name in IMPORT.findall(source))


def main(place: str, plain: str, *files: str) -> None:
    """Run all; an error ends it."""
    home = Path(uncollapse.__file__).resolve()
    if not home.is_relative_to(Path(place).resolve()):
        sys.exit(f"uncollapse comes from {home}, not from {place}.")
    torchvision_ops.declare()
    if importlib.util.find_spec("matplotlib"):
        import matplotlib

        matplotlib.use("Agg")
    for path in map(Path, files):
        names: dict[str, object] = {"__name__": "__main__"}
        for number, source in enumerate(pieces(path), 1):
            if plain == "1" and not is_plain(source):
                print(f"{path.name} {number}: left out, it needs an extra", flush=True)
                continue
            torch.manual_seed(0)
            exec(compile(source, f"{path.name}-{number}", "exec"), names)
            print(f"{path.name} {number}: runs", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
