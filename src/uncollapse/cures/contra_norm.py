"""ContraNorm: one gradient step on the uniformity loss, as a layer (Guo et al., ICLR 2023, arXiv 2303.06562)."""

import inspect
import math
from dataclasses import replace
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from uncollapse.cures.feature_means import feature_means
from uncollapse.cures.groups import Groups, check_graphs, neighbours
from uncollapse.errors import did_you_mean
from uncollapse.pairwise import Pairs, backends, check_pairs, column_mean, log_weight, numerics, row_mean
from uncollapse.pairwise.sampling import sampled_mean
from uncollapse.registry import cure

PAPER = "ContraNorm, ICLR 2023, arXiv 2303.06562"


def contra_norm(
    x: Tensor,
    scale: float | Tensor,
    *,
    temperature: float | Tensor = 1.0,
    identity: bool | Literal["scale"] = False,
    dual: bool = False,
    average: Literal["raw", "unit"] = "raw",
    axis: Literal["tokens", "features"] = "tokens",
    center: bool = False,
    pre_norm: bool = False,
    mask: Tensor | None = None,
    causal: bool = False,
    edge_index: Tensor | None = None,
    batch: Tensor | None = None,
    exclude_self: bool = False,
    sample: int | None = None,
) -> Tensor:
    """Push each token away from the mean of the tokens that are similar to it.

        x̂_i = x_i/|x_i|      m_i = Σ_j softmax_j(x̂_i·x̂_j/τ) x_j      y = x − s·m

    ContraNorm (arXiv 2303.06562), Eq. 7 and, with `identity`, Eq. 8: y = (1 + s)x − s·m. The LayerNorm of Eq. 9 is not
    included, see `ContraNorm`. As in the published code, similarities are between unit rows, the averaged rows are not
    normalized, and τ acts only inside the softmax. Memory is linear in n.

    Args:
        x: tokens or nodes (..., n, d).
        scale: s; a float, or a tensor that broadcasts against x, such as (d,) for one scale per feature. 0.0 returns x
            itself (except with identity="scale").
        temperature: τ.
        identity: True adds s·x. "scale" returns s·x − s·m, without x itself, as the published ViT code does when the
            scale is learned.
        dual: add the second term of the gradient (Eq. 5), Σ_j exp(S_ij) x_j / Z_j, to m.
        average: "unit" averages x̂ but steps from x: y = x − s·Σ_j softmax_j(x̂_i·x̂_j/τ) x̂_j. No published code has it.
        axis: "features" is ContraNorm-v2 (Eq. 30): m = x·softmax(x̂ᵀx̂/τ), in O(nd²).
        center: subtract from each row its own mean first.
        pre_norm: replace x by x̂ before the step, after `center`: y = x̂ − s·Σ_j softmax_j(x̂_i·x̂_j/τ) x̂_j. The
            published code's `pre_norm` (ViT) and `use_norm` (ogbn-arxiv).
        mask: (..., n) bool, True = real. Masked rows have no influence and do not change.
        causal: token i sees only tokens j ≤ i.
        edge_index: (2, E) edges. Both directions of each and self are excluded from m, as in the published graph code.
        batch: (n,) graph of each node, for x (n, d). Only pairs within a graph count.
        exclude_self: exclude j = i.
        sample: use this many random keys (per graph, with `batch`) instead of all. They estimate the difference between
            the softmax mean over the other rows and their plain mean; the latter and the row's own term stay exact.

    Returns:
        y, with the shape and dtype of x. Where no key is left to average, m = 0.

    >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> contra_norm(x, 1.0, exclude_self=True)
    tensor([[ 0.2689, -0.2689],
            [ 0.2689, -0.2689],
            [-1.0000,  1.0000]])
    """
    check_options(axis, average, identity, dual, causal, exclude_self or edge_index is not None, sample)
    numerics.check_tokens(x, mask)
    numerics.check_temperature(temperature)
    if batch is not None:
        check_graphs(x, causal)
    if not isinstance(scale, Tensor) and scale == 0 and identity != "scale":
        return x
    given, x = x, numerics.prepare(x, mask)
    if center:
        x = x - x.mean(-1, keepdim=True)
    unit = numerics.unit_rows(x)
    x = unit if pre_norm else x
    value = unit if average == "unit" else x
    groups = None if batch is None else Groups(batch, x.shape[0])
    dtype = backends.product_dtype(given)
    if axis == "features":
        mean = _features_mean(unit, value, temperature, dual, groups)
    elif groups is None:
        pairs = _pairs(x.shape[-2], causal, exclude_self, edge_index)
        mean = _tokens_mean(unit, value, dtype, temperature, dual, mask, pairs, sample)
    else:
        edges = None if edge_index is None else groups.sort_edges(check_pairs(edge_index, len(x), len(x), "edge_index"))
        pairs = replace(_pairs(len(x), causal, exclude_self, edges), row_group=groups.sorted, key_group=groups.sorted)
        unit, value, mask_ = groups.sort(unit), groups.sort(value), None if mask is None else groups.sort(mask)
        mean = groups.unsort(_tokens_mean(unit, value, dtype, temperature, dual, mask_, pairs, sample))
    out = _step(x, mean, scale, identity).to(given.dtype)
    return out if mask is None else torch.where(mask.unsqueeze(-1), out, given)


