"""When a trial is stopped early."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from uncollapse.errors import UsageError, import_optional

Kind = Literal["median", "hyperband", "none"]
KINDS: tuple[Kind, ...] = ("median", "hyperband", "none")
WARMUP = 0.3  # share of the steps in which no trial is stopped: deep networks often begin to learn late
COMPARED = 4  # trials that must be done before one is stopped: more than those without a search


@dataclass(frozen=True)
class Pruning:
    """How trials are stopped early.

    kind: median stops a trial whose best figure so far is worse than the median of the others after as many steps;
    hyperband goes on with a third of the trials at a time; none stops nothing. steps: of a whole trial, 0 if that is
    not known.
    """

    kind: Kind = "median"
    steps: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"Trials are pruned by one of {', '.join(KINDS)}, got {self.kind!r}.")

    def made(self) -> Any:
        """The pruner of Optuna."""
        pruners: Any = import_optional("optuna", "tune").pruners
        warmup = math.ceil(WARMUP * self.steps)
        match self.kind:
            case "median":
                return pruners.MedianPruner(n_startup_trials=COMPARED, n_warmup_steps=warmup)
            case "hyperband":
                return pruners.HyperbandPruner(max(1, warmup), self.steps or "auto")
        return pruners.NopPruner()
