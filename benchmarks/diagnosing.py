"""What a diagnosis costs beside the plain forward pass over the same batches. Weights do not matter, shapes do."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import uncollapse as uc
from benchmarks.measure import speed_ratio
from benchmarks.targets import Result
from uncollapse.backbones import torchvision_ops

BATCHES = 8  # of 32 samples: what is done once, at the end, is spread over so many


def overhead() -> Iterator[Result]:
    torch.manual_seed(0)
    torchvision_ops.declare()
    text, tokens = minilm(), {"input_ids": torch.randint(1000, 30000, (32, 128)), "attention_mask": padding()}
    yield within(f"diagnose MiniLM-L6, {BATCHES} batches of 32×128", 1.15, text, tokens)
    yield within("  with attention maps", 1.5, text, tokens, attention=True)
    yield within("  with a random model on the first batch", 1.3, text, tokens, plan=uc.Plan())
    yield within(f"diagnose DeiT-S, {BATCHES} batches of 32×3×224×224", 1.15, deit(), torch.randn(32, 3, 224, 224))
    short = {"input_ids": torch.randint(1000, 30000, (16, 50))}
    yield within(f"diagnose an encoder of 12×768, {BATCHES} batches of 16×50", 1.15, encoder(), short)


def within(name: str, most: float | None, model: nn.Module, batch: Any, **options: Any) -> Result:
    """Wall time of a diagnosis over that of the forward passes."""
    batches, run = [batch] * BATCHES, forward(model, batch)
    settings = {"plan": uc.Plan(baseline=0)} | options
    ratio, plain, ours = speed_ratio(run, lambda: uc.diagnose(model, batches, **settings), rounds=3)
    detail = f"{plain:.2f} s plain, {ours:.2f} s diagnosed"
    return Result(name, most, 1 / ratio, "× the time", False, detail)


def forward(model: nn.Module, batch: Any) -> Callable[[], None]:
    @torch.no_grad()
    def run() -> None:
        for _ in range(BATCHES):
            model(**batch) if isinstance(batch, dict) else model(batch)

    return run


def minilm() -> nn.Module:
    return encoder(hidden_size=384, num_hidden_layers=6, intermediate_size=1536)


def encoder(**shape: int) -> nn.Module:
    """A BERT of 12 layers and 768 features, as MPNet has them, unless the shape says otherwise."""
    from transformers import BertConfig, BertModel

    bert: Any = BertModel  # it has no types
    options: Any = shape
    model: nn.Module = bert(BertConfig(**options)).eval()
    return model


def padding() -> torch.Tensor:
    """Lengths from 64 to 128, as sentences of a batch have them."""
    return (torch.arange(128) < torch.linspace(64, 128, 32).long()[:, None]).long()


def deit() -> nn.Module:
    import timm

    model: nn.Module = timm.create_model("deit_small_patch16_224", pretrained=False).eval()
    return model
