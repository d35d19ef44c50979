"""Objectives of contrastive encoders: InfoNCE, alignment and uniformity in any weights."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from uncollapse.errors import UsageError
from uncollapse.lab.config.fields import config_field, reset_idle
from uncollapse.losses.align_uniform import align_loss, uniform_loss
from uncollapse.losses.info_nce import info_nce

OBJECTIVE = "Objective"  # panel of the help
TERMS = {
    "contrast": ("temperature", "negatives"),
    "align": ("alpha",),
    "uniform": ("t",),
}  # weight of a term -> the fields that only this term uses


@dataclass(frozen=True)
class ObjectiveConfig:
    """Objective of a run. Fields of a term with weight 0 get their defaults, so that they make no other run."""

    contrast: float = config_field(1.0, "Weight of InfoNCE; 0: none.", minimum=0, group=OBJECTIVE)
    temperature: float = config_field(
        0.5,
        "contrast: temperature; the lower, the more only the nearest negatives count.",
        minimum=1e-3,
        group=OBJECTIVE,
    )
    negatives: str = config_field(
        "cross",
        "contrast: negatives of a view: the other views of the rest of the batch, or both views of it (NT-Xent).",
        choices=("cross", "both"),
        group=OBJECTIVE,
    )
    align: float = config_field(0.0, "Weight of the alignment loss; 0: none.", minimum=0, group=OBJECTIVE)
    alpha: float = config_field(2.0, "align: exponent of the distance.", minimum=1e-3, group=OBJECTIVE)
    uniform: float = config_field(0.0, "Weight of the uniformity loss; 0: none.", minimum=0, group=OBJECTIVE)
    t: float = config_field(2.0, "uniform: sharpness of the potential exp(−t·‖x − y‖²).", minimum=1e-3, group=OBJECTIVE)

    def __post_init__(self) -> None:
        if not any(getattr(self, weight) for weight in TERMS):
            raise UsageError(
                "The objective is empty: contrast, align and uniform are all 0. Give one of them a weight."
            )
        reset_idle(self, [name for weight, names in TERMS.items() if not getattr(self, weight) for name in names])


def objective(config: ObjectiveConfig, x: Tensor, y: Tensor, gather: bool = False) -> Tensor:
    """Return the loss of two views (b, d) of a batch, whose rows are normalized to length one first.

        λ_c · InfoNCE(τ) + λ_a · align(α) + λ_u · uniform(t)

    InfoNCE is the mean of both directions, and uniformity the mean of both views, as in the authors' code. With
    `gather` the rows of all processes are one batch.
    """
    total = x.new_zeros((), dtype=x.dtype).float()
    if config.contrast:
        negatives: Any = config.negatives
        both = config.negatives == "both"
        total = total + config.contrast * info_nce(
            x, y, temperature=config.temperature, negatives=negatives, symmetric=not both, gather=gather
        )
    if config.align:
        total = total + config.align * align_loss(x, y, config.alpha, gather=gather)
    if config.uniform:
        total = total + config.uniform * uniform_loss(x, config.t, y=y, gather=gather)
    return total


def queue_objective(config: ObjectiveConfig, x: Tensor, y: Tensor, queue: Tensor, within: bool = True) -> Tensor:
    """Return the loss of MoCo: of views x (b, d) whose partners y (b, d) and queue (K, d) have no gradient.

    InfoNCE's negatives are the queue alone, as published (arXiv 1911.05722). Uniformity is that of x against the queue
    and, with `within`, among the rows of x, as in its authors' code for MoCo. The rows of all processes are one batch;
    the queue is the same in all of them.
    """
    total = x.new_zeros((), dtype=x.dtype).float()
    if config.contrast:
        total = total + config.contrast * info_nce(x, y, temperature=config.temperature, negatives=queue, gather=True)
    if config.align:
        total = total + config.align * align_loss(x, y, config.alpha, gather=True)
    if config.uniform:
        total = total + config.uniform * uniform_loss(x, config.t, queue=queue, within=within, gather=True)
    return total


def formula(config: Mapping[str, Any]) -> str:
    """Return the objective as the paper writes it; weights of 1 are left out.

    >>> formula({"contrast": 0, "align": 0.98, "alpha": 2.0, "uniform": 1, "t": 2.0})
    '0.98·A(α=2) + U(t=2)'
    """
    marks = {
        "contrast": lambda: f"C(τ={config['temperature']:g}{', both' if config['negatives'] == 'both' else ''})",
        "align": lambda: f"A(α={config['alpha']:g})",
        "uniform": lambda: f"U(t={config['t']:g})",
    }
    weights = {name: config[name] for name in TERMS if config[name]}
    return " + ".join((f"{weight:g}·" if weight != 1 else "") + marks[name]() for name, weight in weights.items())


def objective_slug(config: Mapping[str, Any]) -> str:
    """Return the objective for the name of a file.

    >>> objective_slug({"contrast": 1, "temperature": 0.5, "negatives": "cross", "align": 0, "uniform": 0.5, "t": 2.0})
    'c1-tau0.5+u0.5-t2'
    """
    marks = {
        "contrast": lambda: f"-tau{config['temperature']:g}{'-both' if config['negatives'] == 'both' else ''}",
        "align": lambda: f"-alpha{config['alpha']:g}",
        "uniform": lambda: f"-t{config['t']:g}",
    }
    return "+".join(f"{name[0]}{config[name]:g}{marks[name]()}" for name in TERMS if config[name])


def information_bound(loss: float, negatives: int) -> float:
    """Return log(M + 1) − loss: InfoNCE's lower bound on the mutual information of two views, with M negatives."""
    return math.log(negatives + 1) - loss
