"""Diagnose activations that were read elsewhere: no model, no forward pass."""

import time
from collections.abc import Mapping, Sequence

from torch import Tensor

from uncollapse.backbones.sites import OUTPUT, Context, sets_with_mask
from uncollapse.diagnosis.build import Labels, Measured, build, check_enough, settings_of
from uncollapse.diagnosis.layer_stats import LayerStats, StatsConfig
from uncollapse.diagnosis.result import Diagnosis
from uncollapse.diagnosis.target import Plan
from uncollapse.diagnosis.verdict import Subject
from uncollapse.pairwise import numerics


def diagnose_activations(
    activations: Sequence[Tensor] | Mapping[str, Tensor],
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    labels: Labels | None = None,
    plan: Plan = Plan(rank_samples=16),
) -> Diagnosis:
    """Measure activations that you already have: one tensor (b, n, d) or (n, d) per layer, in the order of the model.

    Args:
        activations: the tensors. The keys of a mapping name the layers; otherwise they are "layer 0" and so on.
        mask: (b, n) bool, True = real.
        causal: whether the model is a causal decoder, whose first token is left out of robust measures.
        labels: as in `diagnose`.
        plan: `rank_samples` and `seed` apply, see `diagnose`.

    >>> import torch, uncollapse as uc
    >>> uc.diagnose_activations([torch.randn(8, 32, 16), torch.ones(8, 32, 16)]).verdict.kind
    'complete'
    """
    started = time.perf_counter()
    if isinstance(activations, Tensor):  # its first axis may be the layers or the samples
        raise ValueError(
            "activations must be a list or a mapping with one tensor per layer, got one Tensor; pass [x] for a single "
            "layer, or list(x) if the first axis of x is the layers."
        )
    if not isinstance(activations, Mapping):
        activations = {f"layer {number}": x for number, x in enumerate(activations)}
    if not activations:
        raise ValueError("There are no activations: give one tensor (b, n, d) per layer.")
    config = StatsConfig(plan.rank_samples, prefix=True, all_tokens=True, seed=plan.seed)  # no forward pass to save
    context = Context(mask, causal=causal)
    layers, sequences = [], 0
    for name, x in activations.items():
        numerics.check_rows(x, name=f"The tensor of {name}")
        if x.dim() > 3:
            raise ValueError(
                f"The tensor of {name} must have shape (b, n, d) or (n, d), got {tuple(x.shape)}, which can be read in "
                "several ways. Images (b, d, h, w) become tokens by x.flatten(2).mT, (b, h, w, d) by x.flatten(1, 2)."
            )
        stats = LayerStats(config)
        sets, real = sets_with_mask(x, "tokens", context, prefix=True)
        stats.update(sets, real, context)
        layers.append(stats.layer(name, OUTPUT, ""))
        sequences = stats.sets
    check_enough(layers[-1].tokens)
    subject = Subject("activations", "activations", causal, (OUTPUT,))
    settings, seconds = settings_of(config, (OUTPUT,)), time.perf_counter() - started
    measured = Measured(tuple(layers), sequences=sequences, settings=settings, seconds=seconds)
    return build(measured, subject, labels or Labels())
