"""Grids of configurations: all combinations of some fields' values, some of them chosen on validation."""

import dataclasses
import re
import shlex
import typing
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from uncollapse.errors import UsageError, did_you_mean
from uncollapse.lab.config.fields import build, config_fields, parse_values
from uncollapse.lab.tables.selection import select_best

SEED = "seed"
RANGE = re.compile(r"(\d+)-(\d+)")


@dataclass(frozen=True)
class GridCell:
    """Configurations that compete, and the seeds that the best of them runs with afterwards.

    trials: configurations that differ only in the fields `choose` and in the seed; one if nothing is chosen.
    seeds: further seeds. by: the metric that chooses.
    """

    trials: tuple[Any, ...]
    seeds: tuple[int, ...] = ()
    choose: tuple[str, ...] = ()
    by: str = "validation"

    def followers(self, records: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
        """Return the configurations to run after the trials: the best one with the further seeds.

        records: of the trials, in their order. The winner is the one that a table of results would choose, see
        `selection.select_best`.
        """
        if not self.seeds:
            return ()
        if not any(self.by in record["figures"] for record in records):
            there = records[0]["figures"]
            raise UsageError(
                f"There is no metric {self.by!r} to choose by; there are: {', '.join(there)}."
                f"{did_you_mean(self.by, there)}"
            )
        rivals: dict[tuple[Any, ...], Any] = {}
        runs: dict[tuple[Any, ...], dict[int, Mapping[str, Any]]] = defaultdict(dict)
        for trial, record in zip(self.trials, records, strict=True):
            values = tuple(getattr(trial, name) for name in self.choose)
            rivals[values], runs[values][trial.seed] = trial, record
        winner = rivals[select_best(runs, self.by)]
        return tuple(dataclasses.replace(winner, seed=seed) for seed in self.seeds)


@dataclass(frozen=True)
class Grid:
    """All combinations of the values of some fields.

    Without `choose`, all of them run. With `choose`, each combination of the other fields (a cell) runs in two stages:
    first all values of the chosen fields with the first seeds; then the other seeds with the best of these values.

    Args:
        values: Values of each field, as text or in the field's type.
        choose: Fields whose best values are chosen.
        by: The metric that chooses; the highest mean over the first seeds is best.
        seeds_to_choose: Number of seeds in the first stage.
    """

    values: Mapping[str, Sequence[Any]]
    choose: tuple[str, ...] = ()
    by: str = "validation"
    seeds_to_choose: int = 1

    def __post_init__(self) -> None:
        if self.seeds_to_choose < 1:
            raise UsageError(f"seeds_to_choose must be at least 1, got {self.seeds_to_choose}.")
        for name, values in self.values.items():
            if isinstance(values, str) or not values:
                raise UsageError(f"{name} needs values to combine, such as ({values!r},), got {values!r}.")
        for name in self.choose:
            if name not in self.values or name == SEED:
                there = [field for field in self.values if field != SEED]
                hint = did_you_mean(name, there)
                raise UsageError(f"The grid has no {name!r} to choose; it has: {', '.join(there)}.{hint}")

    def cells(self, config: type, fixed: Mapping[str, Any] | None = None) -> list[GridCell]:
        """Return the cells, in the order of the fields.

        fixed: fields that all configurations share. One that the grid has narrows it to that value: a grid without
        the value has no cells.

        >>> @dataclasses.dataclass(frozen=True)
        ... class Config:
        ...     scale: float = 1.0
        ...     seed: int = 0
        >>> (cell,) = Grid({"scale": (0.5, 1.0), "seed": (0, 1, 2)}, choose=("scale",)).cells(Config)
        >>> cell.trials
        (Config(scale=0.5, seed=0), Config(scale=1.0, seed=0))
        >>> cell.followers([{"figures": {"validation": 0.7}}, {"figures": {"validation": 0.6}}])
        (Config(scale=0.5, seed=1), Config(scale=0.5, seed=2))
        """
        shared = dict(fixed or {})
        every = self._narrow(config, shared)
        if not self.choose:
            return [GridCell((build(config, shared | point),)) for point in _combinations(every)]
        seeds = list(dict.fromkeys(build(config, {SEED: seed}).seed for seed in every.get(SEED, ())))
        first = [{SEED: seed} for seed in seeds[: self.seeds_to_choose]] or [{}]
        rivals = {name: every[name] for name in self.choose}
        others = {name: values for name, values in every.items() if name not in rivals and name != SEED}
        found = []
        for point in _combinations(others):
            trials = (build(config, shared | point | seed | rival) for seed in first for rival in _combinations(rivals))
            rest = tuple(seeds[self.seeds_to_choose :])
            found.append(GridCell(tuple(dict.fromkeys(trials)), rest, self.choose, self.by))
        return found

    def _narrow(self, config: type, fixed: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
        """Return the values of each field, only the fixed one where there is one."""
        chosen = {*self.choose, SEED} if self.choose else set()
        if both := sorted(chosen & fixed.keys() & self.values.keys()):
            raise UsageError(f"{both[0]} is both fixed and part of the grid's choice; leave out one of the two.")
        every = dict(self.values)
        for name in fixed.keys() & every.keys():
            wanted = parse_values(config, {name: fixed[name]})
            every[name] = [value for value in every[name] if parse_values(config, {name: value}) == wanted]
        return every


def parse_grid(text: str, config: type, choose: tuple[str, ...] = (), by: str = "validation") -> Grid:
    """Parse a grid such as "data=cora,citeseer layers=2,4 seed=0-4", where 0-4 stands for 0,1,2,3,4.

    Args:
        text: Fields separated by spaces, each with values separated by commas.
        config: The dataclass that has the fields.
        choose: Fields whose best values are chosen; those that this grid does not have are ignored.
        by: The metric that chooses.
    """
    values: dict[str, list[str]] = {}
    for part in _split_fields(text):
        name, equals, words = part.partition("=")
        name = name.replace("-", "_")
        if not (name and equals and words):
            raise UsageError(f"A grid has fields with values, such as 'layers=2,4 seed=0-4', got {part!r}.")
        if name in values:
            raise UsageError(f"The grid names {name} twice; give all its values once, separated by commas.")
        if name not in config_fields(config):
            build(config, {name: words})  # raises with the names that exist
        values[name] = list(dict.fromkeys(_expand_ranges(words, _is_integer(config, name))))
    return Grid(values, tuple(name for name in choose if name in values), by)


def _split_fields(text: str) -> list[str]:
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"The grid {text!r} cannot be read: {error}.") from error
    if not parts:
        raise UsageError("The grid is empty; write fields with values, such as 'layers=2,4 seed=0-4'.")
    return parts


def _expand_ranges(words: str, integers: bool) -> Iterator[str]:
    for word in words.split(","):
        ends = RANGE.fullmatch(word.strip()) if integers else None
        if ends is None:
            yield word.strip()
            continue
        first, last = map(int, ends.groups())
        if last < first:
            raise UsageError(f"The range {word} runs backwards; write {last}-{first}.")
        yield from map(str, range(first, last + 1))


def _is_integer(config: type, name: str) -> bool:
    kind = config_fields(config)[name].annotation
    return kind is int or int in typing.get_args(kind)


def _combinations(values: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    return (dict(zip(values, point, strict=True)) for point in product(*values.values()))
