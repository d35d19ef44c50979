"""What goes into the walks over all pairs and what comes out of them."""

import math
from typing import NamedTuple

from torch import Tensor

ABSENT = -1e30  # the logit of a pair that does not count: finite, see the package's docstring
LOG2E = math.log2(math.e)
RULE = 1.5  # a key rules its row if the whole is less than this times its weight; so it holds 2/3, and no other 1/2
PLAIN, RULED, SYMMETRIC = 0, 1, 2  # how a row was computed: by `rows`, with a ruling key, by `symmetric`


class Given(NamedTuple):
    """Queries (b, n, d), keys (b, m, d), values (b, m, e), log-weights of the keys (b, m), and τ.

    All are finite but the log-weights, which are −inf for keys that do not count.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    temperature: float

    def chunk(self, c: slice) -> "Given":
        """Batch elements c."""
        bias = None if self.bias is None else self.bias[c]
        return Given(self.q[c], self.k[c], self.v[c], bias, self.temperature)


class Found(NamedTuple):
    """Means (b, n, e), log₂ of the sums (b, n), how each row was computed (b, n), and the softmax weights (b, n, m).

    The weights are kept where `keeps_weights` says so; else they are empty, and made again when they are needed.
    """

    mean: Tensor
    log2sum: Tensor
    kind: Tensor
    weight: Tensor


class Incoming(NamedTuple):
    """Gradients of the means (b, n, e) and of the logarithms of the sums (b, n)."""

    mean: Tensor
    log: Tensor


class Gradients(NamedTuple):
    """Gradients of q, k, v and bias, filled in place; with k = q the first two are one tensor."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
