"""The page of a table: complete without a network and without scripts, and pictures of its tables."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
from tests.lab.made_up import TABLE, runs

from uncollapse.errors import UsageError
from uncollapse.lab.tables.markdown import group_cells
from uncollapse.lab.tables.paper_table import Contrast, PaperTable, build_cells
from uncollapse.lab.tables.significance import mean_interval
from uncollapse.lab.tables.table_page import draw_group, plot_group, render_page, write_page

pytest.importorskip("matplotlib")

CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
EVIL = "</text><script>alert(1)</script><img src=x onerror=alert(2)>$\\frac$"
RECORDS = [
    *runs(0.80, 0.81, 0.82, norm="contra", layers=16),
    *runs(0.5, norm="contra", layers=16, scale=0.5, validation=0.1),
    *runs(0.81, 0.82, norm="none", layers=2),
    *runs(0.20, 0.25, norm="none", layers=16),
    *runs(0.7, None, norm=EVIL, layers=2, data="pubmed"),
    *runs(0.7, norm=EVIL, layers=4, data="pubmed", widths=(4,)),
]


def test_all_is_in_the_page_and_names_are_no_markup() -> None:
    text = render_page(TABLE, build_cells(TABLE, RECORDS))
    for words in (
        "✓ 81.00 ± 1.00 (3)",
        "79.75 ± 0.33",
        "scale 1.0",
        "1 not finite",
        "1 of 3 above",
        "with widths (4,)",
    ):
        assert words in text
    assert text.count("<svg") == 4  # two plots, each also for phones
    assert "<script" not in text
    assert "<img" not in text
    assert "http://" not in text.replace("http://www.w3.org/", "")
    assert render_page(TABLE, build_cells(TABLE, RECORDS)) == text  # the same results, the same page


def test_comparisons_are_in_the_page() -> None:
    table = replace(TABLE, contrasts=(Contrast("none", row="contra"),), names={"cora": "Cora & co"})
    text = render_page(table, build_cells(table, RECORDS))
    for words in ("Differences by seed", "contra − none", "95 % interval", "Holm p", "Cora &amp; co"):
        assert words in text
    assert "Differences by seed" not in render_page(TABLE, build_cells(TABLE, RECORDS))


def test_plots_have_names_and_no_bars_of_few_seeds() -> None:
    table = replace(TABLE, names={"cora": "Cora", "contra": "ContraNorm", "test": "test accuracy"})
    five = [*RECORDS, *runs(0.80, 0.81, 0.82, 0.80, 0.83, norm="none", layers=4)]
    axes, title = drawn(table, [*RECORDS])
    assert title == "Cora\nmean over seeds, dots: single seeds"
    assert axes.get_ylabel() == "test accuracy, %"
    assert "ContraNorm" in [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert bars(axes) == []
    axes, title = drawn(table, five)
    assert title == "Cora\nmean over seeds, bars: 95 % interval, dots: single seeds"
    low, high = mean_interval(81.2, stdev((80, 81, 82, 80, 83)), 5)
    assert bars(axes) == [pytest.approx((low, high))]


def test_rows_of_the_paper_alone_are_in_the_legend() -> None:
    axes, _ = drawn(TABLE, runs(0.81, 0.82, norm="none", layers=2))
    labels = axes.get_legend_handles_labels()[1]
    assert {"none", "contra", "the paper's"} <= set(labels)
    assert len(set(labels)) == len(labels)


def test_points_of_a_single_column_do_not_cover_each_other() -> None:
    both = [*runs(0.5, 0.6, norm="none", layers=4), *runs(0.5, 0.6, norm="contra", layers=4)]
    axes, _ = drawn(replace(TABLE, published=()), both)
    means = [line.get_xdata()[0] for line in axes.get_lines() if line.get_linewidth() == 2 and line.get_ydata() == [55]]
    assert len(set(means)) == 2


def drawn(table: PaperTable, records: list[dict[str, Any]]) -> tuple[Any, str]:
    rows = group_cells(build_cells(table, records))["cora"]
    figure = draw_group(table, "cora", rows)
    return figure.axes[0], figure.get_suptitle()


def bars(axes: Any) -> list[tuple[float, float]]:
    """The ends of all error bars that can be seen."""
    segments = [segment for bar in axes.collections for segment in bar.get_segments()]
    return [(segment[0][1], segment[1][1]) for segment in segments if len(segment) and segment[0][1] < segment[1][1]]


def test_pictures_in_files(tmp_path: Path) -> None:
    path = plot_group(TABLE, RECORDS, "cora", tmp_path / "cora.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="citeseer"):
        plot_group(TABLE, RECORDS, "citeseer", tmp_path / "citeseer.png")


@pytest.fixture(scope="module")
def tab() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium: install it, or name it in CHROMIUM")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        chromium.close()


def test_in_a_browser(tab: Any, tmp_path: Path) -> None:
    problems: list[str] = []
    requests: list[str] = []
    tab.on("console", lambda message: problems.append(message.text))
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
    tab.on("request", lambda request: requests.append(request.url))
    path = write_page(TABLE, RECORDS, tmp_path / "table.html")
    tab.goto(path.as_uri())
    assert (problems, requests) == ([], [path.as_uri()])
    assert tab.locator("section table").count() == 2
    assert EVIL in tab.locator("#group-1 tbody th").inner_text()
    assert all(EVIL in plot for plot in tab.locator("#group-1 svg").all_text_contents())
    reached = tab.locator("#group-0 td", has_text="81.00 ± 1.00").locator("span")
    light = [tab.evaluate("x => getComputedStyle(x).color", element.element_handle()) for element in (reached,)]
    line = "() => getComputedStyle(document.querySelector('#group-0 svg text')).fill"
    ink = tab.evaluate(line)
    tab.emulate_media(color_scheme="dark")
    assert tab.evaluate("x => getComputedStyle(x).color", reached.element_handle()) != light[0]
    assert tab.evaluate(line) != ink  # the pictures follow the theme
    for width in (1280, 400):
        tab.set_viewport_size({"width": width, "height": 800})
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
    fits = "() => [...document.querySelectorAll('.card:has(svg)')].every(card => card.scrollWidth <= card.clientWidth)"
    assert tab.evaluate(fits)  # at the width of a phone no plot is scrolled
