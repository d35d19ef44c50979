"""Propositions 1 and 2 of ContraNorm (arXiv 2303.06562) on random matrices: the first holds, the second needs more.

Proposition 1: with Ht = ((1+s)I − sĀ)Hb, the variance of the tokens does not fall below (1 + s·σ_min) times what it
was, where σ_min is the least eigenvalue of P + Pᵀ with P = (I − 11ᵀ/n)(I − Ā).

Proposition 2: with Ht = (1+s)Hb − s(HbHbᵀ)Hb, which takes each singular value σ to (1+s)σ − sσ³, the effective rank
rises if 1 + (1 − σ²_max)s > 0. With q = sσ²_max/(1+s) that is q < 1. It is enough that the map is monotone up to σ_max,
1 + (1 − 3σ²_max)s ≥ 0, or q ≤ 1/3: larger singular values then grow by smaller factors and keep their order.

    python -m experiments.propositions
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

import uncollapse as uc
from experiments import records
from uncollapse.lab.engine.runtime import use_threads

SLACK = 1e-9  # relative: what rounding may do


@dataclass(frozen=True)
class Config:
    """How many matrices are drawn, and the counterexample to Proposition 2."""

    draws: int = 2000
    shown: int = 600
    largest_scale: float = 2.0
    counterexample: tuple[float, float] = (1.4, 1.0)
    counterexample_scale: float = 1.04
    seed: int = 0


def variance(config: Config) -> dict[str, Any]:
    """Proposition 1: scale, bound, and what the variance was multiplied by, for random tokens and temperatures."""
    drawn = Generator().manual_seed(config.seed)
    points: list[tuple[float, ...]] = []
    for _ in range(config.draws):
        n, d = (int(torch.randint(low, high, (), generator=drawn)) for low, high in ((2, 12), (1, 8)))
        h = torch.randn(n, d, generator=drawn, dtype=torch.float64)
        s = config.largest_scale * float(torch.rand((), generator=drawn))
        temperature = 10 ** (2 * float(torch.rand((), generator=drawn)) - 1)
        after = uc.contra_norm(h, s, identity=True, temperature=temperature)
        ratio = float(uc.token_variance(after) / uc.token_variance(h))
        points.append((s, 1 + s * least_eigenvalue(h, temperature), ratio))
    violated = sum(ratio < bound - SLACK for _, bound, ratio in points)
    least = min(bound for _, bound, _ in points)
    return {"draws": len(points), "violated": violated, "least_bound": least, "points": _shown(config, points)}


def least_eigenvalue(h: Tensor, temperature: float) -> float:
    """Return σ_min for the softmax of the cosines, as ContraNorm has it."""
    unit, eye = F.normalize(h, dim=-1), torch.eye(len(h), dtype=h.dtype)
    p = (eye - 1 / len(h)) @ (eye - (unit @ unit.T / temperature).softmax(-1))
    return float(torch.linalg.eigvalsh(p + p.T).min())


def rank(config: Config) -> dict[str, Any]:
    """Proposition 2: q and the change of the effective rank, for random singular values; counted by both conditions."""
    drawn = Generator().manual_seed(config.seed)
    points: list[tuple[float, ...]] = []
    for _ in range(config.draws):
        values = 1.5 * torch.rand(int(torch.randint(2, 7, (), generator=drawn)), generator=drawn, dtype=torch.float64)
        s = config.largest_scale * float(torch.rand((), generator=drawn))
        before, after = (float(uc.effective_rank(x.diag())) for x in (values, stepped(values, s)))
        points.append((quotient(values, s), after - before))
    found: dict[str, Any] = {"draws": len(points), "points": _shown(config, points)}
    for name, limit in (("paper", 1.0), ("monotone", 1 / 3)):
        held = [change for q, change in points if q < limit]
        found[name] = {"limit": limit, "cases": len(held), "violated": sum(change < -SLACK for change in held)}
    return found


def counterexample(config: Config) -> dict[str, Any]:
    """Two singular values that satisfy the paper's condition, and whose effective rank falls."""
    values, s = torch.tensor(config.counterexample, dtype=torch.float64), config.counterexample_scale
    after = stepped(values, s)
    ranks = {name: float(uc.effective_rank(x.diag())) for name, x in (("before", values), ("after", after))}
    return {"scale": s, "q": quotient(values, s), "values": values.tolist(), "mapped": after.tolist(), "rank": ranks}


def stepped(values: Tensor, scale: float) -> Tensor:
    """Return the singular values after the step, with their sign."""
    return (1 + scale) * values - scale * values**3


def quotient(values: Tensor, scale: float) -> float:
    """Return q = sσ²_max/(1+s): below 1 the paper's condition holds, up to 1/3 the step is monotone."""
    return scale * float(values.max()) ** 2 / (1 + scale)


def _shown(config: Config, points: list[tuple[float, ...]]) -> list[list[float]]:
    return [[round(value, 4) for value in point] for point in points[: config.shown]]


@use_threads()
def main() -> None:
    """Draw all matrices, and write what was found."""
    parser = records.parser(__doc__, "propositions")
    parser.set_defaults(out=Path("results/propositions.json"))
    out = parser.parse_args().out
    config, started = Config(), time.perf_counter()
    found = {"variance": variance(config), "rank": rank(config), "counterexample": counterexample(config)}
    records.save_record(out, "propositions", config, time.perf_counter() - started, arguments="", **found)
    print(f"{out} written.")


if __name__ == "__main__":
    main()
