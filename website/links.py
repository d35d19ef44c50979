"""Check the links of the README and of all pages without a network; list those that lead out.

python -m website.links               # ends with 1 and names what leads nowhere
python -m website.links --external    # the addresses on the web, which are not fetched, with their pages
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = re.compile(r"^```.*?^```|^(?: {4}|\t)[^\n]*$|`[^`\n]+`", flags=re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", flags=re.M)


def pages() -> list[Path]:
    """The texts at the root, and all pages of the site."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def links(page: Path) -> list[str]:
    """Where the links and plots of a page lead."""
    return LINK.findall(CODE.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """What can stand behind the # of a link to a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return {slug(heading) for heading in HEADING.findall(text)}


def slug(heading: str) -> str:
    """The anchor of a heading, as MyST and GitHub make it."""
    words = LINK.sub("", heading).replace("[", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def broken(page: Path) -> Iterator[str]:
    """The links of a page whose file or anchor is not there."""
    for link in links(page):
        target, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        file = page.parent / target if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            yield link


def external() -> dict[str, list[str]]:
    """Addresses on the web, and the pages that have them."""
    found: dict[str, list[str]] = {}
    for page in pages():
        for link in links(page):
            if "://" in link and page.name not in found.setdefault(link, []):
                found[link].append(page.name)
    return dict(sorted(found.items()))


def main(arguments: list[str]) -> int:
    """Print what was asked for."""
    if arguments == ["--external"]:
        print("\n".join(f"{link}  ({', '.join(on)})" for link, on in external().items()))
        return 0
    lost = [f"{page.relative_to(ROOT)}: {link} leads nowhere" for page in pages() for link in broken(page)]
    print("\n".join(lost), end="\n" if lost else "")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
