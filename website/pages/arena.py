"""Tables and plots of the arena and of the demo, from results/arena, and the measured gains that advice reads.

python -m website.pages.arena    # writes the gains and draws the plots, after new results
"""

import json
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from uncollapse.diagnosis import reference_data
from uncollapse.io.files import write
from uncollapse.lab.experiments.arena.config import group_of
from uncollapse.lab.experiments.arena.pages import BEFORE_AFTER, draw_plots, missing_table, unfinished_rows
from uncollapse.lab.experiments.arena.recipe import RECIPE, TABLE, collect_gains
from uncollapse.lab.experiments.arena.standings import NONE, Standing, build_standings
from uncollapse.lab.tables.contrasts import format_interval, format_signed
from uncollapse.lab.tables.significance import Paired, mean_interval
from uncollapse.report.canvas import (
    INK,
    LINE,
    QUIET,
    add_legend_below,
    new_figure,
    series_color,
    series_marker,
    series_style,
)
from website import reference
from website.pages.results import IMAGES, NOT_RUN, ROOT, Row, records
from website.plots import save

GAINS = ROOT / "src" / "uncollapse" / "diagnosis" / reference_data.GAINS_FILE
DEMO = "gcn, csbm 1"
HEAD = ("cure", "test accuracy", "gain over none", "gain at equal time", "seconds", "MB", *BEFORE_AFTER)
PLOTS = ("score over seconds", "rank and gain", "learning rates")
RIVALS = ("shallower", "more epochs", "contra_norm")
SHOWN = 3  # rows of the table of advice, per kind of model


@cache
def standings() -> tuple[Standing, ...]:
    """Return all rows with fresh seeds."""
    found = records(RECIPE.name)
    return tuple(build_standings(TABLE, found, unfinished_rows(RECIPE.grids, found)))


def places() -> dict[tuple[str, int], list[Standing]]:
    """Return the rows of each task and depth, the plain model first and then the best gain."""
    found: dict[tuple[str, int], list[Standing]] = {}
    for each in standings():
        found.setdefault((each.group, each.depth), []).append(each)
    return {at: sorted(rows, key=lambda each: (each.row != NONE, -each.mean)) for at, rows in found.items()}


def tables(*tasks: str) -> str:
    """One table per task and depth, with all rows and the plots of the task; words where nothing was run."""
    parts: list[str] = []
    drawn: set[str] = set()
    for (group, depth), rows in places().items():
        if group.partition(",")[0] in tasks:
            title = f"### {group}, {depth} blocks{': the graph of the demo' if group == DEMO else ''}"
            plots = [] if group in drawn else _plots(group)
            parts += [title, reference.table(HEAD, map(_row, rows)), *plots]
            drawn.add(group)
    return "\n\n".join(parts) or NOT_RUN


def _row(each: Standing) -> Row:
    deviation = f" ± {statistics.stdev(each.scores.values()):.1f}" if len(each.scores) > 1 else ""
    failed = f", {len(each.failed)} not finite" if each.failed else ""
    return (
        f"`{each.row}`{f' ({each.lacks})' if each.lacks else ''}",
        f"{each.mean:.1f}{deviation} ({len(each.scores)}{failed})",
        _gain(each.gain.paired if each.gain else None),
        _gain(each.gain_in_time, _short_of_time(each)),
        f"{each.seconds:.1f}",
        f"{each.megabytes:.0f}",
        " → ".join(f"{rank:.1f}" for rank in each.ranks),
        " → ".join(each.verdicts),
    )


def _short_of_time(each: Standing) -> str:
    less = each.plain_seconds
    return "" if less is None else f"plain {less:.0f} of {each.seconds:.0f} s"


def _gain(paired: Paired | None, short: str = "") -> str:
    if paired is None:
        return "–"
    interval = f"<br>({format_interval(TABLE, paired.interval)})" if paired.interval else ""
    text = f"{format_signed(TABLE, paired.mean)}{interval}{f'<br>{short}' if short else ''}"
    return text.replace(" …", "\u00a0…")  # an interval is broken before its end at most


def advice() -> str:
    """The best rows by the lower bound of their gain, for each kind of model and depth; what advice says."""
    rows = [
        (measured.kind, str(measured.depth), f"`{gain.row}`", gain.numbers, ", ".join(measured.data), measured.cause)
        for measured in reference_data.all_measured()
        for gain in measured.gains[:SHOWN]
    ]
    head = ("model", "blocks", "what helped", "gain", "measured on", "verdict of the plain model")
    return reference.table(head, rows) if rows else NOT_RUN


def ends() -> str:
    """The rows whose chosen value is the lowest or the highest that was tried; words where there are none."""
    rows = [
        (each.group, str(each.depth), f"`{each.row}`", each.choice)
        for each in standings()
        if "(" in each.choice  # a value at an end is marked
    ]
    return reference.table(("task", "blocks", "row", "chosen"), rows) if rows else "None."


def missing() -> str:
    """What the sweeps still lack."""
    table = missing_table(RECIPE.grids, records(RECIPE.name))
    if not table.rows:
        return table.note
    return f"{reference.table(table.head, table.rows)}\n\n    uncollapse sweep arena --grid NAME"


def _plots(group: str) -> list[str]:
    """Return the plots of a task, if they were drawn."""
    titles = [f"{group}: {name}" for name in PLOTS]
    return [f"![{title}](images/{_image(title).name})" for title in titles if _image(title).exists()]


