"""How the plots of all pages are saved. Their look, colours and dashes are those of `uncollapse.report.canvas`."""

from pathlib import Path
from typing import Any

from uncollapse.report.canvas import save_figure

ROOT = Path(__file__).parents[1]
IMAGES, PRINT = ROOT / "docs" / "images", ROOT / "build" / "figures"  # SVG of the site; PDF for papers and slides


def save(figure: Any, path: Path) -> Path:
    """Write a figure as SVG, with the colours of light and dark pages; if it is one of the site, also as PDF."""
    if path.parent == IMAGES:
        save_figure(figure, PRINT / f"{path.stem}.pdf")
    return save_figure(figure, path)
