"""The dispersion loss against embedding condensation in language models, in its four forms (arXiv 2602.00217)."""

import math
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from uncollapse.pairwise import all_ranks
from uncollapse.pairwise.numerics import check_rows, check_temperature, prepare, real_count, unit_rows
from uncollapse.pairwise.pair_means import log_potential, pair_squares, reduce_pairs
from uncollapse.registry import loss

PAPER = (
    "Dispersion Loss Counteracts Embedding Condensation and Improves Generalization in Small Language Models, "
    "ICML 2026, arXiv 2602.00217"
)
FORMS = ("angular_spread", "decorrelation", "l2_repel", "orthogonalization")


@loss(needs=("tokens",), paper=PAPER)
def dispersion_loss(
    x: Tensor,
    form: Literal["angular_spread", "decorrelation", "l2_repel", "orthogonalization"] = "angular_spread",
    *,
    temperature: float = 1.0,
    clamp: float = 0.25,
    norm_weight: float = 0.1,
    mask: Tensor | None = None,
    gather: bool = False,
) -> Tensor:
    """Disperse the tokens of each sequence (arXiv 2602.00217, table of formulations).

        angular_spread:     log mean_{i≠j} exp(−D_ij/τ),          D_ij = arccos(cos(x_i, x_j))/π
        decorrelation:      mean_{i≠j} r_ij²,                     r_ij = correlation of x_i and x_j over features
        l2_repel:           log mean_{i≠j} exp(−‖x_i − x_j‖²/τ) + λ mean(x²)
        orthogonalization:  mean_{i≠j} max(0, ½ − D_ij)²

    "angular_spread" is the paper's dispersion loss; the others are its alternatives. All tokens of a sequence count:
    the released code draws 256 of them at random, because it builds the matrix of all pairs. The paper prints sums in
    place of means, which differ by a constant inside the logarithm. Its pairs are not causal, and need not be: a pair
    has the same term in both orders, so the mean over j < i is the same.

    "l2_repel" is `uniform_loss` with `normalize=False` and t = 1/τ, plus the norms. The released code includes the
    pairs i = i in it; the paper does not. "decorrelation" is `covariance_loss` with tokens in the place of features.

    Args:
        x: tokens (..., n, d) of one layer. The authors average the loss over all layers.
        form: see above.
        temperature: τ > 0 of the two logarithmic forms.
        clamp: beyond |cos| = 1 − clamp the slope of arccos, which grows without bound, stays what it is there; between
            0 and 1. The released code clamps the value too.
        norm_weight: λ of "l2_repel", without which norms grow forever.
        mask: (..., n) bool, True = real. Masked tokens may hold anything and have no influence.
        gather: take the rows of all processes as one batch, see `pairwise.all_ranks`. Every process gets the value of
            all rows; gradients are correct after DistributedDataParallel has averaged them over processes. Rows (n, d)
            of all processes are one set; each sequence of (..., n, d) stays in its process.

    Returns:
        A scalar, the mean over sequences with at least two real tokens, in float32 (float64 for float64 inputs); 0 if
        there are none. For identical rows it is 0, 1, λ mean(x²) and ¼, with a gradient of zero but for the norms. A
        zero row, and in "decorrelation" a constant one, is orthogonal to all others.

    >>> import torch
    >>> dispersion_loss(torch.eye(3))  # right angles: −½/τ
    tensor(-0.5000)
    >>> dispersion_loss(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), "orthogonalization")  # (½ − ¼)²
    tensor(0.0625)
    """
    _check(form, temperature, clamp)
    check_rows(x, mask, gather=gather)
    h = prepare(x, mask)
    across = h.dim() == 2 and all_ranks.spans_ranks(gather)
    if across and mask is not None:
        h, mask = h[mask], None
    count = all_ranks.total(real_count(h, mask), across)
    pairs = (count * (count - 1)).clamp(min=1)  # in both orders
    if form == "decorrelation":
        mean = h.mean(-1, keepdim=True, dtype=torch.float64).to(h.dtype)  # a constant row differs from it by exactly 0
        each = pair_squares(unit_rows(h - mean), across) / pairs
    elif form == "l2_repel":
        norms = all_ranks.total(h.square().sum((-2, -1)), across) / (count.clamp(min=1) * h.shape[-1])
        each = log_potential(h, 1 / temperature, mask, True, False, across) + norm_weight * norms
    elif form == "orthogonalization":
        hinge = partial(_hinge, clamp=clamp)
        each = 2 * reduce_pairs(hinge, unit_rows(h), mask=mask, gather=across) / pairs
    else:
        logit = partial(_logit, clamp=clamp, temperature=temperature)
        each = reduce_pairs(logit, unit_rows(h), mask=mask, log=True, gather=across) - (pairs / 2).log()
    return all_ranks.mean_of_sets(each, count > 1, gather and not across)


def _hinge(cosine: Tensor, clamp: float) -> Tensor:
    """Return max(0, ½ − D)²."""
    return (0.5 - _angle(cosine, clamp)).relu().square()


def _logit(cosine: Tensor, clamp: float, temperature: float) -> Tensor:
    """Return −D/τ."""
    return _angle(cosine, clamp) / -temperature


def _angle(cosine: Tensor, clamp: float) -> Tensor:
    """Return D."""
    angle: Tensor = _Angle.apply(cosine, clamp)  # type: ignore[no-untyped-call]
    return angle


class _Angle(torch.autograd.Function):
    """arccos(c)/π, with its slope where |c| ≤ 1 − clamp and the slope of that bound beyond it."""

    @staticmethod
    def forward(ctx: Any, cosine: Tensor, clamp: float) -> Tensor:
        ctx.save_for_backward(cosine)
        ctx.most = 1 - clamp
        return cosine.clamp(-1, 1).arccos_().div_(math.pi)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (cosine,) = ctx.saved_tensors
        slope = cosine.clamp(-ctx.most, ctx.most).square_().neg_().add_(1).rsqrt_().div_(-math.pi)
        return slope.mul_(gradient), None


def _check(form: str, temperature: float, clamp: float) -> None:
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}.")
    check_temperature(temperature)
    if not 0 < clamp < 1:
        raise ValueError(f"clamp must lie between 0 and 1, got {clamp}.")
