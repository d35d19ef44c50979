"""Draw effective rank by block, with and without ContraNorm, from the figures of `uncollapse demo --json FILE`.

    python examples/figure_rank.py [results/demo_rank.json] [docs/images/rank.svg]

The picture is a white card with letters drawn as paths: it looks the same on light and dark pages and needs no font.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

INK, FAINT = "#333333", "#8a8a8a"
LINES = (("plain", "as it is", "#c2452d"), ("contra_norm", "with ContraNorm", "#2a6fbb"))


def draw(result: dict[str, Any]) -> Figure:
    """One line for each of the two runs, named at its end."""
    size = result["config"]
    figure = Figure(figsize=(7.2, 3.6), facecolor="white", layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    axes = figure.add_subplot()
    for key, name, colour in LINES:
        blocks = [row["block"] for row in result[key]]
        ranks = [row["effective_rank"] for row in result[key]]
        axes.plot(blocks, ranks, color=colour, linewidth=2.2)
        axes.annotate(
            f"{name}: {ranks[-1]:.0f}",
            (blocks[-1], ranks[-1]),
            xytext=(7, 0),
            textcoords="offset points",
            color=colour,
            va="center",
        )
    axes.set_xlim(0, size["blocks"])
    axes.set_ylim(0, min(size["tokens"], size["dim"]))
    axes.set_xticks(range(0, size["blocks"] + 1, 8))
    axes.set_xlabel("block", color=INK)
    axes.set_ylabel("effective rank of the tokens", color=INK)
    title = f"An untrained Transformer of {size['blocks']} blocks, {size['tokens']} tokens, width {size['dim']}"
    axes.set_title(title, color=INK, loc="left", fontsize=11)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.tick_params(colors=FAINT, labelcolor=INK, length=3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    return figure


def main(source: str = "results/demo_rank.json", target: str = "docs/images/rank.svg") -> None:
    """Read the figures, write the picture; the same figures give the same file."""
    result = json.loads(Path(source).read_text(encoding="utf-8"))
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": "uncollapse", "font.size": 10}):
        draw(result).savefig(target, dpi=150, metadata={"Date": None} if target.endswith(".svg") else None)


if __name__ == "__main__":
    main(*sys.argv[1:])
