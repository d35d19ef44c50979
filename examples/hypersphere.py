"""Train an encoder on two views of each image with your own loop, and measure
alignment and uniformity.

    python examples/hypersphere.py

The images are scikit-learn's digits, and the views add noise and shifts. A
small network is trained three times: for alignment alone, which collapses; for
uniformity alone, which separates images but does not bring two views of an
image together; and for both. The gap is the distance of uniformity from its
optimum, 1-NN the accuracy of the nearest neighbor.
"""

import argparse
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn

import uncollapse as uc
from uncollapse.errors import import_optional

WAYS = {"alignment": (1.0, 0.0), "uniformity": (0.0, 1.0), "both": (1.0, 1.0)}
DIM, STEPS, BATCH = 16, 400, 256


def digits() -> tuple[Tensor, Tensor]:
    """Return images (n, 8, 8) and labels (n,)."""
    bunch: Any = import_optional("sklearn.datasets", "data").load_digits()
    return torch.from_numpy(bunch.images).float() / 16, torch.from_numpy(bunch.target)


def view(images: Tensor) -> Tensor:
    """Shift each image by at most one pixel, and add some noise."""
    down, right = (torch.randint(-1, 2, (len(images),)) for _ in range(2))
    at = torch.arange(8)
    rows, columns = (at + down[:, None]).clamp(0, 7), (at + right[:, None]).clamp(0, 7)
    moved = images[torch.arange(len(images))[:, None, None], rows[:, :, None], columns[:, None, :]]
    return moved + 0.2 * torch.randn_like(moved)


def train(images: Tensor, align: float, uniform: float) -> nn.Module:
    """Train an encoder for align · alignment + uniform · uniformity."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    encoder.append(nn.Linear(256, DIM))
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
    for _ in range(STEPS):
        chosen = images[torch.randint(len(images), (BATCH,))]
        x, y = encoder(view(chosen)), encoder(view(chosen))
        loss = align * uc.align_loss(x, y) + uniform * uc.uniform_loss(x, y=y)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return encoder.eval()


@torch.no_grad()
def measured(encoder: nn.Module, images: Tensor, labels: Tensor) -> tuple[str, ...]:
    """Return both metrics with intervals, the distance from the optimum, and the accuracy of the nearest neighbor."""
    x, y = encoder(view(images)), encoder(view(images))
    align, spread = uc.alignment_interval(x, y), uc.uniformity_interval(x)
    gap = uc.uniformity_gap(spread.value, DIM)
    unit = nn.functional.normalize(x, dim=-1)
    nearest = (unit @ unit.T).fill_diagonal_(-2).argmax(1)
    shown = (f"{one.value:.2f} ({one.low:.2f} to {one.high:.2f})" for one in (align, spread))
    return *shown, f"{gap:.0f} %", f"{100 * (labels[nearest] == labels).float().mean():.0f} %"


def main() -> None:
    """Train in all three ways, and print a table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    images, labels = digits()
    metrics = [Column(name, no_wrap=True) for name in ("alignment", "uniformity")]
    table = Table("trained for", *metrics, "gap", "1-NN", box=box.SIMPLE)
    for name, (align, uniform) in WAYS.items():
        encoder = train(images[:1400], align, uniform)
        table.add_row(name, *measured(encoder, images[1400:], labels[1400:]))
    Console().print(table)


if __name__ == "__main__":
    main()
