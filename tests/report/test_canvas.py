"""One SVG file for light and for dark pages."""

import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest

from uncollapse.report import canvas

pytest.importorskip("matplotlib")


def drawn(path: Path) -> str:
    figure, (axes,) = canvas.new_figure("title", (3.0, 2.0))
    axes.plot([0, 1], color=canvas.series_colour(1))
    axes.set_xlabel("plain black")
    return canvas.save_figure(figure, path).read_text(encoding="utf-8")


def test_it_has_the_colours_of_both(tmp_path: Path) -> None:
    text = drawn(tmp_path / "x.svg")
    light, _, dark = text.partition("@media (prefers-color-scheme: dark) {")
    dark, _, rest = dark.partition("</style>")
    assert "#c44d08" not in light
    assert "stroke: #c44d08" in rest  # as drawn, for programs that know no style sheets
    assert '[style*="stroke: #c44d08"] { stroke: #f79256 !important }' in dark
    assert '[style*="fill: #ffffff"] { fill: transparent !important }' in dark
    assert "svg { fill: #e7edf4 }" in dark
    ElementTree.fromstring(text)


def test_every_colour_of_plots_has_a_dark_one() -> None:
    assert {*canvas.COLOURS, canvas.INK, canvas.QUIET, canvas.LINE} <= set(canvas.DARK)


def test_the_same_picture_is_the_same_file(tmp_path: Path) -> None:
    assert drawn(tmp_path / "x.svg") == drawn(tmp_path / "y.svg")


def test_no_two_lines_are_alike_and_markers_differ_in_grey() -> None:
    styles = [canvas.series_style(number) for number in range(24)]
    assert len({(style["color"], str(style["linestyle"])) for style in styles}) == 24
    assert all(one["linestyle"] != next_one["linestyle"] for one, next_one in pairwise(styles[:12]))
    assert len({canvas.series_marker(number) for number in range(18)}) == 18
    assert len({(canvas.series_colour(number), canvas.series_marker(number)) for number in range(108)}) == 108


@pytest.mark.parametrize(
    ("names", "columns"), [((), 9), (("none", "contra_norm"), 4), (("a" * 28,), 2), (("a" * 99,), 1)]
)
def test_a_legend_has_as_many_columns_as_fit(names: tuple[str, ...], columns: int) -> None:
    assert canvas.legend_columns(5.6, names) == columns
