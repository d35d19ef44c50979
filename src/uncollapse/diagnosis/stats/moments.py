"""Gather the moments of a stream of vectors, which can be merged.

The tokens of a model do not fit into memory; their count, sum and Gram matrix do, and give the spectrum of all rows,
their ranks, mean cosine and correlations. Moments that were gathered separately are merged exactly. Sums are float64
and compensated (`compensated_sum.py`), so a sum over many small updates is as accurate as one over a few large ones.
Otherwise a long stream of identical rows would seem to vary.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from uncollapse.diagnosis.stats.compensated_sum import PARTS, CompensatedSum
from uncollapse.diagnosis.stats.streaming import (
    CHUNK,
    check_entries,
    check_keys,
    chunks,
    flat_rows,
    read_integer,
    read_tensor,
)
from uncollapse.metrics.spectrum import rank_from_singular_values
from uncollapse.pairwise.numerics import check_positive

LARGEST = 1e140  # largest entry whose squares can be summed without overflow
BEYOND = 1e300  # larger than any sum
SMALLEST = 1e-140  # rows no longer than this have no direction: the squares of their entries underflow
# Relative rounding of a sum of squares. Identical rows are the worst case, as they round alike: up to 126 eps seen.
NOISE = 256 * torch.finfo(torch.float64).eps
TOGETHER = 4  # chunks whose products are added without compensation
NARROWEST = 64  # columns of a block of the Gram matrix, at least: narrower products are slow
SUMS = ("sum", "gram", "unit_sum")


@dataclass(frozen=True)
class Terms:
    """What some rows add to the attributes of `Moments` with these names."""

    count: int
    unit_count: int
    sum: Tensor
    gram: Tensor
    unit_sum: Tensor


class Moments:
    """Count, sum and Gram matrix of a stream of vectors, in compensated float64; moments can be merged.

        count = n     sum = Σ_i x_i     gram = Σ_i x_i x_iᵀ     unit_sum = Σ_i x_i/‖x_i‖ over nonzero rows (unit_count)

    The singular values of the stacked rows are the square roots of the eigenvalues of the Gram matrix; the mean cosine
    follows from Σ_{i≠j} cos(x_i, x_j) = ‖Σ_i x_i/‖x_i‖‖² − n (closed form of the feature similarity in ContraNorm,
    arXiv 2303.06562). Forming the Gram matrix squares the condition: singular values below 2.4e-7 of the largest
    cannot be distinguished from 0 and are returned as 0. Centered values are differences, gram − n·mean·meanᵀ, with a
    relative error of about 1e-16·(mean/std)²; their noise is that of the uncentered matrix. Everything derived is a
    float64 tensor, and raises ValueError before the first row.

    Args:
        dim: the number of features d.
        device: where the sums are stored; the CPU if not given.

    Attributes:
        count, unit_count: ints. sum, unit_sum: (d,). gram: (d, d). All tensors are float64.

    >>> import torch
    >>> rows = torch.tensor([[3.0, 0.0], [0.0, 4.0], [3.0, 0.0], [0.0, 4.0]])
    >>> first, second = Moments(2), Moments(2)
    >>> first.update(rows[:1])
    >>> second.update(rows[1:])
    >>> whole = first + second
    >>> whole
    Moments(dim=2, count=4)
    >>> whole.spectrum()
    tensor([5.6569, 4.2426], dtype=torch.float64)
    >>> round(whole.mean_cosine().item(), 4)
    0.3333
    """

    def __init__(self, dim: int, device: torch.device | str | None = None) -> None:
        check_positive(dim, "dim")
        self.dim = dim
        self.count = 0
        self.unit_count = 0
        self._sums = {name: CompensatedSum.zero(*shape, device=device) for name, shape in _shapes(dim).items()}

    @property
    def sum(self) -> Tensor:
        """Σ_i x_i, (d,)."""
        return self._sums["sum"].value

    @property
    def gram(self) -> Tensor:
        """Σ_i x_i x_iᵀ, (d, d)."""
        return self._sums["gram"].value

    @property
    def unit_sum(self) -> Tensor:
        """Σ_i x_i/‖x_i‖ over the nonzero rows, (d,)."""
        return self._sums["unit_sum"].value

    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Add the real rows of x.

        Rows are cast to float64 some at a time, so the additional memory stays bounded. An update of a few rows costs
        about as much as one of a hundred. NaN, infinite and huge entries (beyond 1e140) of real rows raise ValueError,
        and nothing is added. Rows no longer than 1e-140 count as zero rows.

        Args:
            x: (..., d) of any float dtype, on any device, with any number of rows.
            mask: (...) bool, True = real. Other rows may hold anything.
        """
        self.add(self.terms(x, mask))

    def terms(self, x: Tensor, mask: Tensor | None = None) -> list[Terms]:
        """Return what `update` adds. Nothing changes here, so threads can work on several parts of a stream."""
        flat = flat_rows(x, mask, self.dim)
        check_entries(flat, LARGEST)
        return [_terms(rows, self.sum.device) for rows in chunks(flat, TOGETHER * CHUNK)]

    def add(self, terms: Iterable[Terms]) -> None:
        """Add the terms of some rows."""
        for term in terms:
            self.count += term.count
            self.unit_count += term.unit_count
            for name in SUMS:
                self._sums[name].add(getattr(term, name))

    def merge(self, other: "Moments") -> "Moments":
        """Return the moments of both streams, as a new object on this one's device.

        Merging is exact: sums are added without rounding, so any order and nesting of merges gives the same bits; sums
        may differ in size by 10³¹ and more (see `CompensatedSum`). The split of a stream into batches changes
        sums by up to 1e-13 of their norm, the rounding inside a matrix product; if rows are integers and sums stay
        below 2⁵³ it changes nothing. ValueError for another dim.
        """
        if self.dim != other.dim:
            raise ValueError(f"Moments to merge need the same dim, got {self.dim} and {other.dim}.")
        merged = Moments.__new__(Moments)
        merged.dim = self.dim
        merged.count = self.count + other.count
        merged.unit_count = self.unit_count + other.unit_count
        merged._sums = {name: self._sums[name].merge(other._sums[name]) for name in SUMS}
        return merged

    def __add__(self, other: "Moments") -> "Moments":
        return self.merge(other) if isinstance(other, Moments) else NotImplemented

    def __repr__(self) -> str:
        return f"Moments(dim={self.dim}, count={self.count})"

    def mean(self) -> Tensor:
        """Return the mean row, sum/n, (d,)."""
        self._check_filled()
        return self.sum / self.count

    def variance(self) -> Tensor:
        """Return Σ_i (x_ij − mean_j)²/n of each feature j, (d,); 0 for what looks like a constant feature."""
        self._check_filled()
        spread = self._scatter(center=True).diagonal()
        return torch.where(spread > NOISE * self.gram.diagonal(), spread, 0.0) / self.count

    def covariance(self, center: bool = True) -> Tensor:
        """Return Σ_i (x_i − mean)(x_i − mean)ᵀ/n, (d, d); without `center`, gram/n."""
        self._check_filled()
        return self._scatter(center) / self.count

    def spectrum(self, center: bool = False) -> Tensor:
        """Return the singular values of the stacked rows (minus their mean with `center`), descending, (min(n, d),).

        Values at the noise of the Gram matrix (see the class) are 0: identical rows have rank 1, and 0 with `center`.
        """
        self._check_filled()
        values = torch.linalg.eigvalsh(self._scatter(center)).flip(0)[: min(self.count, self.dim)]
        scale = values[0] + self.sum.square().sum() / self.count if center else values[0]
        return torch.where(values > NOISE * scale, values, 0.0).sqrt()

    def effective_rank(self, center: bool = False) -> Tensor:
        """Return exp(−Σ p log p) of the singular values p = σ/Σσ (ContraNorm, arXiv 2303.06562); 0 if all are 0."""
        return rank_from_singular_values(self.spectrum(center))

    def stable_rank(self, center: bool = False) -> Tensor:
        """Return Σσ²/σ₁²; 0 if all singular values are 0."""
        return self._relative_spectrum(center).square().sum()

    def participation_ratio(self, center: bool = False) -> Tensor:
        """Return (Σσ²)²/Σσ⁴; 0 if all singular values are 0."""
        squares = self._relative_spectrum(center).square()
        return _ratio(squares.sum().square(), squares.square().sum())

    def mean_cosine(self) -> Tensor:
        """Return the mean of cos(x_i, x_j) over i ≠ j, (‖unit_sum‖² − unit_count)/(n(n−1)); 0 for one row."""
        self._check_filled()
        if self.count == 1:
            return self.sum.new_zeros(())
        return (self.unit_sum.square().sum() - self.unit_count) / (self.count * (self.count - 1))

    def feature_correlation(self) -> Tensor:
        """Return the mean absolute off-diagonal correlation of the features; 0 for constant features and d = 1."""
        spread = self.variance()
        inverse = torch.where(spread > 0, spread.rsqrt(), 0.0)
        correlation = (self.covariance() * inverse * inverse[:, None]).abs().clamp(max=1).fill_diagonal_(0)
        return correlation.sum() / max(1, self.dim * (self.dim - 1))

    def outlier_share(self, k: int = 3) -> Tensor:
        """Return the share of the total variance in the k features of largest variance; 0 without variance."""
        check_positive(k, "k")
        spread = self.variance()
        return _ratio(spread.topk(min(k, self.dim)).values.sum(), spread.sum())

    def state(self) -> dict[str, Tensor | int]:
        """Return a copy of everything, for storage: ints, and sums (2, ...) or, after a merge, (3, ...)."""
        sums = {name: total.parts.clone() for name, total in self._sums.items()}
        return {"count": self.count, "unit_count": self.unit_count, **sums}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor | int]) -> Self:
        """Return the moments that `state()` described; ints may be one-element tensors. ValueError if it is invalid."""
        check_keys(state, ("count", "unit_count", *SUMS))
        total = read_tensor(state, "sum", torch.float64, (None, None))
        sums = {name: _read_sum(state, name, shape) for name, shape in _shapes(total.shape[1]).items()}
        moments = cls(total.shape[1], total.device)  # only now: a state may declare any width
        moments._sums = sums
        moments.count, moments.unit_count = read_integer(state, "count"), read_integer(state, "unit_count")
        if moments.unit_count > moments.count:
            raise ValueError(f"unit_count is at most count, got {moments.unit_count} and {moments.count}.")
        if bool((moments.gram.diagonal() < 0).any()):
            raise ValueError(
                "The diagonal of gram holds sums of squares, got negative values: this is no state of Moments."
            )
        return moments

    def _check_filled(self) -> None:
        if self.count == 0:
            raise ValueError("These Moments hold no rows, so nothing can be derived from them. Call update first.")

    def _scatter(self, center: bool) -> Tensor:
        return self.gram - torch.outer(self.sum, self.sum) / self.count if center else self.gram

    def _relative_spectrum(self, center: bool) -> Tensor:
        values = self.spectrum(center)
        return values / torch.where(values[0] > 0, values[0], 1.0)