def _step(x: Tensor, mean: Tensor, scale: float | Tensor, identity: bool | Literal["scale"]) -> Tensor:
    """Return x − s·m, (1 + s)x − s·m or s·x − s·m, in one pass if the scale is a number."""
    if identity == "scale":
        return (x - mean) * scale
    if isinstance(scale, Tensor):
        return x - scale * (mean - x if identity else mean)
    return torch.lerp(x, mean, -scale) if identity else torch.sub(x, mean, alpha=scale)


def check_options(
    axis: str, average: str, identity: bool | str, dual: bool, causal: bool, exclude: bool, sample: int | None
) -> None:
    """Raise if an option is unknown or two of them cannot be combined."""
    for name, value, choices in (
        ("axis", axis, ("tokens", "features")),
        ("average", average, ("raw", "unit")),
        ("identity", identity, (False, True, "scale")),
    ):
        if value not in choices:
            raise ValueError(f"{name} must be one of {choices}, got {value!r}.{did_you_mean(value, choices)}")
    if causal and (dual or axis == "features"):
        raise ValueError("causal cannot be combined with dual or axis='features', which read later tokens. Remove one.")
    if axis == "features" and (exclude or sample is not None):
        raise ValueError("axis='features' averages features: remove edge_index, exclude_self and sample.")
    if sample is not None and (causal or dual or sample < 1):
        raise ValueError(f"sample must be at least 1 and cannot be combined with causal or dual, got {sample}.")


def _features_mean(
    unit: Tensor, value: Tensor, temperature: float | Tensor, dual: bool, groups: Groups | None
) -> Tensor:
    if groups is not None:
        parts = zip(groups.split(unit), groups.split(value), strict=True)
        return groups.unsort(torch.cat([_features_mean(u, v, temperature, dual, None) for u, v in parts]))
    with torch.autocast(unit.device.type, enabled=False):
        if not dual and not isinstance(temperature, Tensor):
            return feature_means(unit, value, temperature)
        logits = unit.mT @ (unit / temperature)  # (..., d, d), much larger than unit for short sequences
        return value @ (logits.softmax(-1) + logits.softmax(-2) if dual else logits.softmax(-1))


def _pairs(n: int, causal: bool, exclude_self: bool, edge_index: Tensor | None) -> Pairs:
    pairs = Pairs(0 if causal else None, no_self=exclude_self)
    if edge_index is None:
        return pairs
    return replace(pairs, no_self=True, excluded=neighbours(edge_index, n))


def _tokens_mean(
    unit: Tensor,
    value: Tensor,
    dtype: torch.dtype,
    temperature: float | Tensor,
    dual: bool,
    mask: Tensor | None,
    pairs: Pairs,
    sample: int | None,
) -> Tensor:
    """Return m; dtype: what rows are rounded to before they are multiplied."""
    if sample is not None and sample < unit.shape[-2]:
        return sampled_mean(unit, value, temperature, mask, pairs, sample)
    unit, value = unit.to(dtype), value.to(dtype)
    mean = row_mean(unit, unit, value, temperature, pairs, log_weight(mask, unit))
    return mean + column_mean(unit, unit, value, temperature, pairs, mask, query_mask=mask) if dual else mean


