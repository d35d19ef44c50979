"""Transformers classifiers of sentences in other sizes, with the cures of ContraNorm's text experiments."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from uncollapse import backbones
from uncollapse.attachment.attach import attach
from uncollapse.attachment.inner_tokens import tokens
from uncollapse.attachment.plan import select_cure_places
from uncollapse.errors import UsageError
from uncollapse.io.hf_models import Origin, load_classifier
from uncollapse.losses import contra_uniform_loss
from uncollapse.pairwise.numerics import unit_rows
from uncollapse.registry import CURES

FORMS: dict[str, Literal["published", "features"]] = {"pooled": "published", "features": "features"}


class L2Norm(nn.Module):
    """Scale rows to the norm √d without centering; weight and bias are those of the LayerNorm that it replaces."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (..., d)."""
        y: Tensor = unit_rows(x) * x.shape[-1] ** 0.5 * self.weight + self.bias
        return y.to(x.dtype)


def use_l2_norms(model: nn.Module, at: str | int) -> None:
    """Replace each LayerNorm that follows a place by an `L2Norm`."""
    stack = backbones.find(model)
    places = select_cure_places(stack, CURES["contra_norm"], at)
    sites = [block.places[place] for block in stack.blocks for place in places if place in block.places]
    found = {site.path: model.get_submodule(site.path) for site in sites if site.side == "input"}
    if not found or not all(isinstance(module, nn.LayerNorm) for module in found.values()):
        raise UsageError(
            f"norm l2 needs a place before a LayerNorm, such as attention.residual, got {', '.join(places)}."
        )
    for path, module in found.items():
        assert isinstance(module, nn.LayerNorm)
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, L2Norm(module))


def build_random(origin: Origin, labels: int, *, depth: int, width: int, heads: int) -> nn.Module:
    """Return the architecture of a model in another size with random weights; its MLPs are four times as wide."""
    sizes = {"num_hidden_layers": depth, "num_attention_heads": heads}
    sizes |= {"hidden_size": width, "intermediate_size": 4 * width}
    return _change_sizes(origin, labels, sizes)


def _change_sizes(origin: Origin, labels: int, sizes: dict[str, Any]) -> nn.Module:
    try:
        model = load_classifier(origin, labels, random_weights=True, **sizes)
        blocks = len(backbones.find(model).blocks)
    except UsageError:
        raise
    except (ValueError, IndexError) as error:
        raise UsageError(f"{origin.place} cannot be built in another size: {error}. Take a BERT.") from error
    if blocks != sizes["num_hidden_layers"]:
        raise UsageError(
            f"{origin.place} has {blocks} blocks, expected {sizes['num_hidden_layers']}. Take another model."
        )
    return model


def build_deepened(origin: Origin, labels: int, depth: int, *, repeated: bool) -> nn.Module:
    """Return the pretrained model with another number of blocks.

    Args:
        origin: The pretrained model.
        labels: Outputs of the head.
        depth: Number of blocks.
        repeated: True: block k is the pretrained block k modulo their number. False: the blocks after the pretrained
            ones are random, as transformers initializes blocks that a checkpoint does not have.
    """
    source = load_classifier(origin, labels)
    deep = _change_sizes(origin, labels, {"num_hidden_layers": depth})
    paths = [[block.path for block in backbones.find(model).blocks] for model in (source, deep)]
    state = source.state_dict()
    for number, path in enumerate(paths[1] if repeated else paths[1][: len(paths[0])]):
        pretrained = f"{paths[0][number % len(paths[0])]}."
        own = {key.removeprefix(pretrained): value for key, value in state.items() if key.startswith(pretrained)}
        deep.get_submodule(path).load_state_dict(own)
    blocks = tuple(f"{path}." for path in (*paths[0], *paths[1]))
    deep.load_state_dict({key: value for key, value in state.items() if not key.startswith(blocks)}, strict=False)
    return deep


def put_cure(model: nn.Module, name: str, *, at: str, norm: str, layers: str = "all", **options: Any) -> None:
    """Attach a cure to blocks of the model; "none" and "uniform_loss" leave it unchanged."""
    if name in ("none", "uniform_loss"):
        return
    try:
        if norm == "l2":
            use_l2_norms(model, parse_place(at))
        attach(model, name, at=parse_place(at), layers=None if layers == "all" else layers, tokens="all", **options)
    except UsageError:
        raise
    except ValueError as error:  # a place or an option that does not fit this model
        raise UsageError(str(error)) from error


def parse_place(at: str) -> str | int:
    """Return a place as `attach` takes it: a name, or a number of the paper."""
    return int(at) if at.isdecimal() else at


class UniformLoss:
    """The uniformity loss of ContraNorm's paper (Eq. 3) on activations of a model, while it is open.

    Several processes share one batch.

    Args:
        model: The classifier.
        on: "tokens": the real tokens of each sequence in the last block, the mean over tokens and sequences.
            "pooled": the input of the classifier, one row per sequence, the sum of Eq. 3 as printed. "features": the
            same rows, but the sum over the features of each, as in the released code's commented-out call.
        temperature: Temperature of the loss.
    """

    def __init__(self, model: nn.Module, on: str, temperature: float) -> None:
        self.model, self.on, self.temperature = model, on, temperature
        self.pooled: Tensor | None = None

    @contextmanager
    def open(self) -> Iterator["UniformLoss"]:
        """Read the activations while the model runs."""
        head: Any = getattr(self.model, "classifier", None)
        pooled = self.on != "tokens"
        if pooled and not isinstance(head, nn.Module):
            raise UsageError(
                f"uniform_on {self.on} needs a model with a `classifier`, got {type(self.model).__name__}."
            )
        with nullcontext() if pooled else tokens(self.model, "last") as self.held:
            handle = head.register_forward_pre_hook(self._store_pooled) if pooled else None
            try:
                yield self
            finally:
                self.pooled = None
                if handle is not None:
                    handle.remove()

    def _store_pooled(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        x: Tensor = arguments[0]
        self.pooled = x if x.dim() == 2 else x[:, 0]  # RoBERTa's head takes all tokens and reads the first

    def __call__(self) -> Tensor:
        """Return the loss of the last forward pass."""
        if self.on != "tokens":
            assert self.pooled is not None
            x, form = self.pooled.float(), FORMS[self.on]
            return contra_uniform_loss(x, temperature=self.temperature, form=form, gather=True)
        assert self.held is not None
        x, mask = self.held["last"], self.held.mask("last")
        return contra_uniform_loss(x.float(), temperature=self.temperature, mask=mask, gather=True)


@torch.no_grad()
def logits_on_cpu(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the logits of a batch on the CPU in float32."""
    device = next(model.parameters()).device
    logits: Tensor = model(**{name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}).logits
    return logits.float().cpu()
