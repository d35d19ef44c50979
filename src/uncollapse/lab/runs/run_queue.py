"""Queue of a sweep's runs: those that are done, missing, and added once others are done."""

import statistics
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from uncollapse.lab.config.fields import identity
from uncollapse.lab.runs.grids import GridCell
from uncollapse.lab.runs.results import Results

if TYPE_CHECKING:
    from uncollapse.lab.recipe import Recipe


class RunQueue:
    """The runs of a few cells, each of them once.

    records: of those that are done, by identity. open: configurations that nobody has begun. failed: why, by identity.
    judged: the figure by which runs may be stopped before their end; None lets all of them go on.
    """

    judged: str | None = None

    def __init__(self, recipe: "Recipe", cells: Iterable[GridCell], results: Results) -> None:
        self.recipe, self.results = recipe, results
        self.records: dict[str, dict[str, Any]] = {}
        self.open: dict[str, Any] = {}
        self.failed: dict[str, str] = {}
        self._configs: dict[str, Any] = {}
        self._ratios: list[float] = []
        self._waiting: list[GridCell] = []
        self._contests: list[GridCell] = []
        for cell in cells:
            for config in cell.trials:
                self._add(config)
            if cell.seeds:
                self._waiting.append(cell)
            if len(cell.trials) > 1:
                self._contests.append(cell)
        self._unfold()
        self.found = len(self.records)

    @property
    def total(self) -> int:
        """All runs, with those that are not known yet."""
        return len(self._configs) + self.later

    @property
    def done(self) -> int:
        """Runs whose records are there."""
        return len(self.records)

    @property
    def later(self) -> int:
        """Runs that are known once the best of a cell is."""
        return sum(len(cell.seeds) for cell in self._waiting)

    def key(self, config: Any) -> str:
        """What tells a configuration from all others."""
        return identity(self.recipe.name, config)

    def label(self, config: Any) -> str:
        """What a run is called where others are named too: its file. The name alone may leave out where they differ."""
        return self.results.path(self.recipe, config).stem

    def config(self, key: str) -> Any:
        """The configuration that has this key."""
        return self._configs[key]

    def seconds(self, config: Any) -> float:
        """How long a run takes on one core: the recipe's guess, in the measure of what it was wrong by so far."""
        return self.recipe.cost(config) * (statistics.median(self._ratios) if self._ratios else 1.0)

    def seconds_open(self) -> float:
        """How long all takes that nobody has begun, on one core."""
        later = sum(len(cell.seeds) * statistics.fmean(map(self.seconds, cell.trials)) for cell in self._waiting)
        return later + sum(map(self.seconds, self.open.values()))

    def missing(self) -> list[Any]:
        """What is open, cheapest first."""
        return sorted(self.open.values(), key=self.recipe.cost)

    def chosen(self) -> list[tuple[GridCell, Any]]:
        """The cells that had several trials, with the best of these, as far as all are done."""
        found = []
        for cell in self._contests:
            records = [self.records[key] for key in map(self.key, cell.trials) if key in self.records]
            if len(records) == len(cell.trials) and any(cell.by in record["figures"] for record in records):
                own = replace(cell, seeds=(cell.trials[0].seed,))  # the best, run with its own seed, is that trial
                found.append((cell, *own.followers(records)))
        return found

    def take(self) -> Any | None:
        """The cheapest one that is open, which then no longer is; None if there is none.

        A result that came meanwhile, from another sweep, is not run again.
        """
        while self.open:
            config = self.open.pop(min(self.open, key=lambda key: self.recipe.cost(self.open[key])))
            if not self.look_up(config):
                return config
        return None

    def put_back(self, config: Any) -> None:
        """It was taken and not run."""
        self.open[self.key(config)] = config

    def fail(self, config: Any, why: str) -> None:
        """It was run and came to nothing."""
        self.failed[self.key(config)] = why

    def may_retry(self, config: Any) -> bool:
        """Whether a run whose process was killed is tried again at once."""
        return False

    def judge(self, config: Any, epoch: int, figure: float, seconds: float) -> bool:
        """Whether a run should be stopped. figure: the one that is judged, after an epoch and so many seconds."""
        return False

    def prune(self, config: Any) -> None:
        """It was stopped."""

    def look_up(self, config: Any) -> bool:
        """Whether there is a result by now. What only waited for it is open from now on."""
        record = self.results.find(self.recipe, config)
        if record is None:
            return False
        self._note(config, record)
        self._unfold()
        return True

    def _add(self, config: Any) -> None:
        key = self.key(config)
        if key in self._configs:
            return
        self._configs[key] = config
        record = self.results.find(self.recipe, config)
        if record is None:
            self.open[key] = config
        else:
            self._note(config, record)

    def _note(self, config: Any, record: dict[str, Any]) -> None:
        self.records[self.key(config)] = record
        guess, measured = self.recipe.cost(config), record.get("seconds")
        if guess > 0 and measured:
            self._ratios.append(measured / guess)

    def _unfold(self) -> None:
        """Add what follows in the cells whose trials are all done."""
        waiting, self._waiting = self._waiting, []
        for cell in waiting:
            keys = [self.key(config) for config in cell.trials]
            if not all(key in self.records for key in keys):
                self._waiting.append(cell)
                continue
            for config in cell.followers([self.records[key] for key in keys]):
                self._add(config)
