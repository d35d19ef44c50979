"""All pages that are written, with names that try to become code, in a real browser under their own policy."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from uncollapse import report
from uncollapse.lab.tables.paper_table import PaperTable
from uncollapse.lab.tables.table_page import ResultPlot, write_page
from uncollapse.report.canvas import new_figure
from uncollapse.report.page import render_page
from uncollapse.tuning import search_page as tuned
from uncollapse.tuning.trial_result import TrialResult

pytest.importorskip("plotly")
SHORT = "</text><script>window.hacked=1</script>"
EVIL = f"</script></title>{SHORT}<img src=x onerror=window.hacked=2>\"'><b onclick=alert(1)>"
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">')
SHOTS = os.environ.get("UNCOLLAPSE_SHOTS")  # a folder for pictures of the pages, to look at


def of_report(make: Any, path: Path) -> Path:
    fields = {"names": ["embed", EVIL, "block 1"], "data": EVIL, "architecture": EVIL, "example": (EVIL, "a", "b")}
    return report.write(make(EVIL, 0.9, **fields), path)


def of_comparison(make: Any, path: Path) -> Path:
    return report.write([make(EVIL, 0.9), make(f"{EVIL} after", 0.4, settings={EVIL: EVIL})], path, title=EVIL)


def of_table(make: Any, path: Path) -> Path:
    table = PaperTable(EVIL, where={}, groups="data", rows="norm", columns="layers")
    config = {"data": SHORT, "norm": SHORT, "layers": 2, "seed": 0}
    records = [{"recipe": "x", "config": config, "seed": 0, "figures": {"test": 0.5, "validation": 0.5}}]
    figure, (axes,) = new_figure(SHORT, (8, 4))
    axes.set_xlabel(SHORT, parse_math=False)
    return write_page(table, records, path, [ResultPlot(EVIL, EVIL, figure)])


def of_search(make: Any, path: Path) -> Path:
    tried = [TrialResult(number, {"scale": 0.1 * number}, 0.5 + 0.1 * number, "done") for number in range(3)]
    space = [{"name": "scale", "kind": "float", "low": 0.0, "high": 1.0, "log": False}]
    return tuned.write_search_page(
        tuned.SearchReport(EVIL, SHORT, "higher", tried, space, {SHORT: 1.0}, EVIL, (EVIL,)), path
    )


PAGES: dict[str, Callable[[Any, Path], Path]] = {
    "report": of_report,
    "comparison": of_comparison,
    "table": of_table,
    "search": of_search,
}


@pytest.mark.parametrize("kind", PAGES)
def test_every_page_has_a_strict_policy(make: Any, tmp_path: Path, kind: str) -> None:
    text = PAGES[kind](make, tmp_path / "page.html").read_text(encoding="utf-8")
    found = POLICY.findall(text)
    assert len(found) == 1
    rules = dict(rule.split(" ", 1) for rule in found[0].replace("&#39;", "'").split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert all(re.fullmatch(r"'sha256-[\w+/=]{44}'|'none'", one) for one in rules["script-src"].split())
    assert rules["img-src"] == "data: blob:"
    assert text.index("Content-Security-Policy") < min(text.index("<style"), text.find("<script") % len(text))
    assert "window.hacked=1</script>" not in text


@pytest.mark.parametrize("kind", PAGES)
def test_names_do_nothing_and_the_policy_is_kept(browser: Any, make: Any, tmp_path: Path, kind: str) -> None:
    path = PAGES[kind](make, tmp_path / "page.html")
    page, said, asked, refused = browser.new_page(viewport={"width": 1280, "height": 900}), [], [], []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: asked.append(request.url))
    page.on("requestfailed", lambda request: refused.append(request.url))
    page.goto(path.as_uri())
    if kind in ("report", "comparison"):
        page.wait_for_selector("html[data-ready]", timeout=60_000)
    if SHOTS:
        page.screenshot(path=str(Path(SHOTS) / f"{kind}.png"), full_page=True)
    assert (said, asked) == ([], [path.as_uri()])
    assert page.locator("img, b[onclick]").count() == 0
    assert page.evaluate("window.hacked") is None
    assert EVIL in page.locator("h1").inner_text()
    assert _injected(page) is None
    assert any("Content Security Policy" in words for words in said)
    assert set(asked) - {path.as_uri()} == set(refused)
    page.close()


def _injected(page: Any) -> Any:
    """What scripts and pictures do that got into the page by a mistake that it does not have."""
    page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "window.hacked = 3";
            document.head.append(script);
            const box = document.createElement("div");
            box.innerHTML = '<img src="data:image/png;base64,x" onerror="window.hacked = 4">'
                + '<img src="https://example.org/x.png"><iframe srcdoc="<script>parent.hacked = 5</script>"></iframe>';
            document.body.append(box);
        }"""
    )
    page.wait_for_timeout(200)
    return page.evaluate("window.hacked")


def test_what_a_script_reads_cannot_end_its_element(make: Any) -> None:
    text = render_page([make(EVIL, 0.9)])
    data = text.partition('id="report-data">')[2].partition("</script>")[0]
    assert "<" not in data
