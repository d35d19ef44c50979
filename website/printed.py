"""What the Python code of a page prints, shown below it: run once, stored in results/printed.json.

A comment `<!-- printed -->` on a page stands for what the block of code above it printed. The blocks of a page are run
in their order and share their names, as a reader would run them. To run them again after a change:

    python -m website.printed            # all pages
    python -m website.printed pyg.md     # one
"""

import contextlib
import io
import json
import os
import re
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

DOCS = Path(__file__).parents[1] / "docs"
RESULT = DOCS.parent / "results" / "printed.json"
CODE = re.compile(r"^```python\n(.*?)^```\n(?:\n<!-- (printed) -->)?", flags=re.M | re.S)
MARK = "<!-- printed -->"
LIBRARIES = ("torch", "transformers", "timm", "torch_geometric", "lightning")


class Terminal(io.StringIO):
    """What a page shows is what a terminal of 80 columns shows: tables leave out what does not fit."""

    def isatty(self) -> bool:
        """Return True."""
        return True


def blocks(markdown: str) -> list[str]:
    """The Python blocks of a page, in their order."""
    return [found[1] for found in CODE.finditer(markdown)]


def run(sources: list[str], name: str) -> list[str]:
    """Run the blocks of a page in the current folder; what each of them printed."""
    import torch

    torch.manual_seed(0)
    known: dict[str, Any] = {"__name__": "__main__"}
    told = []
    for number, source in enumerate(sources, 1):
        with mock.patch.dict(os.environ, COLUMNS="80"), contextlib.redirect_stdout(Terminal()) as out:
            exec(compile(source, f"{name}, block {number}", "exec"), known)
        told.append(out.getvalue())
    return told


def fill(markdown: str, page: str) -> str:
    """Put what was printed in the place of each mark. Code that was changed since it was run fails the build."""
    if MARK not in markdown:
        return markdown
    kept = json.loads(RESULT.read_text(encoding="utf-8"))["pages"].get(page, {"source": [], "printed": []})
    if kept["source"] != blocks(markdown):
        raise ValueError(f"The code of {page} was changed since it was run: python -m website.printed {page}")
    told = iter(kept["printed"])

    def shown(found: re.Match[str]) -> str:
        printed = next(told)
        kind = "table" if "──" in printed else "prose"  # a table is scrolled, a long sentence is broken
        block = f"{{.printed .{kind}}}\n```text\n{printed.rstrip()}\n```"
        return found[0].replace(MARK, block) if found[2] else found[0]

    return CODE.sub(shown, markdown)


def main(names: list[str]) -> None:
    """Run the pages that show what is printed, and keep it."""
    from uncollapse.backbones import torchvision_ops
    from uncollapse.io import files

    torchvision_ops.declare()
    pages = {page.name: page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md"))}
    kept = json.loads(RESULT.read_text(encoding="utf-8"))["pages"] if RESULT.exists() else {}
    for name in [Path(name).name for name in names] or [name for name, text in pages.items() if MARK in text]:
        source = blocks(pages[name])
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            kept[name] = {"source": source, "printed": run(source, name)}
        print(f"{name}: {len(source)} blocks")
    kept = {name: kept[name] for name in sorted(kept) if MARK in pages.get(name, "")}
    versions = {name: metadata.version(name) for name in LIBRARIES}
    record = {"command": "python -m website.printed", "versions": versions, "seed": 0, "pages": kept}
    files.write(RESULT, json.dumps(record, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
