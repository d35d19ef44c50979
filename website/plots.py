"""How the plots of all pages are saved. Their look, colors and dashes are those of `uncollapse.report.canvas`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from uncollapse.lab.tables.markdown import group_cells
from uncollapse.lab.tables.paper_table import PaperTable, build_cells
from uncollapse.lab.tables.selection import Record
from uncollapse.lab.tables.table_page import draw_group
from uncollapse.report.canvas import fit_column, save_figure

ROOT = Path(__file__).parents[1]
IMAGES, PRINT = ROOT / "docs" / "images", ROOT / "build" / "figures"  # SVG of the site; PDF for papers and slides
COLUMN = "_column"  # ends the name of the form for columns of papers and for phones


def save_group(table: PaperTable, records: Iterable[Record], group: Any, path: Path) -> Path:
    """Write the plot of one group of a paper's table."""
    return save(draw_group(table, group, group_cells(build_cells(table, records))[group]), path)


def save(figure: Any, path: Path) -> Path:
    """Write a figure as SVG, with the colors of light and dark pages; of one of the site, also what else it needs.

    That is a PDF, and both formats again in the width of a column, for papers and phones.
    """
    if path.parent == IMAGES:
        save_figure(figure, PRINT / f"{path.stem}.pdf")
    written = save_figure(figure, path)
    if path.parent == IMAGES:
        fit_column(figure)
        save_figure(figure, path.with_stem(f"{path.stem}{COLUMN}"))
        save_figure(figure, PRINT / f"{path.stem}{COLUMN}.pdf")
    return written
