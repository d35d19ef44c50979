"""Which of the parameters mattered, as far as the trials can tell."""

import warnings
from typing import Any

from uncollapse.errors import import_optional

ENOUGH = 4  # trials before anything is said
SEED = 0  # of the trees of fANOVA


def importances(study: Any) -> dict[str, float]:
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
        values = {name: trial.params.get(name, _fixed(kind)) for name, kind in varied.items()}
        filled.add_trial(optuna.trial.create_trial(params=values, distributions=varied, value=trial.value))
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = optuna.importance.get_param_importances(filled, evaluator=evaluator)
        except (ValueError, RuntimeError):  # the trees found no difference to explain
            return {}
    return {name: float(share) for name, share in found.items() if share > 0}


def _fixed(kind: Any) -> Any:
    """A value of a parameter, always the same one."""
    return kind.low if hasattr(kind, "low") else kind.choices[0]
