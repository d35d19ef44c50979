"""The figure of the two propositions shows what was computed, and that is right."""

import json
from pathlib import Path

import pytest
import torch
from experiments.propositions import Config, counterexample, least_eigenvalue, quotient, rank, stepped, variance
from website.pages import concepts

ROOT = Path(__file__).parents[2]
SMALL = Config(draws=200, shown=50)


def test_the_first_holds() -> None:
    found = variance(SMALL)
    assert (found["draws"], found["violated"], len(found["points"])) == (200, 0, 50)
    assert found["least_bound"] <= 1
    assert all(ratio >= bound - 1e-3 for _, bound, ratio in found["points"])


def test_least_eigenvalue_against_loops() -> None:
    h = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    unit = [row / row.norm() for row in h]
    logits = [[float(a @ b) / 0.3 for b in unit] for a in unit]
    weights = [[torch.tensor(x).double().exp() for x in row] for row in logits]
    inner = [[float(i == j) - float(weights[i][j] / sum(weights[i])) for j in range(5)] for i in range(5)]
    p = [[inner[i][j] - sum(inner[k][j] for k in range(5)) / 5 for j in range(5)] for i in range(5)]
    both = torch.tensor([[p[i][j] + p[j][i] for j in range(5)] for i in range(5)], dtype=torch.float64)
    assert least_eigenvalue(h, 0.3) == pytest.approx(float(torch.linalg.eigvalsh(both)[0]), abs=1e-7)


def test_the_second_is_false_as_stated_and_true_where_the_step_is_monotone() -> None:
    found = rank(SMALL)
    assert found["paper"]["violated"] > 0
    assert found["monotone"]["violated"] == 0
    assert 0 < found["monotone"]["cases"] < found["paper"]["cases"] <= found["draws"]
    one = counterexample(Config())
    assert one["q"] < 1  # the paper's condition
    assert one["mapped"] == pytest.approx([2.04 * 1.4 - 1.04 * 1.4**3, 1.0])
    assert (one["rank"]["before"], one["rank"]["after"]) == pytest.approx((1.972, 1.016), abs=5e-4)


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_the_quotient_is_where_the_derivative_is_zero(scale: float) -> None:
    largest = torch.tensor([((1 + scale) / (3 * scale)) ** 0.5], dtype=torch.float64, requires_grad=True)
    assert quotient(largest.detach(), scale) == pytest.approx(1 / 3)
    (slope,) = torch.autograd.grad(stepped(largest, scale).sum(), largest)
    assert float(slope) == pytest.approx(0, abs=1e-12)


def test_the_page_shows_the_result() -> None:
    result = json.loads((ROOT / "results" / "propositions.json").read_text(encoding="utf-8"))
    rows = concepts.counts()[1]
    assert [row[3] for row in rows] == ["0", str(result["rank"]["paper"]["violated"]), "0"]
    text = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    for state in ("before", "after"):
        assert f"{result['counterexample']['rank'][state]:.2f}" in text
