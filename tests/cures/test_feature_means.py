"""Softmax means over features: the formula in chunks, to second order, and where P is one-hot."""

import pytest
import torch
from torch import Tensor

from uncollapse.cures.feature_means import feature_means


def formula(unit: Tensor, value: Tensor, temperature: float) -> Tensor:
    return value @ (unit.mT @ unit / temperature).softmax(-1)


def inputs(*shape: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, dtype=torch.float64, generator=random).requires_grad_() for _ in range(2)]


@pytest.mark.parametrize("shape", [(5, 4), (40, 6), (3, 9, 8), (2, 3, 7, 5), (20, 40, 260), (20, 8, 260), (1, 1, 3)])
@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_value_and_gradients_are_those_of_the_formula(shape: tuple[int, ...], temperature: float) -> None:
    unit, value = inputs(*shape)
    expected, found = (way(unit, value, temperature) for way in (formula, feature_means))
    torch.testing.assert_close(found, expected)
    incoming = torch.randn_like(expected)
    for one, other in zip(*(torch.autograd.grad(y, (unit, value), incoming) for y in (expected, found)), strict=True):
        torch.testing.assert_close(other, one)
    with torch.no_grad():
        torch.testing.assert_close(feature_means(unit, value, temperature), expected)


def test_float32_is_as_exact_as_the_formula_in_float32() -> None:
    exact = inputs(30, 64, 200)
    incoming = torch.randn(30, 64, 200, dtype=torch.float64)
    results = []
    for dtype in (torch.float64, torch.float32):
        unit, value = (x.detach().to(dtype).requires_grad_() for x in exact)
        mean = feature_means(unit, value, 30.0)
        results.append((mean, *torch.autograd.grad(mean, (unit, value), incoming.to(dtype))))
    for one, other in zip(*results, strict=True):
        assert float(((other - one).norm() / one.norm()).detach()) < 16 * torch.finfo(torch.float32).eps


def test_it_has_second_derivatives() -> None:
    assert torch.autograd.gradgradcheck(lambda unit, value: feature_means(unit, value, 0.7), tuple(inputs(2, 4, 3)))


def test_weights_of_one_feature_alone_are_finite() -> None:
    unit, value = (1000 * x.detach() for x in inputs(2, 50, 4))
    unit.requires_grad_()
    mean = feature_means(unit, value, 1.0)
    mean.sum().backward()
    torch.testing.assert_close(mean, value)
    assert unit.grad is not None
    assert bool(unit.grad.isfinite().all())


def test_nothing_gives_nothing() -> None:
    assert feature_means(torch.zeros(0, 5, 3), torch.zeros(0, 5, 3), 1.0).shape == (0, 5, 3)
    assert feature_means(torch.zeros(2, 0, 3), torch.zeros(2, 0, 3), 1.0).shape == (2, 0, 3)
