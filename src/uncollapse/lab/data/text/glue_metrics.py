"""GLUE's metrics, computed with scikit-learn and scipy."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from uncollapse.errors import NotFiniteError, import_optional


def _accuracy(truth: Any, answers: Any) -> float:
    return float(import_optional("sklearn.metrics", "text").accuracy_score(truth, answers))


def _f1(truth: Any, answers: Any) -> float:
    return float(import_optional("sklearn.metrics", "text").f1_score(truth, answers, zero_division=0.0))


def _macro_f1(truth: Any, answers: Any) -> float:
    """Return the mean over the classes that occur in the labels or in the predictions."""
    score = import_optional("sklearn.metrics", "text").f1_score(truth, answers, average="macro", zero_division=0.0)
    return float(score)


def _matthews(truth: Any, answers: Any) -> float:
    """Return Matthews' correlation; 0 where one side has a single class, by definition."""
    if len(np.unique(truth)) < 2 or len(np.unique(answers)) < 2:
        return 0.0
    return float(import_optional("sklearn.metrics", "text").matthews_corrcoef(truth, answers))


def _spearman(truth: Any, answers: Any) -> float:
    return _correlation("spearmanr", truth, answers)


def _pearson(truth: Any, answers: Any) -> float:
    return _correlation("pearsonr", truth, answers)


def _correlation(name: str, truth: Any, answers: Any) -> float:
    """Return a correlation; 0 where one side is constant, as Matthews' correlation is."""
    if len(truth) < 2 or np.ptp(truth) == 0 or np.ptp(answers) == 0:
        return 0.0
    return float(getattr(import_optional("scipy.stats", "text"), name)(truth, answers).statistic)


METRICS: Mapping[str, Callable[[Any, Any], float]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "macro_f1": _macro_f1,
    "matthews": _matthews,
    "spearman": _spearman,
    "pearson": _pearson,
}


def compute_metrics(names: Sequence[str], truth: Sequence[float], answers: Sequence[float]) -> dict[str, float]:
    """Return metrics of predictions compared with the labels; both are class indices, or scores.

    >>> figures(("f1", "accuracy"), [1, 1, 0, 0], [1, 0, 0, 0])
    {'f1': 0.6666666666666666, 'accuracy': 0.75}
    """
    pair = np.asarray(truth), np.asarray(answers)
    bad = int((~np.isfinite(pair[1])).sum())
    if bad:
        raise NotFiniteError(f"The model's outputs are not finite: {bad} of {len(answers)} are NaN or infinite.")
    return {name: METRICS[name](*pair) for name in names}
