"""A diagnosis as curves over the layers, and as scalars with names for a logger."""

import math
import re
from collections.abc import Mapping, Sequence

from uncollapse.backbones.sites import OUTPUT
from uncollapse.diagnosis.result import Diagnosis, Layer

Curves = Mapping[str, Mapping[str, float]]  # measure -> layer -> value


def label(layer: Layer) -> str:
    """What a layer is called: "block 9", or "block 9 attention.residual" at another place than after the block."""
    return layer.name if layer.place == OUTPUT else f"{layer.name} {layer.place}"


def values(diagnosis: Diagnosis) -> dict[str, dict[str, float]]:
    """Every measure of every layer: layer -> measure -> value."""
    return {label(layer): {name: layer[name] for name in layer.measures} for layer in diagnosis.layers}


def curves(diagnosis: Diagnosis, measures: Sequence[str]) -> Curves:
    """The chosen measures over the layers that have them."""
    found = {
        name: {label(layer): layer[name] for layer in diagnosis.layers if name in layer.measures} for name in measures
    }
    missing = [name for name, curve in found.items() if not curve]
    if missing:
        taken = sorted({name for layer in diagnosis.layers for name in layer.measures})
        raise ValueError(
            f"measures names {missing[0]!r}, which was not taken in {diagnosis.architecture}. "
            f"There are: {', '.join(taken)}; attention measures need attention=True."
        )
    return found


def scalars(diagnosis: Diagnosis, chosen: Curves) -> dict[str, float]:
    """Names and values for a logger: `collapse/effective_rank/block_09`, and a few for the whole model."""
    named = {
        f"collapse/{measure}/{slug(layer)}": value
        for measure, curve in chosen.items()
        for layer, value in curve.items()
    }
    ranks = [layer["effective_rank"] for layer in diagnosis.layers if layer.place == OUTPUT]
    lowest = min((rank for rank in ranks if not math.isnan(rank)), default=None)
    if lowest is not None:
        named["collapse/lowest_effective_rank"] = lowest
    return named | {"collapse/verdict": float(diagnosis.verdict.collapsed)}


def slug(layer: str) -> str:
    """A layer's name in the name of a scalar; numbers of blocks have two digits, so that loggers sort them."""
    padded = re.sub(r"(?<= )\d+", lambda number: number[0].zfill(2), layer)
    return re.sub(r"[^\w.]+", "_", padded).strip("_")
