"""Train an encoder on two views of each picture with a loop of your own, and watch alignment and uniformity.

    python examples/hypersphere.py

scikit-learn's digits, a small network, noise and shifts as views. It is trained three times: for alignment alone, which
collapses; for uniformity alone, which learns to tell pictures apart but not that two views are one; and for both.
"""

from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import uncollapse as uc
from uncollapse.errors import import_optional

WAYS = {"alignment": (1.0, 0.0), "uniformity": (0.0, 1.0), "both": (1.0, 1.0)}
DIM, STEPS, BATCH = 16, 400, 256


def digits() -> tuple[Tensor, Tensor]:
    """Pictures (n, 8, 8) and labels (n,)."""
    bunch: Any = import_optional("sklearn.datasets", "data").load_digits()
    return torch.from_numpy(bunch.images).float() / 16, torch.from_numpy(bunch.target)


def view(images: Tensor) -> Tensor:
    """Each picture moved by a pixel or not at all, with some noise."""
    down, right = (torch.randint(-1, 2, (len(images),)) for _ in range(2))
    at = torch.arange(8)
    rows, columns = (at + down[:, None]).clamp(0, 7), (at + right[:, None]).clamp(0, 7)
    moved = images[torch.arange(len(images))[:, None, None], rows[:, :, None], columns[:, None, :]]
    return moved + 0.2 * torch.randn_like(moved)


def train(images: Tensor, align: float, uniform: float) -> nn.Module:
    """An encoder that was trained for align · alignment + uniform · uniformity."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    encoder.append(nn.Linear(256, DIM))
    optimiser = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
    for _ in range(STEPS):
        chosen = images[torch.randint(len(images), (BATCH,))]
        x, y = encoder(view(chosen)), encoder(view(chosen))
        loss = align * uc.align_loss(x, y) + uniform * uc.uniform_loss(x, y=y)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
    return encoder.eval()


@torch.no_grad()
def measured(encoder: nn.Module, images: Tensor, labels: Tensor) -> tuple[str, ...]:
    """Both numbers with their intervals, the distance to the optimum, and how often the nearest has the same class."""
    x, y = encoder(view(images)), encoder(view(images))
    align, spread = uc.alignment_interval(x, y), uc.uniformity_interval(x)
    gap = uc.uniformity_gap(spread.value, DIM)
    unit = nn.functional.normalize(x, dim=-1)
    nearest = (unit @ unit.T).fill_diagonal_(-2).argmax(1)
    told = (f"{one.value:.2f} ({one.low:.2f} … {one.high:.2f})" for one in (align, spread))
    return *told, f"{gap:.0f} %", f"{100 * (labels[nearest] == labels).float().mean():.0f} %"


def main() -> None:
    """Train in all three ways, and print a table."""
    images, labels = digits()
    table = Table("trained for", "alignment", "uniformity", "from the optimum", "nearest has its class")
    for name, (align, uniform) in WAYS.items():
        encoder = train(images[:1400], align, uniform)
        table.add_row(name, *measured(encoder, images[1400:], labels[1400:]))
    Console().print(table)


if __name__ == "__main__":
    main()
