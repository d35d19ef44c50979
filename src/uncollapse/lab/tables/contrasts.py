"""Compare rows of a table seed by seed, as its contrasts ask: differences, intervals, and tests of one family."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from uncollapse.lab.tables.paper_table import Contrast, PaperTable, TableCell
from uncollapse.lab.tables.significance import Paired, adjust, compare

HEAD = ("comparison", "mean", "95 % interval", "seeds", "p", "Holm p")
NONE = "–"


@dataclass(frozen=True)
class Comparison:
    """The difference row − rival in one place of a table, in its unit.

    holm: p adjusted over all comparisons of the table that have at least two pairs; None for a single pair, which
    cannot be tested. failed: seeds without a difference, because a run of the row or of the rival did not stay finite.
    """

    group: Any
    column: Any
    row: Any
    rival: Any
    paired: Paired
    holm: float | None = None
    failed: tuple[int, ...] = ()


def compare_rows(table: PaperTable, cells: Sequence[TableCell]) -> list[Comparison]:
    """Return the comparisons of a table, in the order of its cells, where both sides have results of the same seed.

    Cells with different settings of the protocol are not compared: their difference is not that of the rows alone.
    """
    found = list(_pairs(table, cells))
    adjusted = adjust([pair for _, _, pair, _ in found])
    return [
        Comparison(cell.group, cell.column, cell.row, rival, pair, p, failed)
        for (cell, rival, pair, failed), p in zip(found, adjusted, strict=True)
    ]


def _pairs(table: PaperTable, cells: Sequence[TableCell]) -> Iterator[tuple[TableCell, Any, Paired, tuple[int, ...]]]:
    """Yield a cell, its rival, the differences, and the seeds that have none because a run did not stay finite."""
    at = {(cell.group, cell.row, cell.column): cell for cell in cells}
    for cell in cells:
        for contrast in _asked(table, cell):
            rival = at.get((cell.group, contrast.rival, cell.column))
            if rival is None or rival is cell or _deviation(table, cell) != _deviation(table, rival):
                continue
            if cell.figures.keys() & rival.figures.keys():
                failed = tuple(sorted({*cell.failed, *rival.failed}))
                yield cell, contrast.rival, compare(cell.figures, rival.figures), failed


def list_uncompared(table: PaperTable, cells: Sequence[TableCell]) -> list[TableCell]:
    """Return the cells of comparisons that are left out, because the settings of the two cells are different."""
    at = {(cell.group, cell.row, cell.column): cell for cell in cells}
    found = []
    for cell in cells:
        rivals = (at.get((cell.group, contrast.rival, cell.column)) for contrast in _asked(table, cell))
        unlike = [
            rival for rival in rivals if rival is not None and _deviation(table, rival) != _deviation(table, cell)
        ]
        found += [cell] if any(cell.figures.keys() & rival.figures.keys() for rival in unlike) else []
    return found


def _deviation(table: PaperTable, cell: TableCell) -> dict[str, Any]:
    """Return the settings of a cell that are not the protocol's; nothing if the table has no protocol."""
    return {name: value for name, value in cell.unusual.items() if name in table.protocol and name not in table.free}


def _asked(table: PaperTable, cell: TableCell) -> list[Contrast]:
    """Return the comparisons of a table that are about a cell."""
    return [
        contrast
        for contrast in table.contrasts
        if contrast.row in (None, cell.row) and (not contrast.columns or cell.column in contrast.columns)
    ]


def contrast_rows(table: PaperTable, found: Sequence[Comparison]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and the rows of a table of comparisons, as text."""
    rows: list[tuple[str, ...]] = []
    for each in found:
        failed = f", {len(each.failed)} not finite" if each.failed else ""
        words = str(each.group), str(each.column), f"{each.row} − {each.rival}"
        rows.append((*words, *paired_texts(each.paired, each.holm, _spec(table), failed)))
    return (table.groups, table.columns, *HEAD), rows


def paired_texts(pair: Paired, adjusted: float | None, spec: str, failed: str = "") -> tuple[str, ...]:
    """Return what `HEAD` lists after the comparison. spec: format of the mean. failed: follows the number of seeds."""
    interval = " … ".join(_signed(end, spec) for end in pair.interval or ()) or NONE
    tests = (NONE, NONE) if adjusted is None else (f"{pair.p:.2g}", f"{adjusted:.2g}")
    return _signed(pair.mean, spec), interval, f"{pair.n}{failed}", *tests


def contrast_note(found: Sequence[Comparison]) -> str:
    """Return how to read the comparisons."""
    tested = [each for each in found if each.holm is not None]
    said = ["Differences between runs of the same seed, with Student's 95 % interval of their mean."]
    if any(each.failed for each in found):
        said.append("A seed whose run did not stay finite has no difference: the mean is of the others.")
    if tested:
        said.append(
            "p: exact sign-flip test; with n seeds it cannot be below 2/2ⁿ, which is 0.0625 for five. "
            f"Holm p: adjusted for the {len(tested)} {'test' if len(tested) == 1 else 'tests'} of this table."
        )
    return " ".join(said)


def contrast_json(table: PaperTable, found: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Return the comparisons as plain data for JSON, in the unit of the table."""
    return [
        {
            table.groups: each.group,
            table.columns: each.column,
            "row": each.row,
            "rival": each.rival,
            "mean": each.paired.mean,
            "interval": each.paired.interval,
            "n": each.paired.n,
            "p": each.paired.p,
            "holm": each.holm,
            "failed": list(each.failed),
            "seeds": {str(seed): value for seed, value in each.paired.differences.items()},
        }
        for each in found
    ]


def format_interval(table: PaperTable, interval: tuple[float, float]) -> str:
    """Return an interval of a difference in words."""
    return " … ".join(format_signed(table, end) for end in interval)


def format_signed(table: PaperTable, value: float) -> str:
    """Return a difference with its sign."""
    return _signed(value, _spec(table))


def _spec(table: PaperTable) -> str:
    return "+.2f" if table.percent else "+.3g"


def _signed(value: float, spec: str) -> str:
    return f"{value:{spec}}".replace("-", "−")
