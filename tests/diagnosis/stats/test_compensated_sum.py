"""Merging sums is exact: against fractions, in any order and nesting, to the last bit."""

from fractions import Fraction
from functools import reduce

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.diagnosis.stats.random_merges import merge_in_some_order
from torch import Tensor

from uncollapse.diagnosis.stats.compensated_sum import PARTS, CompensatedSum, exact_total

SPREAD = (
    100  # bits between the last bits of the largest and the smallest term: with 53 of their own, 159 hold ten terms
)
HALF = 2.0**-53  # half of the last bit of 1


@st.composite
def terms(draw, most: int = 10) -> list[float]:
    """Numbers of very different sizes, some of which nearly cancel each other."""
    base = draw(st.integers(-1070, 700))
    whole = st.integers(-(2**53), 2**53)
    power = st.integers(0, SPREAD)
    found = [float(draw(whole)) * 2.0 ** (base + draw(power)) for _ in range(draw(st.integers(1, most)))]
    return found + [-x for x in found[: draw(st.integers(0, most - len(found)))]]


def sum_of(x: float) -> CompensatedSum:
    total = CompensatedSum.zero(1)
    total.add(torch.tensor([x], dtype=torch.float64))
    return total


def value(parts: Tensor) -> Fraction:
    return sum((Fraction(x) for x in parts.flatten().tolist()), Fraction(0))


def nearest(x: Fraction) -> float:
    return x.numerator / x.denominator  # Python rounds this to the nearest float, halves to even


def bits(parts: Tensor) -> list[int]:
    return parts.contiguous().view(torch.int64).flatten().tolist()


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.data())
def test_any_tree_of_merges_is_the_exact_sum_and_has_the_same_bits(data) -> None:
    numbers = data.draw(terms())
    parts = [sum_of(x) for x in numbers]
    whole = merge_in_some_order([*parts, CompensatedSum.zero(1)], data.draw)
    assert value(whole.parts) == sum(map(Fraction, numbers))
    chain = reduce(CompensatedSum.merge, [CompensatedSum.zero(1), *parts])
    assert bits(whole.parts) == bits(chain.parts)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(terms(6))
@example([1.0, HALF, 2.0**-120])  # a tie, which the third number breaks upwards
@example([1.0 + 2 * HALF, HALF, -(2.0**-120)])  # and downwards
@example([1.0, -HALF / 2, -(2.0**-110)])  # the same below a power of two
@example([1.0, HALF, 0.0])
@example([1.0, HALF, HALF * HALF, 2.0**-150, 0.0, 0.0])  # ties one below the other
@example([-0.0, 0.0, -0.0])
def test_each_part_is_the_nearest_number_to_what_is_left(numbers: list[float]) -> None:
    padded = torch.tensor(numbers + [0.0] * (PARTS - len(numbers)), dtype=torch.float64)
    left = value(padded)
    for part in exact_total(padded[:, None])[:, 0].tolist():
        assert part == nearest(left)
        left -= Fraction(part)
    assert left == 0
    assert all(bit == 0 for bit in bits(exact_total(padded[:, None])[-1:]) if padded.abs().max() == 0)


def test_blocks_of_a_large_tensor_are_summed_alike() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y, z = (torch.randn(300, 301, dtype=torch.float64, generator=generator) * 10.0**power for power in (0, 9, -9))
    sums = []
    for terms_of_one in ((x, y), (z,), (-y, z)):
        one = CompensatedSum.zero(300, 301)
        for term in terms_of_one:
            one.add(term)
        sums.append(one)
    a, b, c = sums
    left, right = a.merge(b).merge(c), c.merge(a.merge(b))
    assert bits(left.parts) == bits(right.parts)
    for at in ((0, 0), (299, 300), (150, 7)):
        assert value(left.parts[:, *at]) == sum(value(one.parts[:, *at]) for one in sums)


def test_merging_leaves_the_parts_alone_and_can_go_on() -> None:
    a, b = sum_of(1.0), sum_of(2.0**-80)
    before = a.parts.clone(), b.parts.clone()
    merged = a.merge(b)
    merged.add(torch.tensor([-1.0]).double())
    assert (torch.equal(a.parts, before[0]), torch.equal(b.parts, before[1])) == (True, True)
    assert value(merged.merge(CompensatedSum.zero(1)).parts) == Fraction(2.0**-80)


def test_beyond_its_range_it_is_as_near_as_three_numbers_can_be() -> None:
    total = reduce(CompensatedSum.merge, [sum_of(2.0**200), sum_of(1.0), sum_of(2.0**-200), sum_of(2.0**-500)])
    assert value(total.parts) == 2**200 + 1 + Fraction(1, 2**200)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_does_not_hang(number: float) -> None:
    assert not bool(sum_of(number).merge(sum_of(1.0)).value.isfinite())
