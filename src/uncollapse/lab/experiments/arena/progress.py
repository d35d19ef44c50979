"""How far each row of the arena is: its trials, and then its fresh seeds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from uncollapse.lab.config.fields import identity
from uncollapse.lab.experiments.arena.config import NAME, Config, group_of, row_of
from uncollapse.lab.runs.grids import Grid, GridCell
from uncollapse.lab.tables.selection import Record

Grids = Mapping[str, Sequence[Grid]]
At = tuple[str, str, int]  # group, row, depth


@dataclass(frozen=True)
class Progress:
    """How far a row of a sweep is.

    grid: the name of the sweep. at: group, row and depth. begun: whether anything of it was run. lacks: how far it is,
    such as "3 of 9 trials"; empty if it is complete. chooses: whether it has trials to choose from.
    """

    grid: str
    at: At
    begun: bool
    lacks: str
    chooses: bool


def list_progress(grids: Grids, records: Sequence[Record]) -> Iterator[Progress]:
    """Yield how far each row of each sweep is."""
    done = {identity(NAME, Config(**r["config"])): r for r in records}
    for name, cell in ((name, cell) for name, of in grids.items() for grid in of for cell in grid.cells(Config)):
        first = vars(cell.trials[0])
        begun, lacks = _count(cell, done)
        yield Progress(name, (group_of(first), row_of(first), first["depth"]), begun, lacks, bool(cell.choose))


def unfinished_rows(grids: Grids, records: Sequence[Record]) -> dict[At, str]:
    """Return the rows whose choice or seeds are not complete, with how far they are.

    A row may have seeds and yet lack trials, such as after its sweep got other learning rates.
    """
    return {each.at: each.lacks for each in list_progress(grids, records) if each.chooses and each.lacks}


def _count(cell: GridCell, done: Mapping[str, Record]) -> tuple[bool, str]:
    """Return whether a row has begun, and how far it is; empty if it is complete."""
    trials = [done[name] for name in (identity(NAME, trial) for trial in cell.trials) if name in done]
    if len(trials) < len(cell.trials):
        return bool(trials), f"{len(trials)} of {len(cell.trials)} trials"
    seeds = [identity(NAME, follower) in done for follower in cell.followers(trials)]
    return True, "" if all(seeds) else f"{sum(seeds)} of {len(seeds)} seeds"