def _terms(all_rows: Tensor, device: torch.device) -> Terms:
    """Return the sums over a few chunks of rows (n, d), n > 0."""
    dim, unit_count = all_rows.shape[1], 0
    sums = torch.zeros(2, dim, dtype=torch.float64, device=device)
    gram, product = sums.new_empty(2, dim, dim)  # memory that one chunk does not need is never touched
    for number, rows in enumerate(rows.to(device).to(torch.float64) for rows in chunks((all_rows, None))):
        length = torch.linalg.vector_norm(rows, dim=-1)
        pointing = length > SMALLEST
        unit_count += int(pointing.sum())
        sums += torch.stack([torch.ones_like(length), torch.where(pointing, 1 / length, 0.0)]) @ rows
        if number == 0:
            _gram(rows, gram)
        else:
            gram += _gram(rows, product)
    return Terms(len(all_rows), unit_count, sums[0], _mirror(gram), sums[1])


def _gram(rows: Tensor, out: Tensor) -> Tensor:
    """Write XᵀX of rows (n, d) into the blocks of `out` on its diagonal and above it, and return it.

    It is a third less work. Adding to `out` in the same product would round more: one long sum instead of short ones.
    """
    for part in _block_rows(out):
        out[part, part.start :].addmm_(rows[:, part].mT, rows[:, part.start :], beta=0)
    return out


def _mirror(gram: Tensor) -> Tensor:
    """Return a matrix with the blocks below the diagonal as those above it, in place."""
    for part in _block_rows(gram):
        gram[part.stop :, part] = gram[part, part.stop :].mT
    return gram


def _block_rows(gram: Tensor) -> list[slice]:
    dim = gram.shape[0]
    step = max(NARROWEST, -(-dim // 4))
    return [slice(start, start + step) for start in range(0, dim, step)]


def _shapes(dim: int) -> dict[str, tuple[int, ...]]:
    return dict(zip(SUMS, ((dim,), (dim, dim), (dim,)), strict=True))


def _read_sum(state: Mapping[str, Tensor | int], name: str, shape: tuple[int, ...]) -> CompensatedSum:
    parts = read_tensor(state, name, torch.float64, (None, *shape))
    if not 2 <= len(parts) <= PARTS or bool((parts.abs() > BEYOND).any()):
        raise ValueError(
            f"{name} must hold a sum as 2 to {PARTS} numbers of at most {BEYOND:g}: this is not a state of Moments."
        )
    return CompensatedSum(parts.clone())


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part / torch.where(whole > 0, whole, 1.0), 0.0)
