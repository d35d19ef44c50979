"""Add float64 tensors without losing what rounding takes; sums merge exactly.

A sum is stored as a few numbers of decreasing size. While terms are added there are two: the value, and the remainder
that the value lost to rounding. Merging gives three, which are the exact total: the float64 nearest to it, the one
nearest to the rest, and what is left. A total has only one such form, so any order and nesting of merges gives the
same bits.
"""

from typing import Self

import torch
from torch import Tensor

PARTS = 3  # numbers that store a merged sum
RANGE = 53 * PARTS  # bits between the largest and the smallest that a merged sum can store
BLOCK = 1 << 15  # numbers added at a time, so that the passes over them stay in the cache
PASSES = 32  # at most, until six numbers no longer change; usually four


class CompensatedSum:
    """A sum of tensors of one shape, in compensated float64.

    `add` rounds: the remainder is a float64 too. `merge` is exact to the last bit, in any order and nesting, as long as
    the smallest bit of any part is at least 2⁻¹⁵⁹ of the largest intermediate total: sums whose sizes differ by up to
    2¹⁰⁶ (10³¹) always satisfy this. Beyond it the smallest bits are dropped. Numbers must stay below 1e300.

    >>> import torch
    >>> first, second = CompensatedSum(torch.zeros(2, 1).double()), CompensatedSum(torch.zeros(2, 1).double())
    >>> for number in (1.0, 2.0**-80):
    ...     first.add(torch.tensor([number]).double())
    >>> second.add(torch.tensor([-1.0]).double())
    >>> first.merge(second).value.item() == 2.0**-80
    True
    """

    def __init__(self, parts: Tensor) -> None:
        self.parts = parts  # (2, ...) or (3, ...): the value, and what it lost

    @classmethod
    def zero(cls, *shape: int, device: torch.device | str | None = None) -> Self:
        """Return an empty sum."""
        with torch.inference_mode(False):  # so that it can be added to outside of inference mode as well
            return cls(torch.zeros(2, *shape, dtype=torch.float64, device=device or "cpu"))

    @property
    def value(self) -> Tensor:
        """The sum, rounded to float64."""
        return self.parts[0]

    def add(self, term: Tensor) -> None:
        """Add a tensor, a few rows at a time."""
        value, remainder = self.parts[0], self.parts[1]
        for part in _blocks(term):
            _add(value[part], remainder[part], term[part])

    def merge(self, other: "CompensatedSum") -> "CompensatedSum":
        """Return the exact total of both sums, as a new object on this one's device."""
        both = torch.cat([self.parts, other.parts.to(self.parts.device)])
        merged = both.new_empty(PARTS, *both.shape[1:])
        for part in _blocks(both[0]):
            merged[:, part] = exact_total(both[:, part])
        return CompensatedSum(merged)


def exact_total(numbers: Tensor) -> Tensor:
    """Return the total of numbers (k, ...) as three numbers in their unique form, (3, ...), k ≥ 3.

    Each of the three is the float64 nearest to what the ones before it leave of the total.
    """
    parts = list(numbers.clone())
    for first in range(PARTS):
        _settle(parts, first)
        _break_tie(parts, first)
    return torch.stack(parts[:PARTS]) + 0.0  # −0 becomes 0: the same number has the same bits


def _settle(parts: list[Tensor], first: int) -> None:
    """Carry from the last up to `first` until each is the rounded sum of itself and the next; the total stays."""
    for _ in range(PASSES):
        moved = False
        for i in range(len(parts) - 1, first, -1):
            total, lost = _two_sum(parts[i - 1], parts[i])
            moved = moved or not torch.equal(total, parts[i - 1])
            parts[i - 1], parts[i] = total, lost
        if not moved:
            return


def _break_tie(parts: list[Tensor], first: int) -> None:
    """Where the next part is exactly half a last bit, let the part after it decide in which direction to round."""
    if len(parts) < first + 3:
        return
    half, after = parts[first + 1], parts[first + 2]
    other = parts[first] + 2 * half  # the neighbour on the other side, if it is a tie
    wrong = (other - parts[first] == 2 * half) & (half.sign() * after.sign() > 0)
    if bool(wrong.any()):
        parts[first] = torch.where(wrong, other, parts[first])
        parts[first + 1] = torch.where(wrong, -half, half)


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rounded sum of a and b, and what rounding took (Knuth's TwoSum)."""
    total = a + b
    seen = total - a
    return total, (a - (total - seen)).add_(b - seen)


def _add(value: Tensor, remainder: Tensor, term: Tensor) -> None:
    """Add term to value + remainder in place, carrying what rounding took from the remainder into the value."""
    total, lost = _two_sum(value, term)
    remainder += lost
    torch.add(total, remainder, out=value)
    remainder -= total.sub_(value).neg_()


def _blocks(x: Tensor) -> list[slice]:
    """Return slices of the first dimension, of about BLOCK numbers each."""
    step = max(1, BLOCK * x.shape[0] // max(1, x.numel()))
    return [slice(start, start + step) for start in range(0, x.shape[0], step)]