def demo() -> str:
    """The demo's rows over all seeds, next to what other graphs predicted."""
    rows = demo_rows()
    if not rows:
        return NOT_RUN
    predicted = predictions()
    lines = []
    for each in rows:
        gain = each.gain.paired if each.gain else None
        prediction = predicted[each.row].text if each.row in predicted else "–"
        lines.append((*_row(each)[:2], _gain(gain), prediction, f"{each.seconds:.1f}", each.verdicts[1]))
    head = ("row", "test accuracy", "gain over none", "predicted gain", "seconds", "verdict after training")
    return reference.table(head, lines)


def demo_sentence() -> str:
    """What the demo trains, and what came of the advice, over all seeds."""
    rows, found = {each.row: each for each in demo_rows()}, predictions()
    if NONE not in rows or not found:
        return NOT_RUN
    plain, best = rows[NONE], next(rows[row] for row in found if row in rows)
    here = best.gain.paired.mean if best.gain else 0.0
    said = (
        f"A plain graph network of {plain.depth} layers reaches a test accuracy of only {plain.mean:.0f} % on a random "
        f"graph. The diagnosis first recommends `{best.row}`, which gained {found[best.row].text} on other graphs. "
        f"Here it reaches {best.mean:.0f} %, a gain of {reference_data.format_points(here)} points over "
        f"{len(best.scores)} seeds."
    )
    others = ", ".join(f"`{row}` {rows[row].mean:.0f} %" for row in RIVALS if row in rows and row != best.row)
    return f"{said} For comparison: {others} ([Which cure should I try?](which-cure.md))."


def demo_rows() -> list[Standing]:
    """Return the rows of the demo's graph."""
    return next((rows for (group, _), rows in places().items() if group == DEMO), [])


def predictions() -> dict[str, reference_data.Gain]:
    """Return the gains that other graphs predict for the demo, by row."""
    (plain,) = [each for each in demo_rows() if each.row == NONE]
    measured = reference_data.find_measured("graph network", plain.depth, plain.verdicts[1])
    return {} if measured is None else {gain.row: gain for gain in measured.gains}


def draw() -> Iterator[Path]:
    """Write the measured gains, and draw the plots of each task and of the demo."""
    found = collect_gains(records(RECIPE.name))
    yield write(GAINS, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    reference_data.all_measured.cache_clear()
    for plot in draw_plots(TABLE, records(RECIPE.name)):
        yield save(plot.figure, _image(plot.title))
    if demo_rows():
        yield _draw_demo(demo_rows())


def _draw_demo(rows: Sequence[Standing]) -> Path:
    """Draw the effective rank by layer, and the accuracy of all rows with the predicted ones."""
    plain = rows[0]
    figure, (ranks, scores) = new_figure(
        f"A plain graph network of {plain.depth} layers fails; what was tried, and what was predicted", (11.0, 4.2), 2
    )
    for number, each in enumerate(rows):
        _draw_ranks(ranks, number, each)
        values = list(each.scores.values())
        interval = mean_interval(each.mean, statistics.stdev(values), len(values)) if len(values) > 1 else None
        half = interval[1] - each.mean if interval else 0.0
        color = series_color(number)
        scores.barh([number], [each.mean], xerr=[half], color=color, height=0.6, error_kw={"ecolor": INK})
        if prediction := predictions().get(each.row):
            low, high = plain.mean + prediction.low, plain.mean + prediction.high
            scores.plot([low, high], [number + 0.4] * 2, color=QUIET, linewidth=3, solid_capstyle="butt")
    ranks.plot([], [], color=QUIET, linewidth=3, label="predicted, 95 %")  # for the legend below both panels
    scores.set_yticks(range(len(rows)), [each.row for each in rows], parse_math=False)
    scores.invert_yaxis()
    scores.set_xlabel("test accuracy, %,\nwith 95 % intervals", color=INK)
    ranks.set(xlabel="layer", ylabel="effective rank of the nodes")
    ranks.grid(axis="y", color=LINE, linewidth=0.8)
    add_legend_below(figure, ranks, 4)
    return save(figure, IMAGES / "demo.svg")


def _draw_ranks(axes: Any, number: int, each: Standing) -> None:
    runs = [r for r in records(RECIPE.name) if group_of(r["config"]) == DEMO and _is_of(r, each)]
    layers = [[layer["effective_rank"] for layer in run["diagnosis"]["after"]["layers"][:-1]] for run in runs]
    means = [statistics.fmean(values) for values in zip(*layers, strict=True)]
    look = series_style(number) | {"marker": series_marker(number), "markersize": 4}
    axes.plot(range(1, len(means) + 1), means, label=each.row, **look)


def _is_of(record: Any, each: Standing) -> bool:
    return bool(TABLE.place(record)[1] == each.row)


def _image(title: str) -> Path:
    return IMAGES / f"arena_{re.sub(r'[^a-z0-9]+', '_', title.lower())}.svg"


TEXTS: dict[str, Callable[[], str]] = {
    "arena_graphs": partial(tables, "gcn"),
    "arena_images": partial(tables, "vit-digits", "vit-cifar"),
    "arena_text": partial(tables, "bert", "decoder"),
    "arena_advice": advice,
    "arena_ends": ends,
    "arena_missing": missing,
    "demo": demo,
    "demo_sentence": demo_sentence,
}


if __name__ == "__main__":
    for path in draw():
        print(path.relative_to(ROOT))
