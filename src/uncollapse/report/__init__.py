"""Diagnoses as something to look at: one self-contained HTML page, static plots, and differences in words."""

from uncollapse.report.page import write
from uncollapse.report.plots import plot, plot_heatmap, plot_spectrum
from uncollapse.report.words import difference

__all__ = ["difference", "plot", "plot_heatmap", "plot_spectrum", "write"]
