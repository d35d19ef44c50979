"""Diagnoses as something to look at: one self-contained HTML page, static plots, and differences in words."""

from uncollapse.registry import RENDERERS
from uncollapse.report.comparison import Comparison, compare
from uncollapse.report.page import write
from uncollapse.report.plots import plot, plot_heatmap, plot_spectrum
from uncollapse.report.words import difference

__all__ = ["Comparison", "compare", "difference", "plot", "plot_heatmap", "plot_spectrum", "write"]

RENDERERS.add("page", write)  # `Diagnosis.report` and its other methods find them here
RENDERERS.add("plot", plot)
RENDERERS.add("comparison", compare)
