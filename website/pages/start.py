"""Plot and numbers of the start page, from results/before_after.json."""

import json
import statistics
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from uncollapse.report.canvas import INK, LINE, MARKERS, new_figure, save_figure, series_colour
from website.pages.boards import IMAGES, RESULTS

NAME = "before_after"


@cache
def record() -> dict[str, Any]:
    """Return what `python -m experiments.before_after` wrote."""
    result: dict[str, Any] = json.loads((RESULTS / f"{NAME}.json").read_text(encoding="utf-8"))
    return result


def numbers() -> str:
    """Return the sentence below the plot: what was trained, and both accuracies over the seeds."""
    before, after = (accuracies(when) for when in ("before", "after"))
    depth = record()["config"]["depth"]
    return (
        f"A graph network of {depth} layers on the random graph that comes with the package, trained as it is and with "
        f"the advice that its diagnosis printed: test accuracy {spread(before)} → {spread(after)}, one line per seed "
        "(`python -m experiments.before_after`). [Deep graph networks](graphs.md) has real graphs, and cases with less "
        "gain."
    )


def accuracies(when: str) -> list[float]:
    """Return the test accuracy of each seed, in percent."""
    return [100 * run[when]["test"] for run in record()["runs"]]


def spread(values: list[float]) -> str:
    """Return mean ± standard deviation."""
    return f"{statistics.fmean(values):.0f} ± {statistics.stdev(values):.0f} %"


def draw() -> Iterator[Path]:
    """Draw the effective rank by layer before and after, a line per seed, with the advice between them."""
    figure, (before, advice, after) = new_figure("", (10.5, 3.0), 3)
    for number, (axes, when) in enumerate(((after, "after"), (before, "before"))):
        colour, marker = series_colour(number), MARKERS[number]
        for run in record()["runs"]:
            ranks = run[when]["effective_rank"]
            axes.plot(range(1, len(ranks) + 1), ranks, color=colour, lw=1.6, marker=marker, markersize=3.5)
        axes.set_yscale("log")
        axes.set(ylim=(1, record()["config"]["width"]), xlabel="layer", ylabel="dimensions in use")
        axes.set_yticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
        axes.minorticks_off()
        axes.set_title(f"{when.capitalize()}: {spread(accuracies(when))} accuracy", fontsize=11, color=INK, loc="left")
        axes.grid(axis="y", color=LINE, linewidth=0.8)
    _advice(advice)
    yield save_figure(figure, IMAGES / f"{NAME}.svg")


def _advice(axes: Any) -> None:
    """Write what the diagnosis says, and the line to copy."""
    axes.set_axis_off()
    axes.set_title("Advice", fontsize=11, color=INK, loc="left")
    run = record()["runs"][0]
    found = f"Diagnosis: {run['before']['verdict']} collapse"
    if run["before"]["verdict"] == "both":
        found = "Diagnosis: complete and dimensional collapse"
    words = "\n".join(textwrap.wrap(f"{found} from {run['before']['onset']} on. Try:", 34))
    axes.text(0, 0.92, words, fontsize=10, color=INK, va="top", transform=axes.transAxes)
    code = run["advice"].replace("(model, ", "(\n  model,\n  ").replace(", ", ",\n  ").replace("\n  \n", "\n")
    look = {"fontsize": 9.5, "family": "monospace", "color": series_colour(0)}
    axes.text(0.03, 0.62, code[:-1] + "\n)", va="top", transform=axes.transAxes, **look)


TEXTS: dict[str, Callable[[], str]] = {NAME: numbers}
