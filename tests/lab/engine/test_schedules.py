"""Learning rate schedules, compared with those of torch, transformers and timm."""

import math
from collections.abc import Callable

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR

from uncollapse.backbones import torchvision_ops
from uncollapse.errors import UsageError
from uncollapse.lab.engine.schedules import cosine, linear, steps
from uncollapse.lab.experiments.vit import digits

TOTALS = [(1, 0.0), (10, 0.0), (40, 0.25), (114, 0.1), (1000, 0.05)]


def rates(make: Callable[[torch.optim.Optimizer], LRScheduler], count: int) -> list[float]:
    """Learning rates of torch's scheduler for as many steps, with 1 as the highest."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, found = make(optimizer), []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def naive(total: int, warmup: float, down: Callable[[float], float]) -> list[float]:
    """In steps, not in shares: up to `rise`, and from there on down to the last one."""
    rise = warmup * total
    return [t / rise if t < rise else down((t - rise) / (total - rise)) for t in range(1, total + 1)]


@pytest.mark.parametrize(("total", "warmup"), TOTALS)
def test_cosine(total: int, warmup: float) -> None:
    expected = naive(total, warmup, lambda way: 0.2 + 0.8 * math.cos(way * math.pi / 2) ** 2)
    factor = cosine(total, warmup, floor=0.2)
    assert list(map(factor, range(total))) == pytest.approx(expected, abs=1e-12)
    assert factor(10 * total) == pytest.approx(0.2)
    assert cosine(total, warmup)(total - 1) == 0


@pytest.mark.parametrize(("total", "warmup"), TOTALS)
def test_linear(total: int, warmup: float) -> None:
    expected = naive(total, warmup, lambda way: 1 - way)
    factor = linear(total, warmup)
    assert list(map(factor, range(total))) == pytest.approx(expected, abs=1e-12)
    assert factor(10 * total) == 0


def test_cosine_is_torchs_one_step_later() -> None:
    expected = rates(lambda optimizer: CosineAnnealingLR(optimizer, 50, eta_min=0.1), 51)
    assert list(map(cosine(50, floor=0.1), range(50))) == pytest.approx(expected[1:])


def test_steps_are_torchs() -> None:
    milestones = [7, 3, 12]
    expected = rates(lambda optimizer: MultiStepLR(optimizer, milestones, gamma=0.3), 20)
    assert list(map(steps(milestones, 0.3), range(20))) == pytest.approx(expected)
    by_hand = [0.3 ** sum(step >= milestone for milestone in milestones) for step in range(20)]
    assert list(map(steps(milestones, 0.3), range(20))) == by_hand
    assert steps((), 0.1)(100) == 1.0


def test_the_same_as_transformers_one_step_later() -> None:
    torchvision_ops.declare()
    optimization = pytest.importorskip("transformers.optimization")
    pairs = [
        (cosine(40, 0.25), lambda opt: optimization.get_cosine_schedule_with_warmup(opt, 10, 40)),
        (linear(40, 0.25), lambda opt: optimization.get_linear_schedule_with_warmup(opt, 10, 40)),
    ]
    for ours, theirs in pairs:
        assert list(map(ours, range(40))) == pytest.approx(rates(theirs, 41)[1:], abs=1e-12)


@pytest.mark.parametrize("warmup", [0, 10])
def test_linear_at_the_start_of_steps_is_that_of_transformers(warmup: int) -> None:
    torchvision_ops.declare()
    optimization = pytest.importorskip("transformers.optimization")
    theirs = rates(lambda opt: optimization.get_linear_schedule_with_warmup(opt, warmup, 40), 40)
    assert list(map(linear(40, warmup / 40, at_start=True), range(40))) == pytest.approx(theirs, abs=1e-12)
    assert theirs[-1] == pytest.approx(1 / (40 - warmup))


def test_the_same_as_timm_one_step_later() -> None:
    torchvision_ops.declare()
    scheduler = pytest.importorskip("timm.scheduler")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = scheduler.CosineLRScheduler(optimizer, t_initial=30, lr_min=0.05, warmup_t=10, warmup_prefix=True)
    expected = []
    for step in range(1, 41):
        theirs.step(step)
        expected.append(optimizer.param_groups[0]["lr"])
    assert list(map(cosine(40, 0.25, floor=0.05), range(40))) == pytest.approx(expected)


@pytest.mark.parametrize("epochs", [1, 6, 7])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.3])
def test_cosine_is_that_of_the_digits_to_the_bit(epochs: int, warmup: float) -> None:
    config = digits.Config(epochs=epochs, warmup=warmup)

    def by_hand(step: int) -> float:
        share = (step + 1) / config.steps
        if share < warmup:
            return share / warmup
        return 0.5 + 0.5 * math.cos(math.pi * min(1.0, (share - warmup) / (1 - warmup)))

    factor = cosine(config.steps, warmup)
    assert [factor(step) for step in range(config.steps + 1)] == [by_hand(step) for step in range(config.steps + 1)]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: cosine(0), "got 0"),
        (lambda: cosine(10, 1.0), "warmup"),
        (lambda: cosine(10, float("nan")), "got nan"),
        (lambda: linear(10, 5), "got 5"),
        (lambda: cosine(10, floor=-0.1), "floor"),
        (lambda: steps((1,), -1.0), "factor"),
    ],
)
def test_wrong_arguments(wrong: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        wrong()