@cure(
    contra_norm,
    acts_on="tokens",
    paper=PAPER,
    cost="O(n²d) time, O(nd) memory; O(nd·sample) with sample=",
    use="Transformers and graph networks whose tokens grow alike or span few dimensions",
    attached={"after": None},  # the model has norms of its own
)
class ContraNorm(nn.Module):
    """`contra_norm` with a fixed or learned scale, followed by a norm: LayerNorm(x − s·m), Eq. 9.

    ContraNorm (arXiv 2303.06562).

    Args:
        dim: number of features d; None for any, if neither a learned scale nor a LayerNorm depends on it.
        scale: s, or its initial value when learned.
        learnable: learn one scale per feature.
        positive: the learned scale is the exponential of its parameter.
        after: the norm that follows: "layer" (LayerNorm with weight and bias), "l2" (unit rows) or None. Use None in
            front of a norm that the model already has.
        eps: ε of the LayerNorm.
        temperature, identity, dual, average, axis, center, pre_norm, exclude_self: as for `contra_norm`.
        sample: number of random keys in each training step; evaluation uses all.

    Shape: x (..., n, d) -> the same. The norm that follows acts on all rows, including masked ones.

    >>> layer = ContraNorm(8, 0.2)
    >>> layer(torch.randn(2, 5, 8), mask=torch.ones(2, 5, dtype=torch.bool)).shape
    torch.Size([2, 5, 8])
    """

    # The published variants. Where `after` is None, the network has its own norm after the layer.
    PRESETS: dict[str, dict[str, Any]] = {  # noqa: RUF012
        "bert": {"identity": True, "after": None},
        "bert_v2": {"identity": True, "axis": "features", "after": None},
        "albert": {"after": None},
        "vit": {"after": "layer", "eps": 1e-6},
        "gnn": {"identity": True, "exclude_self": True, "after": None},
        "arxiv": {"identity": True, "axis": "features", "after": None},
    }

    def __init__(
        self,
        dim: int | None,
        scale: float,
        *,
        temperature: float = 1.0,
        identity: bool | Literal["scale"] = False,
        dual: bool = False,
        average: Literal["raw", "unit"] = "raw",
        axis: Literal["tokens", "features"] = "tokens",
        center: bool = False,
        pre_norm: bool = False,
        exclude_self: bool = False,
        sample: int | None = None,
        learnable: bool = False,
        positive: bool = False,
        after: Literal["layer", "l2"] | None = "layer",
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        check_options(axis, average, identity, dual, False, exclude_self, sample)
        numerics.check_temperature(temperature)
        if not isinstance(scale, int | float) or not math.isfinite(scale):
            raise ValueError(f"scale must be a finite number, got {scale!r}.")
        if after not in ("layer", "l2", None):
            raise ValueError(f"after must be 'layer', 'l2' or None, got {after!r}.")
        if positive and not (learnable and scale > 0):
            raise ValueError(
                f"positive needs learnable=True and a scale above 0, got learnable={learnable}, scale={scale}."
            )
        if dim is None and (learnable or after == "layer"):
            raise ValueError("dim, the number of features, is required for learnable=True and for after='layer'.")
        self.dim, self.fixed_scale, self.positive, self.after, self.sample = dim, float(scale), positive, after, sample
        self.options: dict[str, Any] = {
            "temperature": temperature,
            "identity": identity,
            "dual": dual,
            "average": average,
            "axis": axis,
            "center": center,
            "pre_norm": pre_norm,
            "exclude_self": exclude_self,
        }
        self.scale_param = nn.Parameter(torch.empty(dim)) if learnable and dim is not None else None
        self.norm = nn.LayerNorm(dim, eps=eps) if after == "layer" and dim is not None else None
        self.reset_parameters()

    @classmethod
    def preset(cls, name: str, dim: int, scale: float, **changes: Any) -> Self:
        """Return the published variant: bert, bert_v2, albert, vit, gnn (pass edge_index to forward) or arxiv."""
        if name not in cls.PRESETS:
            hint = did_you_mean(name, cls.PRESETS)
            raise ValueError(f"There is no preset {name!r}.{hint} There are: {', '.join(cls.PRESETS)}.")
        return cls(dim, scale, **{**cls.PRESETS[name], **changes})

    @property
    def reads(self) -> tuple[str, ...]:
        """The context it takes in addition to x; the average over features has no pairs that edges could exclude."""
        graph = ("batch",) if self.options["axis"] == "features" else ("edge_index", "batch")
        return ("mask", "causal", *graph)

    @property
    def scale(self) -> float | Tensor:
        """The current scale: a number, or (d,) when learned."""
        if self.scale_param is None:
            return self.fixed_scale
        return self.scale_param.exp() if self.positive else self.scale_param

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        causal: bool = False,
        edge_index: Tensor | None = None,
        batch: Tensor | None = None,
    ) -> Tensor:
        """Apply the layer to x (..., n, d); the other arguments are those of `contra_norm`."""
        if self.dim is not None and x.shape[-1] != self.dim:
            raise ValueError(f"This ContraNorm expects {self.dim} features, got x of shape {tuple(x.shape)}.")
        if causal and self.sample is not None:  # also in evaluation, so that the error does not wait for training
            raise ValueError(f"sample cannot be combined with causal: it draws later tokens, got sample={self.sample}.")
        sample = self.sample if self.training else None
        x = contra_norm(
            x, self.scale, mask=mask, causal=causal, edge_index=edge_index, batch=batch, sample=sample, **self.options
        )
        if self.norm is not None:
            x = self.norm(x)
        return numerics.unit_rows(x) if self.after == "l2" else x

    def extra_repr(self) -> str:
        """Return the options that differ from their defaults."""
        defaults = inspect.signature(type(self).__init__).parameters
        options = {**self.options, "sample": self.sample, "positive": self.positive, "after": self.after}
        options["learnable"] = self.scale_param is not None
        shown = [f"{name}={value!r}" for name, value in options.items() if value != defaults[name].default]
        return ", ".join([f"{self.dim}, scale={self.fixed_scale}", *shown])

    def reset_parameters(self) -> None:
        """Reset to the initial values."""
        if self.scale_param is not None:
            nn.init.constant_(self.scale_param, math.log(self.fixed_scale) if self.positive else self.fixed_scale)
        if self.norm is not None:
            self.norm.reset_parameters()
