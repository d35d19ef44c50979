"""Links of the README and of the documentation lead somewhere; the site has all of its pages in its navigation."""

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("links")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(links: ModuleType, page: Path) -> None:
    assert list(links.broken(page)) == []


def test_what_leads_nowhere_is_found(links: ModuleType, tmp_path: Path) -> None:
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text("# One\n\n## Is it *so*, `really`?\n\n```python\n# not a heading\n```\n", encoding="utf-8")
    page.write_text(
        "# Here\n[a](other.md) [b](other.md#is-it-so-really) [c](#here) ![d](gone.png) [e](gone.md) [f](other.md#two) "
        "[g](#there) [h](other.md#not-a-heading) [i](https://example.org/x) `[j](code.md)`\n\n    [k](code.md)\n",
        encoding="utf-8",
    )
    assert list(links.broken(page)) == ["gone.png", "gone.md", "other.md#two", "#there", "other.md#not-a-heading"]


def test_addresses_on_the_web_are_listed_and_safe(links: ModuleType) -> None:
    found = links.external()
    assert "README.md" in found["https://arxiv.org/abs/2303.06562"]
    assert [link for link in found if not link.startswith("https://")] == []


def test_the_navigation_has_each_page_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2].partition("\nmarkdown")[0]
    listed = re.findall(r"([\w-]+\.md)", nav)
    root = {"contributing.md", "changelog.md", "security.md"}
    assert sorted(listed) == sorted({page.name for page in PAGES if page.parent.name == "docs"} | root)


def test_texts_of_the_root_lead_from_the_site_to_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    pages = importlib.import_module("root_pages")
    text = "[a](docs/text.md#glue) [b](SECURITY.md) [c](https://example.org) [d](LICENSE) [`e`](src/x.py) [f](#g)"
    assert pages.LINK.sub(pages._led, text) == (
        "[a](text.md#glue) [b](security.md) [c](https://example.org) d (`LICENSE`) `e` [f](#g)"
    )


def test_the_build_fails_on_a_broken_link() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "mkdocs build --strict\n" in makefile  # with --quiet warnings are not seen, and so do not fail it
    assert "docs/links.py\n" in makefile
