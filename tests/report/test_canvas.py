"""One SVG file for light and for dark pages."""

import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest

from uncollapse.report import canvas

pytest.importorskip("matplotlib")


def drawn(path: Path) -> str:
    figure, (axes,) = canvas.new_figure("title", (3.0, 2.0))
    axes.plot([0, 1], color=canvas.series_color(1))
    axes.set_xlabel("plain black")
    return canvas.save_figure(figure, path).read_text(encoding="utf-8")


def test_it_has_the_colors_of_both(tmp_path: Path) -> None:
    text = drawn(tmp_path / "x.svg")
    light, _, dark = text.partition("@media (prefers-color-scheme: dark) {")
    dark, _, rest = dark.partition("</style>")
    assert "#c44d08" not in light
    assert "stroke: #c44d08" in rest  # as drawn, for programs that know no style sheets
    assert '[style*="stroke: #c44d08"] { stroke: #f79256 !important }' in dark
    assert '[style*="fill: #ffffff"] { fill: transparent !important }' in dark
    assert "svg { fill: #e7edf4 }" in dark
    ElementTree.fromstring(text)


def test_every_color_of_plots_has_a_dark_one() -> None:
    assert {*canvas.COLORS, canvas.INK, canvas.QUIET, canvas.LINE} <= set(canvas.DARK)


def test_the_same_picture_is_the_same_file(tmp_path: Path) -> None:
    assert drawn(tmp_path / "x.svg") == drawn(tmp_path / "y.svg")


def test_no_two_lines_are_alike_and_markers_differ_in_grey() -> None:
    styles = [canvas.series_style(number) for number in range(24)]
    assert len({(style["color"], str(style["linestyle"])) for style in styles}) == 24
    assert all(one["linestyle"] != next_one["linestyle"] for one, next_one in pairwise(styles[:12]))
    assert len({canvas.series_marker(number) for number in range(18)}) == 18
    assert len({(canvas.series_color(number), canvas.series_marker(number)) for number in range(108)}) == 108


@pytest.mark.parametrize(
    ("names", "columns"), [((), 9), (("none", "contra_norm"), 4), (("a" * 28,), 2), (("a" * 99,), 1)]
)
def test_a_legend_has_as_many_columns_as_fit(names: tuple[str, ...], columns: int) -> None:
    assert canvas.legend_columns(5.6, names) == columns


def test_panels_go_below_each_other_in_a_column() -> None:
    words = "a title of a figure that is far too long for a single line of a column"
    figure, panels = canvas.new_figure(words, (10.0, 3.0), 3)
    for axes in panels:
        axes.errorbar([0, 1], [1, 2], yerr=0.1, marker="o", label="points with bars")
        axes.set_xlabel("x")
    panels[0].set_ylabel("the same y for all")
    canvas.add_legend_below(figure, panels[0])
    canvas.fit_column(figure).draw_without_rendering()
    boxes = [axes.get_position() for axes in panels]
    assert figure.get_figwidth() == canvas.COLUMN
    assert all(upper.y0 > lower.y1 for upper, lower in pairwise(boxes))
    assert [axes.get_ylabel().replace("\n", " ") for axes in panels] == ["the same y for all"] * 3
    assert "\n" in figure.get_suptitle()
    assert max(box.x1 for box in boxes) <= 1
    (legend,) = figure.legends
    assert len(legend.legend_handles) == 1


def test_small_panels_stay_in_pairs_and_two_rows_become_columns() -> None:
    figure, panels = canvas.new_figure("", (7.6, 3.0), 4)
    canvas.fit_column(figure).draw_without_rendering()
    assert [axes.get_subplotspec().colspan.start for axes in panels] == [0, 1, 0, 1]
    figure, _ = canvas.new_figure("", (7.9, 4.6))
    figure.clear()
    above, below = figure.subplots(2, 3)
    canvas.fit_column(figure).draw_without_rendering()
    assert [axes.get_subplotspec().colspan.start for axes in (*above, *below)] == [0, 0, 0, 1, 1, 1]
    assert [axes.get_subplotspec().rowspan.start for axes in below] == [0, 1, 2]
