"""What pages of recipes share: tables and grids as Markdown, from results/."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from uncollapse.lab.recipe import RECIPES
from uncollapse.lab.runs.results import Results
from uncollapse.lab.runs.run_queue import RunQueue
from uncollapse.lab.tables.contrasts import HEAD, paired_texts
from uncollapse.lab.tables.markdown import to_markdown
from uncollapse.lab.tables.paper_table import PaperTable
from uncollapse.lab.tables.selection import Record
from uncollapse.lab.tables.significance import adjust, compare

ROOT = Path(__file__).parents[2]
RESULTS, IMAGES = ROOT / "results", ROOT / "docs" / "images"
NOT_RUN = "Not run yet."
TOGETHER = re.compile(r"(?<=\d) (?=[±(])|(?<=±) |(?<=paper) (?=\d)")  # where a line must not be broken

Row = tuple[str, ...]
Seeds = Mapping[int, float]  # a metric by seed


@cache
def records(recipe: str) -> tuple[Record, ...]:
    """All results of a recipe."""
    return tuple(Results(RESULTS).all(RECIPES[recipe]))


def paper_table(table: PaperTable, mine: Sequence[Record]) -> str:
    """A table of a recipe, one part per group; words instead where nothing was run."""
    if not mine:
        return NOT_RUN
    _, _, tables = to_markdown(table, mine).partition("\n\n")  # without its title: the page has one
    return TOGETHER.sub("\u00a0", tables)


def grids(*recipes: str) -> tuple[Row, Sequence[Row]]:
    """The named grids: how many runs they have, how many are done, and how long these took."""
    head = ("grid", "runs", "finished", "core hours of these")
    rows = []
    for recipe in map(RECIPES.__getitem__, recipes):
        for name, of in recipe.grids.items():
            agenda = RunQueue(recipe, [cell for grid in of for cell in grid.cells(recipe.config)], Results(RESULTS))
            hours = sum(record["seconds"] for record in agenda.records.values()) / 3600
            shown = f"`{name}`" if len(recipes) == 1 else f"`{recipe.name} --grid {name}`"
            rows.append((shown, str(agenda.total), str(len(agenda.records)), f"{hours:.1f}"))
    return head, rows


def differences(
    pairs: Mapping[tuple[str, str], tuple[Seeds, Seeds]], what: str, digits: int
) -> tuple[Row, Sequence[Row]]:
    """Differences of metrics by seed, with their 95 % interval, the exact sign-flip test, and Holm's correction.

    pairs: by the metric and the words for "one − other", both metrics by seed. what: heading of the metric.
    """
    found = {words: compare(*both) for words, both in pairs.items() if both[0].keys() & both[1].keys()}
    adjusted = adjust(list(found.values()))
    spec = f"+.{digits}f"
    rows = [(*words, *paired_texts(found[words], p, spec)) for words, p in zip(found, adjusted, strict=True)]
    return (what, *HEAD), rows
