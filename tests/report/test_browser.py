"""The page in a real browser: Chromium, through Playwright."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import uncollapse as uc
from uncollapse import report
from uncollapse.diagnosis.result import Diagnosis

pytest.importorskip("plotly")


MODEL = "</script><img src=x onerror=alert(1)>"
LAYER = '"><svg onload=alert(2)> <a href="javascript:alert(3)">$x$</a> %{y}'
TOKENS = ("<b>bold</b>", "$\\frac$", "&lt;", "'\"", "%{x}", "</script>")


@dataclass
class Opened:
    """A page, and what went wrong in it."""

    page: Any
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


def opened(browser: Any, path: Path) -> Opened:
    """The page in a new tab, once its figures are drawn."""
    tab = Opened(browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light"))
    tab.page.set_default_timeout(10_000)
    tab.page.on("console", lambda m: tab.problems.append(m.text) if m.type in ("error", "warning") else None)
    tab.page.on("pageerror", lambda error: tab.problems.append(str(error)))
    tab.page.on("dialog", lambda dialog: (tab.problems.append(f"dialog {dialog.message}"), dialog.dismiss()))
    tab.page.on("request", lambda request: tab.requests.append(request.url))
    tab.page.goto(path.as_uri())
    tab.page.wait_for_selector("html[data-ready]", timeout=60_000)
    return tab


@pytest.fixture(scope="module")
def hostile(browser: Any, make: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """Two diagnoses whose every name tries to become markup."""
    names = ["embed", LAYER, "block 1", "block 2", "encoder.layers.3.output.with.a.very.long.dotted.path"]
    fields: dict[str, Any] = {"names": names, "places": ("attention.residual", MODEL), "example": TOKENS}
    both = [make(MODEL, 0.9, data=MODEL, architecture=MODEL, **fields), make("after", 0.4, **fields)]
    both[0].verdict.__dict__["onset"] = LAYER  # the mark in every figure
    path = report.write(both, tmp_path_factory.mktemp("report") / "hostile.html")
    tab = opened(browser, path)
    yield tab
    tab.page.close()


def curve(page: Any, group: str, trace: int = -1) -> list[float]:
    found: list[float] = page.locator(f"[data-group={group}] .plot").evaluate(f"plot => plot.data.at({trace}).y")
    return found


def encoder(blocks: int) -> Diagnosis:
    """A real one: a tiny Transformer with random weights reads noise."""
    torch.manual_seed(blocks)
    block = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(block, blocks)
    return uc.diagnose(model, [torch.randn(4, 12, 16)], attention=True, labels=uc.Labels(model=f"{blocks} blocks"))


def test_two_real_models_from_the_measurement_to_the_page(browser: Any, tmp_path: Path) -> None:
    small, large = encoder(2), encoder(3)
    tab = opened(browser, small.report(tmp_path / "report.html", large))
    text = tab.page.locator("main").inner_text()
    assert small.verdict.sentence in text
    assert all(layer.name in text for layer in large.layers)
    assert all(sentence in text for sentence in report.difference(small, large))
    assert curve(tab.page, "similarity") == pytest.approx([la["mean_cosine"] for la in large.layers], rel=1e-3)
    assert tab.page.locator(".js-plotly-plot").count() >= 6
    x = "plot => plot.data.map(trace => Math.max(...trace.x))"
    assert max(tab.page.locator("[data-group=rank] .plot").evaluate(x)) == 3
    tab.page.get_by_label("relative depth").check()
    assert set(tab.page.locator("[data-group=rank] .plot").evaluate(x)) == {1}
    assert tab.problems == []
    assert tab.requests == [(tmp_path / "report.html").as_uri()]
    tab.page.close()


def test_hostile_names_stay_text(hostile: Opened) -> None:
    page = hostile.page
    assert page.title() == f"{MODEL} and after · uncollapse"
    assert page.locator("h1").inner_text() == f"{MODEL} and after"
    assert page.locator("img, a[href^=javascript], svg[onload], .js-plotly-plot a[href]").count() == 0
    assert page.locator("#numbers-table tbody th", has_text="<svg onload=alert(2)>").count() > 0
    assert f"onset: {LAYER}" in page.locator("[data-group=rank] .annotation-text").first.text_content()
    ticks = page.locator("[data-map='0'] .xtick").all_text_contents()
    assert ticks == [token if len(token) <= 12 else f"{token[:11]}…" for token in TOKENS]


def test_hovering_shows_names_as_text(hostile: Opened) -> None:
    page = hostile.page
    page.locator("html").evaluate("root => { root.style.scrollBehavior = 'auto'; }")
    drawn = page.locator("[data-map='0'] .heatmaplayer")
    drawn.scroll_into_view_if_needed()
    box = drawn.bounding_box()
    page.mouse.move(box["x"] + 1.5 * box["width"] / 6, box["y"] + 0.5 * box["height"] / 6)
    said = page.locator("[data-map='0'] .hovertext").text_content()
    assert f"1: {TOKENS[0]}" in said
    assert f"2: {TOKENS[1]}" in said
    point = page.locator("[data-group=rank] .trace:has(.point)").first.locator(".point").nth(1)
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    said = page.locator("[data-group=rank] .hovertext").text_content()
    assert LAYER in said
    assert MODEL in said
    assert "middle half" in said


def test_the_sliders_work_with_the_keyboard(hostile: Opened) -> None:
    page = hostile.page
    for name, plot in (("spectrum", "#spectrum-plot"), ("heatmap", "[data-map='1']")):
        state = (
            f'() => JSON.stringify(document.querySelector("{plot}").data.at(-1).{"y" if name == "spectrum" else "z"})'
        )
        slider = page.locator(f"#{name}-slider")
        slider.focus()
        page.keyboard.press("Home")
        assert page.locator(f"#{name}-layer").inner_text() == "embed"
        before, said = page.evaluate(state), page.locator(f"#{name}-says").inner_text()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert page.locator(f"#{name}-layer").inner_text() == "block 1"
        assert slider.get_attribute("aria-valuetext") == "block 1"
        assert page.evaluate(state) != before
        assert page.locator(f"#{name}-says").inner_text() != said


def test_small_pictures_choose_the_layer(hostile: Opened) -> None:
    page = hostile.page
    page.locator("[data-film='0'] button").nth(3).click()
    assert page.locator("#heatmap-layer").inner_text() == "block 2"
    assert page.locator("[data-film='0'] button[aria-pressed=true]").count() == 1
    z = page.locator("[data-map='0']").evaluate("plot => plot.data[0].z")
    assert z[0][1] == z[1][0] == pytest.approx(0.1 + 0.8 * 3 / 4, abs=1e-3)


def test_a_measure_is_chosen_and_a_diagnosis_hidden(hostile: Opened) -> None:
    page = hostile.page
    assert curve(page, "rank")[0] == pytest.approx(37.0, rel=1e-3)
    page.get_by_label("Rank share", exact=True).check()
    assert curve(page, "rank")[0] == pytest.approx(0.9, rel=1e-3)
    assert page.locator("[data-group=rank] figcaption").inner_text().startswith("Rank share.")
    traces = "plot => plot.data.length"
    before = page.locator("[data-group=rank] .plot").evaluate(traces)
    page.locator("[data-show=of-1]").uncheck()
    assert page.locator("[data-group=rank] .plot").evaluate(traces) < before
    page.locator("[data-show=of-1]").check()


def test_the_table_is_sorted_by_a_click(hostile: Opened) -> None:
    page = hostile.page
    head = page.locator("#numbers-table thead th", has_text="Effective rank").first
    column = head.evaluate("cell => cell.cellIndex")
    for direction in ("ascending", "descending"):
        head.locator("button").press("Enter")
        assert head.get_attribute("aria-sort") == direction
        cells = page.locator(f"#numbers-table tbody tr td:nth-child({column + 1}), #no")
        found = [float(cell) for cell in cells.evaluate_all("cells => cells.map(cell => cell.dataset.v)")]
        assert found == sorted(found, reverse=direction == "descending")
    assert page.locator("#numbers-table [aria-sort]:not([aria-sort=none])").count() == 1


def test_the_table_is_saved_as_csv(hostile: Opened, tmp_path: Path) -> None:
    with hostile.page.expect_download() as download:
        hostile.page.locator("#csv").click()
    download.value.save_as(tmp_path / "numbers.csv")
    rows = list(csv.DictReader((tmp_path / "numbers.csv").open(encoding="utf-8", newline="")))
    assert len(rows) == hostile.page.locator("#numbers-table tbody tr").count()
    assert LAYER in {row["Layer"] for row in rows}
    assert min(float(row["Mean cosine"]) for row in rows) == 0.1


def test_the_theme_changes_page_and_figures(hostile: Opened) -> None:
    page = hostile.page
    look = """() => [getComputedStyle(document.body).backgroundColor,
        document.querySelector('[data-group=rank] .plot').layout.font.color]"""
    light = page.evaluate(look)
    page.locator("#theme").click()
    dark = page.evaluate(look)
    assert page.locator("#theme").inner_text() == "Light theme"
    assert all(a != b for a, b in zip(light, dark, strict=True))
    page.locator("#theme").click()
    assert page.evaluate(look) == light


def test_print_is_light_and_fits_the_sheet(hostile: Opened) -> None:
    page = hostile.page
    page.locator("#theme").click()
    size = "() => document.querySelector('[data-group=rank] .plot .main-svg').getBoundingClientRect().width"
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert page.evaluate(size) == 630
    assert not page.locator("#theme").is_visible()
    page.emulate_media(media="screen")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.locator("#theme").click()


@pytest.mark.parametrize("width", [375, 1600])
def test_nothing_is_wider_than_the_window(hostile: Opened, width: int) -> None:
    hostile.page.set_viewport_size({"width": width, "height": 800})
    hostile.page.wait_for_timeout(400)  # the figures follow
    assert hostile.page.evaluate("document.documentElement.scrollWidth") <= width
    plot = hostile.page.locator("[data-group=rank] .main-svg").first.bounding_box()
    assert plot["x"] >= 0
    assert plot["x"] + plot["width"] <= width


def test_the_keyboard_reaches_everything(hostile: Opened) -> None:
    page = hostile.page
    page.set_viewport_size({"width": 1280, "height": 900})
    assert page.locator("a, button, input, [tabindex]").first.inner_text() == "Skip to the report"
    for selector in (".skip", "#theme", ".copy", "[data-show]", ".pills input", "#spectrum-slider", "#numbers button"):
        page.locator(selector).first.focus()
        assert page.locator(selector).first.evaluate("one => one === document.activeElement"), selector
        box = page.locator(selector).first.bounding_box()
        assert box["y"] >= 0, selector
        assert box["width"] > 0, selector


def test_no_button_of_a_figure_sends_it_away(hostile: Opened) -> None:
    buttons = hostile.page.locator("[data-group=rank] .modebar-btn")
    names = buttons.evaluate_all("all => all.map(one => one.dataset.attr ?? one.dataset.title)")
    assert len(names) == 4, names  # picture, zoom, pan, reset


def test_all_this_went_without_errors_dialogs_and_requests(hostile: Opened) -> None:
    assert hostile.problems == []
    assert [url for url in hostile.requests if not url.startswith(("file:", "blob:"))] == []
    assert len([url for url in hostile.requests if url.startswith("file:")]) == 1
