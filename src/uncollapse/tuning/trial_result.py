"""The result of a trial: its settings, its metric and its cost; and how much each parameter matters."""

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
    """The result of a trial.

    number: 0 is the trial without a cure, 1 has the default settings. settings: the fields that vary, with their
    values. value: metric on validation data, None until the trial is done. state: "pruned" if it was stopped because
    other trials were better after as many steps, "failed" if its metric was not finite, "open" if it is not done yet.
    steps: steps it ran, such as epochs. curve: metric by step, if it was reported. params: the settings under the names
    of the study. why: reason of the failure. key: identifies its settings. idle: it was not run, because the same
    settings were tried before or are not valid.
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
        """Return the purpose of the trial in words; empty for a trial that the search chose."""
        return {0: "without a cure", 1: "default"}.get(self.number, "")

    def describe(self) -> str:
        """Return its settings in words."""
        return (
            self.role
            if not self.number or not self.settings
            else " ".join(f"{name}={format_value(v)}" for name, v in self.settings.items())
        )

    def facts(self) -> dict[str, Any]:
        """Return all fields for JSON."""
        return asdict(self) | {"curve": {str(step): value for step, value in self.curve.items()}, "role": self.role}


def best_trial(trials: Sequence[TrialResult], better: Better = "higher") -> TrialResult | None:
    """Return the trial with the best metric, the first if several are equal: a cure must be better than none."""
    sign = 1.0 if better == "higher" else -1.0
    done = [
        trial for trial in trials if trial.state == "done" and trial.value is not None and math.isfinite(trial.value)
    ]
    return max(done, key=lambda trial: (sign * (trial.value or 0.0), -trial.number), default=None)


def format_value(value: Any) -> str:
    """Return a value as it is written on a command line."""
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def attach_line(cure: str, options: Mapping[str, Any]) -> str:
    """Return the line of code that attaches a cure to a model. Options that are None are left out.

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


MIN_TRIALS = 4  # fewer say nothing about importance
FANOVA_SEED = 0


def parameter_importances(study: Any) -> dict[str, float]:
    """Return the share of the variance between finished trials that each parameter explains, largest first.

    Computed with fANOVA over all trials that the search chose. A parameter that was inactive in a trial gets the same
    value in all such trials, so it explains nothing there. Empty if too few trials are done or all metrics are equal.
    """
    optuna: Any = import_optional("optuna", "tune")
    done = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    chosen = [trial for trial in done if trial.params]
    varied = {name: kind for trial in chosen for name, kind in trial.distributions.items() if not kind.single()}
    if len(chosen) < MIN_TRIALS or len({trial.value for trial in chosen}) < 2 or not varied:
        return {}
    filled = optuna.create_study(storage=optuna.storages.InMemoryStorage(), direction=study.direction)
    for trial in chosen:
        values = {name: trial.params.get(name, _any_value(kind)) for name, kind in varied.items()}
        filled.add_trial(optuna.trial.create_trial(params=values, distributions=varied, value=trial.value))
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=FANOVA_SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = optuna.importance.get_param_importances(filled, evaluator=evaluator)
        except (ValueError, RuntimeError):  # the trees found no variance to explain
            return {}
    return {name: float(share) for name, share in found.items() if share > 0}


def _any_value(kind: Any) -> Any:
    """Return a value of a parameter, always the same one."""
    return kind.low if hasattr(kind, "low") else kind.choices[0]
