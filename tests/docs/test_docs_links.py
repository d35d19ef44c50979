"""Links of the README and of the documentation lead somewhere; the site has all of its pages in its navigation."""

import re
from pathlib import Path

import pytest
from website import links, render

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert list(links.broken(page)) == []


def test_what_leads_nowhere_is_found(tmp_path: Path) -> None:
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text("# One\n\n## Is it *so*, `really`?\n\n```python\n# not a heading\n```\n", encoding="utf-8")
    page.write_text(
        "# Here\n[a](other.md) [b](other.md#is-it-so-really) [c](#here) ![d](gone.png) [e](gone.md) [f](other.md#two) "
        "[g](#there) [h](other.md#not-a-heading) [i](https://example.org/x) `[j](code.md)`\n\n    [k](code.md)\n",
        encoding="utf-8",
    )
    assert list(links.broken(page)) == ["gone.png", "gone.md", "other.md#two", "#there", "other.md#not-a-heading"]


def test_addresses_on_the_web_are_listed_and_safe() -> None:
    found = links.external()
    assert "README.md" in found["https://arxiv.org/abs/2303.06562"]
    assert [link for link in found if not link.startswith("https://")] == []


def test_the_navigation_has_each_page_once() -> None:
    listed, pages = [], dict(render.pages())
    for name, text in pages.items():
        for block in re.findall(r"```{toctree}\n(.*?)```", text.decode(), flags=re.S):
            lines = [line for line in block.splitlines() if line and not line.startswith(":")]
            entries = [re.sub(r".*<(.*)>", r"\1", line) for line in lines]
            listed += [(Path(name).parent / entry).as_posix() for entry in entries]
    notebooks = [f"notebooks/{path.stem}" for path in (ROOT / "notebooks").glob("*.py")]
    assert sorted(["index", *listed]) == sorted([*(name.removesuffix(".md") for name in pages), *notebooks])


def test_links_of_a_file_lead_from_its_page() -> None:
    text = "[a](docs/text.md#glue) [b](SECURITY.md) [c](https://example.org) [d](LICENSE) [`e`](src/x.py) [f](#g)"
    assert render.move_links(text, "CONTRIBUTING.md") == (
        "[a](text.md#glue) [b](security.md) [c](https://example.org) d (`LICENSE`) `e` [f](#g)"
    )
    text = "[a](text.md#glue) [b](../SECURITY.md) ![c](images/x.svg) [d](../notebooks/x.py) [e](../examples/x.py)"
    assert render.move_links(text, "docs/page.md") == (
        "[a](text.md#glue) [b](security.md) ![c](images/x.svg) [d](notebooks/x.ipynb) e (`examples/x.py`)"
    )
    assert render.move_links("[a](../text.md) [b](../../SECURITY.md)", "docs/log/x.md") == (
        "[a](../text.md) [b](../security.md)"
    )


def test_plots_have_a_form_for_phones() -> None:
    text = "![a](images/demo.svg) ![c](images/report.png)"
    assert render.PLOT.sub(render.add_column, text) == (
        "![a](images/demo.svg){.on-screen}![a](images/demo_column.svg){.on-phone} ![c](images/report.png)"
    )
    plots = {path.stem for path in (ROOT / "docs" / "images").glob("*.svg")}
    assert {f"{stem}_column" for stem in plots if not stem.endswith("_column")} <= plots


def test_the_build_fails_on_a_broken_link() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "sphinx-build -W --keep-going " in makefile
    assert "-m website.links\n" in makefile


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_lines_of_prose_have_at_most_120_characters(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    prose = [line for line in text.splitlines() if not line.startswith(("|", "    ", "![", "<!--"))]
    assert [line for line in prose if len(line) > 120] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_rows_of_a_table_have_as_many_cells_as_its_head(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        cells = [len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()]
        assert set(cells) == {cells[0]}, table
