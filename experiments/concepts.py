"""The small examples of the page on concepts: points on a sphere, pairs on a circle, a deep random Transformer.

Nothing is trained and no data is needed; it takes some seconds on one core.

    python -m experiments.concepts
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

import uncollapse as uc
from experiments import records
from uncollapse.lab.engine.runtime import use_threads
from uncollapse.lab.experiments.sphere import potentials
from uncollapse.lab.runs.results import round_metrics

LEANING = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.9, 0.44]])  # a plane through the middle of the sphere, seen aslant
TO_THE_RIGHT = torch.tensor([[1.0, 0.0]])


@dataclass(frozen=True)
class Config:
    """How many points, how deep the Transformer, how strong the cure."""

    tokens: int = 120
    tight: float = 0.07
    flat: float = 0.03
    pairs: int = 14
    close: float = 0.12
    crowd: float = 0.18
    moved: int = 24
    moved_scale: float = 0.5
    temperature: float = 0.5
    depth: int = 48
    width: int = 64
    sequence: int = 32
    scales: tuple[float, ...] = (0.1, 0.5)
    seed: int = 0


def spheres(config: Config) -> dict[str, Any]:
    """Tokens on the sphere in space in three states, with their spectrum and what is measured of them."""
    drawn = Generator().manual_seed(config.seed)
    noise = torch.randn(config.tokens, 3, generator=drawn)
    on_the_plane = torch.randn(config.tokens, 2, generator=drawn) @ F.normalize(LEANING, dim=-1)
    towards = F.normalize(torch.tensor([0.5, -0.7, 0.5]), dim=0)
    states = {
        "healthy": noise,
        "complete collapse": towards + config.tight * noise,
        "dimensional collapse": F.normalize(on_the_plane, dim=-1) + config.flat * noise,
    }
    return {name: _state(F.normalize(points, dim=-1)) for name, points in states.items()}


def _state(points: Tensor) -> dict[str, Any]:
    values = uc.singular_values(points)
    figures = {
        "mean_cosine": float(uc.mean_cosine(points)),
        "effective_rank": float(uc.effective_rank(points)),
        "uniformity": float(uc.uniformity(points)),
        "optimum": uc.uniformity_optimum(points.shape[-1]),
    }
    return {"points": _rounded(points), "spectrum": _rounded(values / values.sum()), "figures": round_metrics(figures)}


def pairs(config: Config) -> dict[str, Any]:
    """Pairs of views on the circle in four states: close or not, spread or not."""
    drawn = Generator().manual_seed(config.seed)
    even = potentials.polygon(config.pairs).float()
    crowd = potentials.clustered_points(config.pairs, TO_THE_RIGHT.double(), drawn, config.crowd).float()
    noise = torch.randn(config.pairs, 2, generator=drawn)
    order = torch.randperm(config.pairs, generator=drawn)
    turned = _turned(even, math.pi / config.pairs)  # so that no view lies upon another point
    states = {
        "pairs close, all spread": (even, even + config.close * noise),
        "pairs close, all in one place": (crowd, crowd + config.close * noise),
        "pairs apart, all spread": (even, turned[order]),
        "pairs apart, half of the circle empty": (_half(even), _half(turned)[order]),
    }
    return {name: _views(F.normalize(x, dim=-1), F.normalize(y, dim=-1)) for name, (x, y) in states.items()}


def _half(points: Tensor) -> Tensor:
    return torch.stack([points[:, 0], points[:, 1].abs()], -1)


def _turned(points: Tensor, angle: float) -> Tensor:
    cos, sin = math.cos(angle), math.sin(angle)
    return points @ torch.tensor([[cos, sin], [-sin, cos]])


def _views(x: Tensor, y: Tensor) -> dict[str, Any]:
    both = torch.cat([x, y])
    figures = {"alignment": float(uc.alignment(x, y)), "uniformity": float(uc.uniformity(both))}
    figures["optimum"] = uc.uniformity_optimum(2)
    return {"x": _rounded(x), "y": _rounded(y), "figures": round_metrics(figures)}


def step(config: Config) -> dict[str, Any]:
    """Points on the circle that crowd on one side, and where one step of ContraNorm takes them."""
    drawn = Generator().manual_seed(config.seed)
    before = F.normalize(torch.randn(config.moved, 2, generator=drawn) + 1.2 * TO_THE_RIGHT, dim=-1)
    raw = uc.contra_norm(before, config.moved_scale, temperature=config.temperature)
    after = F.normalize(raw, dim=-1)
    states = {"before": before, "after": after}
    return {
        "moved": _rounded(raw),
        **{name: {key: value for key, value in _state(x).items() if key != "spectrum"} for name, x in states.items()},
    }


def depth(config: Config) -> dict[str, Any]:
    """Cosine and rank after each block of a Transformer with random weights, without and with ContraNorm."""
    drawn = Generator().manual_seed(config.seed)
    x = torch.randn(4, config.sequence, config.width, generator=drawn)
    found = {}
    for name, norm_first, scale in (
        ("norm after each branch", False, None),
        ("norm before each branch", True, None),
        *((f"norm after each branch, ContraNorm {scale:g}", False, scale) for scale in config.scales),
    ):
        model = transformer(config, norm_first)
        if scale is not None:
            uc.attach(model, "contra_norm", scale=scale)
        d = uc.diagnose(model, [x], plan=uc.Plan(baseline=0))
        found[name] = {
            "verdict": d.verdict.kind,
            "onset": d.verdict.onset,
            **{of: [round(layer[of], 4) for layer in d.layers] for of in ("mean_cosine", "effective_rank")},
        }
    return found


def transformer(config: Config, norm_first: bool) -> nn.TransformerEncoder:
    """One of torch's, with weights of its own in each block: by itself torch gives all blocks the same ones."""
    sizes = {"d_model": config.width, "nhead": 4, "dim_feedforward": 2 * config.width}
    layer = nn.TransformerEncoderLayer(**sizes, dropout=0.0, batch_first=True, norm_first=norm_first)  # type: ignore[arg-type]
    model = nn.TransformerEncoder(layer, config.depth, enable_nested_tensor=False)
    drawn = Generator().manual_seed(config.seed)
    for weight in model.parameters():
        if weight.dim() > 1:
            nn.init.xavier_uniform_(weight, generator=drawn)
    for name, bias in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(bias)
    return model.eval()


def _rounded(x: Tensor) -> list[Any]:
    return [_rounded(row) for row in x] if x.dim() > 1 else [round(float(value), 4) for value in x]


@use_threads()
def main() -> None:
    """Make all examples, and keep them."""
    parser = records.parser(__doc__, "concepts")
    parser.set_defaults(out=Path("results/concepts.json"))
    out = parser.parse_args().out
    config, started = Config(), time.perf_counter()
    found = {"spheres": spheres(config), "pairs": pairs(config), "step": step(config), "depth": depth(config)}
    records.save_record(out, "concepts", config, time.perf_counter() - started, arguments="", **found)
    print(f"{out} written.")


if __name__ == "__main__":
    main()
