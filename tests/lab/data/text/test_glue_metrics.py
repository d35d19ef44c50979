"""GLUE's figures against their definitions."""

import math
from collections.abc import Sequence

import pytest
import torch

from uncollapse.errors import NotFiniteError
from uncollapse.lab.data.text.glue import TASKS
from uncollapse.lab.data.text.glue_files import METRICS, compute_metrics
from uncollapse.lab.experiments.glue import training as sentence_training

Numbers = Sequence[float]


def counts(truth: Numbers, answers: Numbers, one: float = 1) -> tuple[int, int, int, int]:
    """Right and wrong yes, right and wrong no."""
    pairs = [(t == one, a == one) for t, a in zip(truth, answers, strict=True)]
    return (
        pairs.count((True, True)),
        pairs.count((False, True)),
        pairs.count((False, False)),
        pairs.count((True, False)),
    )


def naive_f1(truth: Numbers, answers: Numbers, one: float = 1) -> float:
    tp, fp, _, fn = counts(truth, answers, one)
    return 2 * tp / (2 * tp + fp + fn) if tp else 0.0


def naive_macro_f1(truth: Numbers, answers: Numbers) -> float:
    classes = {*truth, *answers}
    return sum(naive_f1(truth, answers, one) for one in classes) / len(classes)


def naive_matthews(truth: Numbers, answers: Numbers) -> float:
    tp, fp, tn, fn = counts(truth, answers)
    below = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    return (tp * tn - fp * fn) / math.sqrt(below) if below else 0.0


def naive_accuracy(truth: Numbers, answers: Numbers) -> float:
    return sum(t == a for t, a in zip(truth, answers, strict=True)) / len(truth)


def naive_pearson(truth: Numbers, answers: Numbers) -> float:
    mean, other = sum(truth) / len(truth), sum(answers) / len(answers)
    left, right = [t - mean for t in truth], [a - other for a in answers]
    below = math.sqrt(sum(x * x for x in left) * sum(y * y for y in right))
    return sum(x * y for x, y in zip(left, right, strict=True)) / below if below else 0.0


def ranks(numbers: Numbers) -> list[float]:
    """From 1; equal numbers share the mean of their ranks."""
    return [sum(m < n for m in numbers) + (1 + sum(m == n for m in numbers)) / 2 for n in numbers]


def naive_spearman(truth: Numbers, answers: Numbers) -> float:
    return naive_pearson(ranks(truth), ranks(answers))


NAIVE = {"accuracy": naive_accuracy, "f1": naive_f1, "macro_f1": naive_macro_f1, "matthews": naive_matthews}
NAIVE |= {"spearman": naive_spearman, "pearson": naive_pearson}
CLASSES: dict[str, tuple[Numbers, Numbers]] = {
    "mixed": ([1, 1, 0, 0, 1, 0, 1, 1], [1, 0, 0, 1, 1, 0, 1, 0]),
    "right": ([1, 0, 1], [1, 0, 1]),
    "all wrong": ([1, 0, 1], [0, 1, 0]),
    "always yes": ([1, 0, 1], [1, 1, 1]),
    "always no": ([1, 0, 1], [0, 0, 0]),
    "one class": ([1, 1, 1], [1, 0, 1]),
    "one class, right": ([0, 0], [0, 0]),
    "one example": ([1], [1]),
    "one example, wrong": ([1], [0]),
}
SCORES: dict[str, tuple[Numbers, Numbers]] = {
    "ties": ([0, 1, 1, 2.5, 5, 5, 5], [0.2, 0.1, 0.7, 0.7, 0.7, 4, 3]),
    "turned": ([1, 2, 3], [3, 2, 1]),
    "constant": ([1, 2, 3], [2, 2, 2]),
    "constant truth": ([2, 2, 2], [1, 2, 3]),
    "two": ([1, 2], [0.5, 0.7]),
    "one": ([1], [2]),
}


def test_every_figure_has_a_reference() -> None:
    assert set(NAIVE) == set(METRICS)
    assert {name for task in TASKS.values() for name in task.metrics} <= set(METRICS)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["accuracy", "f1", "macro_f1", "matthews"])
@pytest.mark.parametrize("case", CLASSES)
def test_figures_of_classes(name: str, case: str) -> None:
    assert compute_metrics((name,), *CLASSES[case])[name] == pytest.approx(NAIVE[name](*CLASSES[case]), abs=1e-12)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["spearman", "pearson"])
@pytest.mark.parametrize("case", SCORES)
def test_figures_of_scores(name: str, case: str) -> None:
    assert compute_metrics((name,), *SCORES[case])[name] == pytest.approx(NAIVE[name](*SCORES[case]), abs=1e-12)


def test_macro_f1_of_many_classes() -> None:
    generator = torch.Generator().manual_seed(0)
    truth, answers = (torch.randint(0, 5, (60,), generator=generator).tolist() for _ in range(2))
    found = compute_metrics(("macro_f1", "accuracy"), truth, answers)
    assert found["macro_f1"] == pytest.approx(naive_macro_f1(truth, answers), abs=1e-12)
    assert found["accuracy"] == pytest.approx(naive_accuracy(truth, answers), abs=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_outputs_that_are_not_finite(bad: float) -> None:
    with pytest.raises(NotFiniteError, match="1 of 3"):
        compute_metrics(("spearman",), [1.0, 2.0, 3.0], [0.5, bad, 1.0])
    logits = torch.tensor([[0.1, 0.2], [bad, 0.0]])
    with pytest.raises(NotFiniteError, match="1 of 4"):
        sentence_training.predictions(logits, TASKS["rte"])
