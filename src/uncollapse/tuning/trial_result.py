"""What was tried: the settings of a trial, its figure, and what it cost."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from uncollapse.errors import import_optional

State = Literal["done", "pruned", "failed", "open"]
Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class TrialResult:
    """A trial.

    number: 0 is the one without a cure, 1 what one would have taken by default. settings: the fields that vary, with
    its values. value: its figure on validation, once it is done. state: pruned, when it was stopped because others were
    better after as many steps; failed, when its figures were no numbers; open, when it has begun and is not done.
    steps: how many it made, such as epochs. curve: the figure by step, where it was told. params: what the study calls
    its settings. why: it failed. key: what tells its settings from others. idle: it was not run, since the same was
    tried before or cannot be had.
    """

    number: int
    settings: Mapping[str, Any]
    value: float | None
    state: State
    steps: int = 0
    seconds: float = 0.0
    curve: Mapping[int, float] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    key: str = ""
    idle: bool = False

    @property
    def role(self) -> str:
        """What it is there for, in words; nothing for those that the search chose."""
        return {0: "without a cure", 1: "default"}.get(self.number, "")

    def describe(self) -> str:
        """Its settings in words."""
        return (
            self.role
            if not self.number or not self.settings
            else " ".join(f"{name}={format_value(v)}" for name, v in self.settings.items())
        )

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"curve": {str(step): value for step, value in self.curve.items()}, "role": self.role}


def best_trial(tried: Sequence[TrialResult], better: Better = "higher") -> TrialResult | None:
    """The trial with the best figure; of equals the first, so that a cure has to be better than none."""
    sign = 1.0 if better == "higher" else -1.0
    rated = [each for each in tried if each.state == "done" and each.value is not None and math.isfinite(each.value)]
    return max(rated, key=lambda each: (sign * (each.value or 0.0), -each.number), default=None)


def format_value(value: Any) -> str:
    """A value as it is written on a command line."""
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def attach_line(cure: str, options: Mapping[str, Any]) -> str:
    """The line that puts a cure into a model; options that are None are left out.

    >>> attach_line("contra_norm", {"scale": 0.25, "at": "block", "layers": None})
    'uc.attach(model, "contra_norm", scale=0.25, at="block")'
    """
    words = [f"{name}={_code(value)}" for name, value in options.items() if value is not None]
    return f"uc.attach({', '.join(['model', _code(cure), *words])})"


def _code(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_code, value))}]"
    return repr(value)


ENOUGH = 4  # trials before anything is said
SEED = 0  # of the trees of fANOVA


def parameter_importances(study: Any) -> dict[str, float]:
    """The share of the differences between finished trials that each parameter explains, the largest first.

    fANOVA, over all trials that the search chose. Where a parameter did not count, it is taken to be the same in all
    trials, so that it explains nothing there. Nothing if too few trials are done, or if all figures are the same.
    """
    optuna: Any = import_optional("optuna", "tune")
    done = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    chosen = [trial for trial in done if trial.params]
    varied = {name: kind for trial in chosen for name, kind in trial.distributions.items() if not kind.single()}
    if len(chosen) < ENOUGH or len({trial.value for trial in chosen}) < 2 or not varied:
        return {}
    filled = optuna.create_study(storage=optuna.storages.InMemoryStorage(), direction=study.direction)
    for trial in chosen:
        values = {name: trial.params.get(name, _any_value(kind)) for name, kind in varied.items()}
        filled.add_trial(optuna.trial.create_trial(params=values, distributions=varied, value=trial.value))
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = optuna.importance.get_param_importances(filled, evaluator=evaluator)
        except (ValueError, RuntimeError):  # the trees found no difference to explain
            return {}
    return {name: float(share) for name, share in found.items() if share > 0}


def _any_value(kind: Any) -> Any:
    """A value of a parameter, always the same one."""
    return kind.low if hasattr(kind, "low") else kind.choices[0]
