"""Watch a Transformer that collapses during its training on handwritten
digits, and stop the training.

    python examples/monitor_training.py --folder runs/digits

With a learning rate of 0.01 and no warm-up, the tokens of this encoder become
nearly identical within 30 steps. The loss stays at that of guessing and does
not say why; the monitor does. With --lr 5e-4, training stays healthy and no
rule fires. It needs scikit-learn for the images, and takes less than a minute.
"""

import argparse
import warnings
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import uncollapse as uc
from uncollapse.monitoring.monitor import CollapseWarning, Monitor, Record, Rule

WIDTH = 32


class DigitEncoder(nn.Module):
    """A Transformer over the sixteen 2×2 patches of an 8×8 image."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.position = nn.Parameter(torch.randn(16, WIDTH) / 2)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(block, depth)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Images (b, 8, 8) to logits (b, 10)."""
        patches = images.unfold(1, 2, 2).unfold(2, 2, 2).flatten(3).flatten(1, 2)  # (b, 16, 4)
        tokens = self.encoder(self.embed(patches) + self.position)
        logits: Tensor = self.head(tokens.mean(1))
        return logits


def digits() -> tuple[Tensor, Tensor]:
    """Return standardized images (n, 8, 8) and labels (n,)."""
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float()
    return (images - images.mean()) / images.std(), torch.from_numpy(bunch.target)


def show(record: Record, loss: float) -> None:
    """Print one line: the effective rank after each block, and the mean cosine after the last."""
    ranks = [value for name, value in record.curves["effective_rank"].items() if name.startswith("block")]
    shown = " ".join(f"{rank:4.1f}" for rank in ranks)
    last = list(record.curves["mean_cosine"].values())[-1]
    print(f"step {record.step:4d}   loss {loss:5.3f}   ranks {shown}   last cosine {last:.2f}")


def train(monitor: Monitor, images: Tensor, labels: Tensor, depth: int, lr: float, steps: int) -> None:
    """Train in a plain loop. The monitor is called before each update, so step 0 is the initial model."""
    model = DigitEncoder(depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    for step in range(steps + 1):
        record = monitor.step(model, step)
        chosen = torch.randint(len(images), (32,))
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        if record is not None:
            show(record, loss.item())
        if monitor.should_stop:
            print("Stopped by the rule.")
            break
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()


def main() -> None:
    """Train, and print what the monitor cost and what changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("collapse"), help="for monitor.jsonl and the diagnoses")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--steps", type=int, default=120)
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # small tensors: a second thread would not help
    warnings.simplefilter("always", CollapseWarning)
    images, labels = digits()
    held, (images, labels) = images[:64], (images[64:], labels[64:])  # the held batch is not trained on
    rules = [
        Rule("effective_rank", falls_by=0.5),
        Rule("mean_cosine", above=0.99, patience=2, then="stop"),
        Rule("finite", then="stop"),
    ]
    monitor = Monitor(
        [held],
        every=15,
        rules=rules,
        folder=given.folder,
        overwrite=True,
        labels=uc.Labels(model="digits", data="digits"),
    )
    train(monitor, images, labels, given.depth, given.lr, given.steps)
    print(f"Time of the monitor: {monitor.cost}.")
    if (given.folder / "collapse.json").exists():
        print(uc.Diagnosis.load(given.folder / "collapse.json").verdict.sentence)
        print(f"To see what changed: uncollapse compare {given.folder}/first.json {given.folder}/collapse.json")


if __name__ == "__main__":
    main()
