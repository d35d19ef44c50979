"""The page of a search: its plots."""

from uncollapse.tuning.search_page import draw_history
from uncollapse.tuning.trial_result import TrialResult


def test_all_names_of_the_legend_fit_into_the_plot() -> None:
    trials = [TrialResult(number, {"scale": 0.1}, 0.5 + 0.1 * number, "done") for number in range(3)]
    stopped = TrialResult(3, {"scale": 0.2}, None, "pruned", 2, curve={1: 0.2, 2: 0.3})
    figure = draw_history([*trials, stopped], "validation accuracy", "higher")
    figure.canvas.draw()
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["trial", "best so far", "stopped early, last validation accuracy", "without a cure"]
    assert legend.get_window_extent().x1 <= figure.bbox.x1
