"""The plot on the start page: a deep graph network, the advice of its diagnosis, and the network with it.

Nothing is downloaded; it takes about a minute on one core. The first line of advice is run exactly as printed.

    python -m experiments.before_after
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import uncollapse as uc
from experiments import keeping
from uncollapse.lab.data.graph.datasets import load_graph
from uncollapse.lab.engine.runtime import use_threads

MEASURES = ("mean_cosine", "effective_rank")


@dataclass(frozen=True)
class Config:
    """A graph convolutional network on the random graph that comes with the package."""

    depth: int = 12
    width: int = 32
    epochs: int = 40
    lr: float = 0.01
    seeds: int = 5
    seed: int = 0  # the first one


def run(config: Config, seed: int) -> dict[str, Any]:
    """Train the network, ask its diagnosis for advice, and train it once more with that, from the same weights."""
    plain, mended = network(config, seed), network(config, seed)
    before = train(plain, config)
    advice = diagnose(plain).verdict.advice[0].code
    exec(advice, {"uc": uc, "model": mended})
    return {"advice": advice, "before": before, "after": train(mended, config)}


def network(config: Config, seed: int) -> nn.Module:
    """Return a plain GCN of PyTorch Geometric with random weights."""
    from torch_geometric.nn import GCN

    graph = load_graph("csbm")
    torch.manual_seed(seed)
    model: nn.Module = GCN(graph.x.shape[1], config.width, config.depth, graph.classes)
    return model


def diagnose(model: nn.Module) -> uc.Diagnosis:
    """Measure every layer on the whole graph."""
    graph = load_graph("csbm")
    return uc.diagnose(model, [{"x": graph.x, "edge_index": graph.edge_index}], plan=uc.Plan(baseline=0))


def train(model: nn.Module, config: Config) -> dict[str, Any]:
    """Train a model and return its test accuracy and what its hidden layers are like then."""
    graph = load_graph("csbm")
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    model.train()
    for _ in range(config.epochs):
        logits = model(graph.x, graph.edge_index)
        loss = nn.functional.cross_entropy(logits[graph.train], graph.y[graph.train])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    right = model.eval()(graph.x, graph.edge_index).argmax(1) == graph.y
    d = diagnose(model)
    hidden = [layer for layer in d.layers if layer.name.startswith("block")][:-1]
    curves = {measure: [round(layer[measure], 4) for layer in hidden] for measure in MEASURES}
    accuracy = float(right[graph.test].float().mean())
    return {"test": round(accuracy, 4), "verdict": d.verdict.kind, "onset": d.verdict.onset, **curves}


@use_threads()
def main() -> None:
    """Run all seeds and write the result."""
    parser = keeping.parser(__doc__, "before_after")
    parser.set_defaults(out=Path("results/before_after.json"))
    out = parser.parse_args().out
    config, started = Config(), time.perf_counter()
    runs = [run(config, seed) for seed in range(config.seed, config.seed + config.seeds)]
    keeping.keep(out, "before_after", config, time.perf_counter() - started, arguments="", runs=runs)
    print(f"{out} written.")


if __name__ == "__main__":
    main()
