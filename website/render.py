"""Render the sources of the site into a folder, which Sphinx then builds without any extension of ours.

python -m website.render build/pages

Comments on a page stand for what is generated: `<!-- table: NAME -->` for a table of `website/tables.py`,
`<!-- printed -->` for what the code above it printed, and `<!-- api: NAME, NAME -->` for docstrings of public names.
"""

import inspect
import os
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import uncollapse
from website import printed, tables
from website.plots import COLUMN

ROOT = Path(__file__).parents[1]
TEXTS = ("CONTRIBUTING.md", "ROADMAP.md", "CHANGELOG.md", "SECURITY.md")  # of the root, which are pages too
TABLE = re.compile(r"<!-- table: (\w+) -->")
API = re.compile(r"<!-- api: ([\w.,\s]+?) -->")
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
PLOT = re.compile(r"!\[[^\]]*\]\((?:\.\./)?images/([\w-]+\.svg)\)")
RUN = (
    "**Run it yourself**: in a clone, `python notebooks/{name}.py`, or open that file in VS Code or Jupyter. "
    "{{download}}`Download the notebook <{name}.ipynb>`."
)


def main(arguments: list[str]) -> int:
    """Write every page, image and notebook that changed; Sphinx does not read the others again."""
    folder = Path(arguments[0])
    sources = {**dict(pages()), **dict(notebooks()), **dict(images())}
    for old in (path for path in folder.rglob("*") if path.is_file()):
        if str(old.relative_to(folder)) not in sources:
            old.unlink()
    for name, content in sources.items():
        file = folder / name
        if not file.exists() or file.read_bytes() != content:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    print(f"{len(sources)} files in {folder}")
    return 0


def pages() -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of each Markdown page."""
    for path in sorted((ROOT / "docs").rglob("*.md")):
        name = path.relative_to(ROOT / "docs").as_posix()
        text = move_links(fill(path.read_text(encoding="utf-8"), name), f"docs/{name}")
        yield name, PLOT.sub(add_column, text).encode()
    for name in TEXTS:
        yield name.lower(), move_links((ROOT / name).read_text(encoding="utf-8"), name).encode()


def add_column(plot: re.Match[str]) -> str:
    """Add the form of a plot for phones, if there is one; the style sheet shows one of the two."""
    column = plot[1].replace(".svg", f"{COLUMN}.svg")
    if not (ROOT / "docs" / "images" / column).exists():
        return plot[0]
    return f"{plot[0]}{{.on-screen}}{plot[0].replace(plot[1], column)}{{.on-phone}}"


def images() -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of each image."""
    for path in sorted((ROOT / "docs" / "images").iterdir()):
        yield f"images/{path.name}", path.read_bytes()


def notebooks() -> Iterator[tuple[str, bytes]]:
    """Yield each notebook without outputs, with how to run it below its title."""
    import jupytext

    for path in sorted((ROOT / "notebooks").glob("*.py")):
        notebook = jupytext.read(path)
        title, blank, text = notebook.cells[0].source.partition("\n\n")
        notebook.cells[0].source = f"{title}{blank}{RUN.format(name=path.stem)}\n\n{text}"
        notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        for number, cell in enumerate(notebook.cells):
            cell["id"] = f"cell-{number}"  # otherwise a random one, and the file would change each time
        yield f"notebooks/{path.stem}.ipynb", jupytext.writes(notebook, fmt="ipynb").encode()


def fill(markdown: str, page: str) -> str:
    """Put tables, printed output and the reference in place. An unknown name fails."""
    filled = printed.fill(markdown, page)
    filled = TABLE.sub(lambda found: tables.TABLES[found[1]](), filled)
    return API.sub(lambda found: "\n\n".join(map(directive, re.split(r"[\s,]+", found[1]))), filled)


def directive(name: str) -> str:
    """Return the directive of autodoc for a name below `uncollapse`."""
    thing = uncollapse
    for part in name.split("."):
        thing = getattr(thing, part)
    kind = "class" if inspect.isclass(thing) else "function"
    members = "\n   :members:" if kind == "class" else ""
    return f"```{{eval-rst}}\n.. auto{kind}:: uncollapse.{name}{members}\n```"


def move_links(text: str, source: str) -> str:
    """Make the links of a file of the repository lead from its page on the site."""
    return LINK.sub(lambda link: f"[{link[1]}]({moved})" if (moved := _target(link[2], source)) else _path(link), text)


def _target(link: str, source: str) -> str | None:
    """Return where a link leads on the site: to a page, an image, a notebook or the web; otherwise None."""
    target, mark, anchor = link.partition("#")
    if "://" in link or not target:
        return link
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    here = posixpath.dirname(source.removeprefix("docs/")) or "."
    if file in TEXTS:
        file = f"docs/{file.lower()}"
    if file.startswith("notebooks/"):
        file = f"docs/{file.removesuffix('.py')}.ipynb"
    if not file.startswith("docs/"):
        return None
    return f"{os.path.relpath(file.removeprefix('docs/'), here)}{mark}{anchor}"


def _path(link: re.Match[str]) -> str:
    """Name a file that is not on the site, such as source code."""
    words = link[1]
    return words if words.startswith("`") else f"{words} (`{link[2].removeprefix('../')}`)"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
