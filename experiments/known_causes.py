"""Is the named cause the true one? Models whose cause of collapse is known, because it was built in or taken out.

python -m experiments.known_causes --data DIR [--only gcn attention registers bert]
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import uncollapse as uc
from experiments import early_alarm
from experiments.records import plain_errors, save_record
from uncollapse.backbones import torchvision_ops

OUT = Path("results/causes.json")


@dataclass(frozen=True)
class Config:
    """What is measured: the seed of all weights and data."""

    seed: int = 0


@dataclass(frozen=True)
class Case:
    """A model with the cause that it must have first, or None if it must have none; and its test accuracy."""

    name: str
    expected: str | None
    diagnosis: uc.Diagnosis
    score: float | None = None


def main() -> None:
    """Check the cases, and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", choices=CASES, nargs="*", default=list(CASES))
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torchvision_ops.declare()
    began, found = time.perf_counter(), stored(args.out)
    with plain_errors():
        for kind in args.only:
            for case in CASES[kind](args.data):
                found[case.name] = facts(case)
                print(f"{case.name}: {found[case.name]['causes']}, expected {case.expected}", flush=True)
                seconds, cases = time.perf_counter() - began, list(found.values())
                save_record(args.out, "known_causes", Config(), seconds, arguments="--data DIR", cases=cases)


def stored(out: Path) -> dict[str, Any]:
    """The cases that were checked before, which new ones replace."""
    cases = json.loads(out.read_text(encoding="utf-8"))["cases"] if out.is_file() else []
    return {case["name"]: case for case in cases}


def facts(case: Case) -> dict[str, Any]:
    """What is kept of a case."""
    causes = [cause.name for cause in case.diagnosis.verdict.causes]
    right = (causes[0] if causes else None) == case.expected
    return {
        "name": case.name,
        "expected": case.expected,
        "causes": causes,
        "right": right,
        "collapse": case.diagnosis.verdict.kind,
        "evidence": [text for cause in case.diagnosis.verdict.causes for text in cause.evidence],
        "advice": [tip.cure for tip in case.diagnosis.verdict.advice],
        "test": case.score,
    }


def train(run: early_alarm.Run, data: Path) -> tuple[early_alarm.Problem, float]:
    """Train a model of the early alarm's kind."""
    problem = early_alarm.KINDS[run.kind](run, data)
    for _ in early_alarm.steps(problem, run):
        pass
    problem.model.eval()
    with torch.no_grad():
        return problem, round(problem.accuracy(), 4)


def graphs(data: Path) -> Iterator[Case]:
    """GCNs of 16 layers on Cora, trained, without and with residual connections."""
    graph = early_alarm.cora(data)
    batch = {"x": graph.x, "edge_index": graph.edge_index}

    def loss(output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output[graph.train], graph.y[graph.train])

    for variant, expected in (("none", "no_residual"), ("residual", None)):
        problem, score = train(early_alarm.Run("gcn", 16, 5e-3, variant), data)
        plan = uc.Plan(embed=False, baseline=0)
        found = uc.diagnose(problem.model, [batch], causes=True, loss=loss, plan=plan)
        yield Case(f"GCN, 16 layers, {variant}", expected, found, score)


def attention_only(data: Path) -> Iterator[Case]:
    """Random vision transformers: attention alone, attention with residuals, and whole blocks."""
    kinds = (("attention only", 12, "no_residual"), ("attention and residual", 48, "mixing"), ("whole", 12, None))
    for kind, depth, expected in kinds:
        found = uc.diagnose(transformer(kind, depth), [images()], causes=True)
        yield Case(f"ViT, {depth} blocks, {kind}", expected, found)


def registers(data: Path) -> Iterator[Case]:
    """A vision transformer with registers whose first blocks write tokens of massive length, and one without."""
    for scale, expected in ((300.0, "norm_growth"), (1.0, None)):
        model: Any = transformer("whole", 12, reg_tokens=4)
        with torch.no_grad():
            model.blocks[1].mlp.fc2.weight.mul_(scale)
        found = uc.diagnose(model, [images()], causes=True)
        yield Case(f"ViT with registers, MLP of block 1 × {scale:g}", expected, found)


def bert(data: Path) -> Iterator[Case]:
    """BERTs of 48 blocks with post-norm, with a learning rate that kills them and one that does not."""
    for lr, expected in ((3e-3, "vanishing_gradients"), (2e-4, None)):
        problem, score = train(early_alarm.Run("bert", 48, lr, warmup=0.1), data)
        found = uc.diagnose(problem.model, problem.probe, causes=True)
        yield Case(f"BERT, 48 blocks, learning rate {lr:g}", expected, found, score)


def images() -> Tensor:
    """Random images, each with a mean of its own."""
    return torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def transformer(kind: str, depth: int, **options: Any) -> nn.Module:
    """A vision transformer with random weights; "attention only" has neither residuals nor MLPs."""
    from timm.models.vision_transformer import Block, VisionTransformer

    class AttentionBlock(Block):
        def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
            mixed: Tensor = self.drop_path1(self.attn(self.norm1(x)))
            return x + mixed if "residual" in kind else mixed

    block = Block if kind == "whole" else AttentionBlock
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"img_size": 32, "patch_size": 4, "embed_dim": 64, "num_heads": 4, "num_classes": 10}
        model: nn.Module = VisionTransformer(depth=depth, weight_init="jax", block_fn=block, **sizes, **options)
    return model.eval()


CASES: dict[str, Callable[[Path], Iterator[Case]]] = {
    "gcn": graphs,
    "attention": attention_only,
    "registers": registers,
    "bert": bert,
}

if __name__ == "__main__":
    main()
