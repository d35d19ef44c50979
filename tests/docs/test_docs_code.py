"""The Python of the README and of the documentation runs, and what a page shows as printed is what its code printed."""

import json
from pathlib import Path

import pytest
from website import printed

from uncollapse.backbones import torchvision_ops

torchvision_ops.declare()  # before a page imports transformers or timm
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_CODE = [page for page in PAGES if "\n```python\n" in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run_in_their_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some of them write files
    sources = printed.blocks(page.read_text(encoding="utf-8"))
    assert len(printed.run(sources, page.name)) == len(sources)


def test_the_pages_that_say_how_have_code() -> None:
    names = {page.name for page in WITH_CODE}
    assert names >= {"README.md", "quickstart.md", "transformers.md", "pyg.md", "own-model.md"}
    assert names >= {"embeddings.md", "monitor.md", "mend.md"}
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("```python\n") >= 4


def test_what_is_shown_was_printed_by_the_code_above_it() -> None:
    kept = json.loads(printed.RESULT.read_text(encoding="utf-8"))["pages"]
    for name, of in kept.items():
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert of["source"] == printed.blocks(text), f"run: python -m website.printed {name}"
        filled = printed.fill(text, name)
        assert printed.MARK not in filled
        assert filled.count("{.printed .") == text.count(printed.MARK)


PAGE = "# A\n\n```python\nx = 2\nprint(x)\n```\n\n<!-- printed -->\n\n```python\nprint(x + 1)\n```\n\nend\n"


def test_only_what_is_marked_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = printed.blocks(PAGE)
    assert printed.run(sources, "a") == ["2\n", "3\n"]
    result = tmp_path / "printed.json"
    monkeypatch.setattr(printed, "RESULT", result)
    result.write_text(json.dumps({"pages": {"a.md": {"source": sources, "printed": ["2\n", "3\n"]}}}), encoding="utf-8")
    assert printed.fill(PAGE, "a.md") == PAGE.replace("<!-- printed -->", "{.printed .prose}\n```text\n2\n```")
    with pytest.raises(ValueError, match=r"changed.*a\.md"):
        printed.fill(PAGE.replace("x = 2", "x = 3"), "a.md")
    assert printed.fill("no code", "b.md") == "no code"
