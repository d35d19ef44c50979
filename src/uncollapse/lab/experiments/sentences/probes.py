"""Accuracy of a logistic regression on the features of a frozen encoder: by ten folds, or on a test split."""

import math
import warnings
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from uncollapse.errors import UsageError, import_optional

FOLDS, INNER = 10, 3
SEED = 0  # of the folds, which are the same for all runs
STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0)  # candidates for the regularisation, chosen within the training folds
STEPS, TOLERANCE = 100, 1e-3  # of L-BFGS: weak regularisation may need more, but the predictions stay the same


def probe_accuracy(rows: Tensor, labels: Tensor, tests: int = 0, *, threads: int = 1) -> float:
    """Return the accuracy of a logistic regression, on the test split or over ten folds.

    Args:
        rows: Features (n, d), one row per sentence.
        labels: Class indices (n,).
        tests: Number of last sentences that are for the test; 0: ten stratified folds.
        threads: CPU threads.
    """
    x, y = rows.float().numpy(), labels.numpy()
    limits: Any = import_optional("threadpoolctl", "train").threadpool_limits
    with limits(limits=threads), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=import_optional("sklearn.exceptions", "train").ConvergenceWarning)
        if tests:
            return _accuracy(_fit_and_predict(x[:-tests], y[:-tests], x[-tests:]), y[-tests:])
        _check_folds(y)
        folds: Any = import_optional("sklearn.model_selection", "train").StratifiedKFold(
            FOLDS, shuffle=True, random_state=SEED
        )
        found = numpy.empty_like(y)
        for train, test in folds.split(x, y):
            found[test] = _fit_and_predict(x[train], y[train], x[test])
        return _accuracy(found, y)


def standardise(rows: Tensor) -> Tensor:
    """Return rows whose features have mean 0 and standard deviation 1; a constant feature becomes 0.

    No label is used, so all sentences may contribute.
    """
    deviation, mean = torch.std_mean(rows.double(), dim=0)
    return (rows.double() - mean) / torch.where(deviation > 0, deviation, 1.0)


def scale_to_sphere(rows: Tensor) -> Tensor:
    """Return rows of length √d. Unlike with `standardise`, collapsed features stay small."""
    return torch.nn.functional.normalize(rows.double(), dim=-1) * math.sqrt(rows.shape[-1])


def majority_accuracy(labels: Tensor, tests: int = 0) -> float:
    """Return the accuracy of always predicting the most frequent class."""
    of = labels[-tests:] if tests else labels
    most = labels[:-tests].mode().values if tests else labels.mode().values
    return float((of == most).float().mean())


def _fit_and_predict(x: NDArray[Any], y: NDArray[Any], asked: NDArray[Any]) -> NDArray[Any]:
    models, choosing = (import_optional(f"sklearn.{name}", "train") for name in ("linear_model", "model_selection"))
    inner = choosing.StratifiedKFold(INNER, shuffle=True, random_state=SEED)
    model = models.LogisticRegression(max_iter=STEPS, tol=TOLERANCE)
    search = choosing.GridSearchCV(model, {"C": STRENGTHS}, cv=inner)
    answers: NDArray[Any] = search.fit(x, y).predict(asked)
    return answers


def _accuracy(found: NDArray[Any], y: NDArray[Any]) -> float:
    return float((found == y).mean())


def _check_folds(y: NDArray[Any]) -> None:
    counts = numpy.unique(y, return_counts=True)[1]
    if len(counts) < 2 or counts.min() < FOLDS:
        raise UsageError(f"Ten folds need two or more classes with at least {FOLDS} sentences, got {counts.tolist()}.")
