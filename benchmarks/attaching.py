"""What an attached ContraNorm adds to a training step, beside the published dense form in the same places."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import uncollapse as uc
from benchmarks import plain
from benchmarks.diagnosing import padding
from benchmarks.targets import Result, slower
from uncollapse.backbones import torchvision_ops
from uncollapse.registry import CURES, Cure

SCALE = 0.1
DENSE = "dense_contra_norm"


def cost() -> Iterator[Result]:
    torch.manual_seed(0)
    torchvision_ops.declare()
    register_dense_form()
    yield from _model("MiniLM-L6, 32×128", *minilm())
    yield from _model("DeiT-S, 8×3×224×224", *deit())


def _model(name: str, model: nn.Module, loss: Callable[[], Tensor]) -> Iterator[Result]:
    step, rounds = training(model, loss), 5

    def with_cure(cure: str, at: str | None = None) -> Callable[[], object]:
        """Attaching takes milliseconds, a step seconds."""

        def run() -> None:
            with uc.attach(model, cure, scale=SCALE, at=at, tokens="all"):
                step()

        return run

    yield slower(f"ContraNorm in every block, {name}", 1.25, step, with_cure("contra_norm"), rounds)
    dense = with_cure(DENSE)
    yield slower("  the published dense form there, which sees padding", None, step, dense, rounds)
    yield slower("  ContraNorm at every norm", None, step, with_cure("contra_norm", "norms"), rounds)


def training(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> None:
        optimiser.zero_grad()
        torch.autograd.backward(loss())
        optimiser.step()

    return step


def minilm() -> tuple[nn.Module, Callable[[], Tensor]]:
    from transformers import BertConfig, BertForSequenceClassification

    bert: Any = BertForSequenceClassification  # it has no types
    shape: Any = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    model = bert(BertConfig(**shape)).train()
    batch = {"input_ids": torch.randint(1000, 30000, (32, 128)), "attention_mask": padding()}
    labels = torch.randint(0, 2, (32,))
    return model, lambda: model(**batch, labels=labels).loss


def deit() -> tuple[nn.Module, Callable[[], Tensor]]:
    import timm

    model: nn.Module = timm.create_model("deit_small_patch16_224", pretrained=False).train()
    images, labels = torch.randn(8, 3, 224, 224), torch.randint(0, 1000, (8,))
    return model, lambda: nn.functional.cross_entropy(model(images), labels)


class DenseContraNorm(nn.Module):
    """The formula of the published code, with its n×n matrix, and blind to padding as it is."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return plain.contra_norm(x, self.scale)


def register_dense_form() -> None:
    """Let `uc.attach` find the dense form by name; only for this run, not for everybody who imports this module."""
    if DENSE not in CURES:
        CURES.add(DENSE, Cure(DENSE, plain.contra_norm, DenseContraNorm, "tokens", CURES["contra_norm"].paper))
