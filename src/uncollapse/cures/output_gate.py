"""Output gate: a sigmoid gate on the output of each attention head (Qiu et al., NeurIPS 2025, arXiv 2505.06708)."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from uncollapse.registry import cure


def output_gate(context: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
    """Gate the output of attention by its input, before the output projection.

        y = Av ⊙ σ(xWᵀ)

    Gated attention (arXiv 2505.06708), position G1.

    Args:
        context: Av (..., heads, n, d).
        inputs: x (..., n, e), what enters the attention, after the norm if there is one before it.
        weight: W (heads·d, e), one gate per feature of each head, or (heads, e), one gate per head.

    Returns:
        y, with the shape and dtype of context.

    >>> output_gate(torch.ones(1, 2, 3), torch.zeros(2, 4), torch.zeros(1, 4))  # a gate of ½ for the one head
    tensor([[[0.5000, 0.5000, 0.5000],
             [0.5000, 0.5000, 0.5000]]])
    """
    if context.dim() < 3 or inputs.dim() < 2 or weight.dim() != 2:
        shapes = ", ".join(str(tuple(x.shape)) for x in (context, inputs, weight))
        raise ValueError(f"context must be (..., heads, n, d), inputs (..., n, e), weight 2-dimensional, got {shapes}.")
    heads, n, d = context.shape[-3:]
    if inputs.shape[-2] != n or weight.shape[0] not in (heads, heads * d) or weight.shape[1] != inputs.shape[-1]:
        raise ValueError(
            f"weight must have shape ({heads}, {inputs.shape[-1]}) or ({heads * d}, {inputs.shape[-1]}) and inputs "
            f"{n} tokens, got {tuple(weight.shape)} and {inputs.shape[-2]}."
        )
    gate = torch.sigmoid(inputs @ weight.mT)
    gate = gate.reshape(*gate.shape[:-1], heads, -1).transpose(-2, -3)  # (..., heads, n, d or 1)
    return (context * gate).to(context.dtype)


@cure(
    output_gate,
    acts_on="attention",
    paper="Gated Attention for Large Language Models, NeurIPS 2025, arXiv 2505.06708",
    mixes=False,
    cost="O(nd²), as one more projection; O(nd·heads) with headwise=True; fused attention stays",
    use="Transformers with attention sinks or unstable training, from scratch",
)
class OutputGate(nn.Module):
    """`output_gate` with learned weights. Gated attention (arXiv 2505.06708).

    Weights are drawn from N(0, 0.02²) as by the authors, so that all gates start close to ½.

    Args:
        heads: number of heads.
        dim: features of all heads together.
        dim_in: features of the input of attention; the same if not given.
        headwise: one gate per head instead of one per feature.

    Shape: context and v (..., heads, n, d), inputs (..., n, dim_in) -> context's.

    >>> context, v = torch.randn(2, 2, 4, 5, 8)
    >>> OutputGate(4, 32)(context, v, torch.randn(2, 5, 32)).shape
    torch.Size([2, 4, 5, 8])
    """

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {"elementwise": {}, "headwise": {"headwise": True}}

    def __init__(self, heads: int, dim: int, dim_in: int | None = None, *, headwise: bool = False) -> None:
        super().__init__()
        self.heads, self.headwise = heads, headwise
        self.weight = nn.Parameter(torch.empty(heads if headwise else dim, dim_in or dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, context: Tensor, v: Tensor, inputs: Tensor) -> Tensor:
        """Gate the context of each head; the values are not needed."""
        return output_gate(context, inputs, self.weight)

    def extra_repr(self) -> str:
        """Return the options."""
        return f"heads={self.heads}, headwise={self.headwise}"
