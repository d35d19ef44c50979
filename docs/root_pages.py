"""Files of the repository's root that are pages of the site too, so that their links are checked like all others."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
NAMES = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add a page for each file: a hook of mkdocs."""
    for name in NAMES:
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name.lower(), content=LINK.sub(_led, text)))
    return files


def _led(link: re.Match[str]) -> str:
    """A link as it leads from the site: to a page, to the web, or nowhere, as to the source code."""
    words, (target, mark, anchor) = link[1], link[2].partition("#")
    if "://" in target or not target:
        return link[0]
    page = target.removeprefix("docs/")
    if target in NAMES or (target.startswith("docs/") and page.endswith(".md")):
        return f"[{words}]({page.lower() if target in NAMES else page}{mark}{anchor})"
    return words if words.startswith("`") else f"{words} (`{target}`)"
