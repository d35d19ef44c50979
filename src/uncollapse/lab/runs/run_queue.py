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
    """The runs of some cells, each of them once.

    records: results of finished runs, by identity. open: configurations that no worker has taken. failed: error
    messages, by identity. found: how many results existed at the start. prune_by: the metric by which runs may be
    stopped early; None lets all of them finish.
    """

    prune_by: str | None = None

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
        self._add_followers()
        self.found = len(self.records)

    @property
    def total(self) -> int:
        """Number of all runs, including those whose values are not chosen yet."""
        return len(self._configs) + self.later

    @property
    def done(self) -> int:
        """Number of finished runs."""
        return len(self.records)

    @property
    def later(self) -> int:
        """Number of runs that wait for the best values of their cell."""
        return sum(len(cell.seeds) for cell in self._waiting)

    def key(self, config: Any) -> str:
        """Return the identity of a configuration."""
        return identity(self.recipe.name, config)

    def label(self, config: Any) -> str:
        """Return the file name of a run without suffix, which is unique; its short name need not be."""
        return self.results.path(self.recipe, config).stem

    def config(self, key: str) -> Any:
        """Return the configuration with an identity."""
        return self._configs[key]

    def seconds(self, config: Any) -> float:
        """Return the estimated seconds of a run on one core, corrected by the times of finished runs."""
        return self.recipe.cost(config) * (statistics.median(self._ratios) if self._ratios else 1.0)

    def seconds_open(self) -> float:
        """Return the estimated seconds of all runs that have not started, on one core."""
        later = sum(len(cell.seeds) * statistics.fmean(map(self.seconds, cell.trials)) for cell in self._waiting)
        return later + sum(map(self.seconds, self.open.values()))

    def list_missing(self) -> list[Any]:
        """Return the open configurations, cheapest first."""
        return sorted(self.open.values(), key=self.recipe.cost)

    def choices(self) -> list[tuple[GridCell, Any]]:
        """Return each cell whose trials are all done, with the best of them; only cells with several trials."""
        found = []
        for cell in self._contests:
            records = [self.records[key] for key in map(self.key, cell.trials) if key in self.records]
            if len(records) == len(cell.trials) and any(cell.by in record["figures"] for record in records):
                own = replace(cell, seeds=(cell.trials[0].seed,))  # the best, run with its own seed, is that trial
                found.append((cell, *own.followers(records)))
        return found

    def take(self) -> Any | None:
        """Remove and return the cheapest open configuration; None if there is none.

        A configuration that has a result by now, from another sweep, is not run again.
        """
        while self.open:
            config = self.open.pop(min(self.open, key=lambda key: self.recipe.cost(self.open[key])))
            if not self.look_up(config):
                return config
        return None

    def put_back(self, config: Any) -> None:
        """Reopen a configuration that was taken but not run."""
        self.open[self.key(config)] = config

    def fail(self, config: Any, why: str) -> None:
        """Record that a run failed."""
        self.failed[self.key(config)] = why

    def may_retry(self, config: Any) -> bool:
        """Return whether a run whose process was killed starts again at once."""
        return False

    def should_prune(self, config: Any, epoch: int, metric: float, seconds: float) -> bool:
        """Return whether to stop a run early. metric: the value of `prune_by` after an epoch; seconds: so far."""
        return False

    def prune(self, config: Any) -> None:
        """Record that a run was stopped early."""

    def look_up(self, config: Any) -> bool:
        """Return whether a result exists by now, and open the runs that waited for it."""
        record = self.results.find(self.recipe, config)
        if record is None:
            return False
        self._add_record(config, record)
        self._add_followers()
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
            self._add_record(config, record)

    def _add_record(self, config: Any, record: dict[str, Any]) -> None:
        self.records[self.key(config)] = record
        guess, measured = self.recipe.cost(config), record.get("seconds")
        if guess > 0 and measured:
            self._ratios.append(measured / guess)

    def _add_followers(self) -> None:
        """Add the further runs of the cells whose trials are all done."""
        waiting, self._waiting = self._waiting, []
        for cell in waiting:
            keys = [self.key(config) for config in cell.trials]
            if not all(key in self.records for key in keys):
                self._waiting.append(cell)
                continue
            for config in cell.followers([self.records[key] for key in keys]):
                self._add(config)
