"""Objectives of contrastive encoders, against the formulas in float64."""

import math
from dataclasses import asdict, dataclass

import pytest
import torch
from torch import Tensor

from uncollapse.errors import UsageError
from uncollapse.lab.config.fields import identity
from uncollapse.lab.experiments.contrastive.objectives import (
    ObjectiveConfig,
    formula,
    information_bound,
    objective,
    objective_slug,
)


@dataclass(frozen=True)
class Config(ObjectiveConfig):
    seed: int = 0


def views(rows: int = 6) -> tuple[Tensor, Tensor]:
    made = torch.randn(2, rows, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return made[0], made[1]


def naive(config: ObjectiveConfig, x: Tensor, y: Tensor) -> float:
    """From the paper, pair by pair."""
    x, y = x / x.norm(dim=1, keepdim=True), y / y.norm(dim=1, keepdim=True)
    n, total = len(x), 0.0
    for one, two in ((x, y), (y, x)):
        for i in range(n):
            keys = [math.exp(float(one[i] @ two[j]) / config.temperature) for j in range(n)]
            total += config.contrast * -math.log(keys[i] / sum(keys)) / (2 * n)
        pairs = [math.exp(-config.t * float((one[i] - one[j]).norm()) ** 2) for i in range(n) for j in range(i)]
        total += config.uniform * math.log(sum(pairs) / len(pairs)) / 2
    return total + config.align * sum(float((x[i] - y[i]).norm()) ** config.alpha for i in range(n)) / n


@pytest.mark.parametrize(
    "config",
    [
        Config(temperature=0.2),
        Config(contrast=0.0, align=1.0, alpha=1.5),
        Config(contrast=0.0, uniform=0.7, t=3.0),
        Config(contrast=0.5, align=0.98, uniform=0.96),
    ],
)
def test_the_loss_is_the_weighted_sum(config: Config) -> None:
    x, y = views()
    assert float(objective(config, x, y)) == pytest.approx(naive(config, x, y), rel=1e-9)


def test_both_views_as_negatives_is_nt_xent() -> None:
    x, y = views(4)
    z = torch.cat([x, y])
    z = z / z.norm(dim=1, keepdim=True)
    logits = (z @ z.T / 0.5).fill_diagonal_(-torch.inf)
    wanted = torch.nn.functional.cross_entropy(logits, torch.arange(8).roll(4))
    assert float(objective(Config(negatives="both"), x, y)) == pytest.approx(float(wanted), rel=1e-6)


def test_gradients_reach_both_views() -> None:
    x, y = (view.requires_grad_() for view in views())
    torch.autograd.backward(objective(Config(contrast=0.5, align=1.0, uniform=1.0), x, y))
    assert all(view.grad is not None and float(view.grad.abs().sum()) > 0 for view in (x, y))


def test_settings_of_a_part_without_weight_make_no_other_run() -> None:
    plain = Config(contrast=0.0, align=1.0)
    assert identity("r", Config(contrast=0.0, align=1.0, temperature=0.1, negatives="both", t=5.0)) == identity(
        "r", plain
    )
    assert identity("r", Config(contrast=0.0, align=1.0, alpha=1.0)) != identity("r", plain)


def test_nothing_to_train_for_is_an_error() -> None:
    with pytest.raises(UsageError, match="all 0"):
        Config(contrast=0.0)


def test_objectives_in_words() -> None:
    config = asdict(Config(contrast=0.5, temperature=0.07, negatives="both", align=1.0, uniform=0.96))
    assert formula(config) == "0.5·C(τ=0.07, both) + A(α=2) + 0.96·U(t=2)"
    assert objective_slug(config) == "c0.5-tau0.07-both+a1-alpha2+u0.96-t2"


def test_the_information_of_a_perfect_and_of_a_blind_encoder() -> None:
    assert information_bound(0.0, 255) == pytest.approx(math.log(256))
    assert information_bound(math.log(256), 255) == pytest.approx(0.0)
