"""Find out why a deep graph network does not learn, and mend it with one line.

The network is an ordinary one: sixteen of PyG's graph convolutions with ReLU
in between. The graph is random, so nothing is downloaded. It is trained twice
from the same initial weights, unchanged and with ContraNorm attached after
each hidden convolution. This takes about fifteen seconds on one core.

    python examples/deep_gcn.py
"""

import argparse
from itertools import pairwise
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

import uncollapse as uc
from uncollapse.lab.data.graph import datasets
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime, use_threads
from uncollapse.lab.engine.task import Task, TrainingOptions

NAMES = {"plain": "unchanged", "mended": "with ContraNorm"}


class Net(nn.Module):
    """Graph convolutions with ReLU and dropout in between."""

    def __init__(self, features: int, classes: int, layers: int, hidden: int = 32) -> None:
        super().__init__()
        widths = [features, *[hidden] * (layers - 1), classes]
        self.convs = nn.ModuleList(GCNConv(a, b) for a, b in pairwise(widths))

    def forward(self, data: Data) -> Tensor:
        """A graph -> logits (n, classes)."""
        x = data.x
        *hidden, last = self.convs
        for conv in hidden:
            x = F.dropout(conv(x, data.edge_index).relu(), 0.5, self.training)
        logits: Tensor = last(x, data.edge_index)
        return logits


def main() -> None:
    """Diagnose and train both networks, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16, help="number of convolutions, 2 or more")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--scale", type=float, default=1.0, help="of ContraNorm")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.layers < 2:
        parser.error(f"--layers must be 2 or more, because a hidden layer is measured; got {args.layers}.")
    graph = datasets.load_graph("csbm")
    parts = {"train": graph.train, "validation": graph.validation, "test": graph.test}
    data = Data(x=graph.x, edge_index=graph.edge_index, y=graph.y, **parts)
    with use_threads(1):  # more do not help with so small a graph
        show({name: trained(data, args, mended=name == "mended") for name in NAMES})


def trained(data: Data, args: argparse.Namespace, *, mended: bool) -> dict[str, Any]:
    """Build the network, attach the cure if `mended`, train, and measure."""
    torch.manual_seed(args.seed)
    model = Net(data.num_features, int(data.y.max()) + 1, args.layers)
    if mended:  # not after the last convolution, which outputs the logits
        print(uc.attach(model, "contra_norm", scale=args.scale, preset="gnn", layers=":-1"))
    before = uc.diagnose(model, [data], plan=uc.Plan(baseline=0))
    print(f"{NAMES['mended' if mended else 'plain']}, untrained: {before.verdict.sentence}")
    fit(task(model, data), TrainingOptions(args.epochs, seed=args.seed, evaluate_every=10), Runtime(device="cpu"))
    with torch.no_grad():
        test = accuracy(model(data), data, "test")
    return {"test": test, "before": before, "after": uc.diagnose(model, [data], plan=uc.Plan(baseline=0))}


def task(model: nn.Module, data: Data) -> Task:
    """Return what the training loop needs: an optimizer, batches, a loss and validation metrics."""

    def loss(model: nn.Module, batch: Data) -> Tensor:
        return F.cross_entropy(model(batch)[batch.train], batch.y[batch.train])

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"validation": accuracy(model(data), data, "validation")}

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    return Task(model, optimizer, lambda epoch: [data], loss, evaluate)


def accuracy(logits: Tensor, data: Data, part: str) -> float:
    """Return the accuracy on a split."""
    chosen = data[part]
    return float((logits.argmax(1) == data.y)[chosen].float().mean())


def show(runs: dict[str, dict[str, Any]]) -> None:
    """Print both runs next to each other."""
    table = Table("", *NAMES.values())
    table.add_row("test accuracy", *(f"{runs[name]['test']:.1%}" for name in NAMES))
    for title, measure in (("effective rank", "effective_rank"), ("mean cosine", "mean_cosine")):
        for when in ("before", "after"):
            cells = [runs[name][when].layers[-2][measure] for name in NAMES]  # layers[-1] are the logits
            table.add_row(f"{title}, last hidden layer, {when}", *(f"{value:.2f}" for value in cells))
    Console().print(table)


if __name__ == "__main__":
    main()
