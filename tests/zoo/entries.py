"""What the zoo consists of: architectures by name, and how one is built with its inputs."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

IMAGE, LENGTH = 32, 13  # pixels of a side, tokens of a text; no multiple of a number of samples
LIBRARIES = {
    "transformers": "transformers_models",
    "timm": "vision_models",
    "torchvision": "vision_models",
    "torch_geometric": "graph_models",
    "sentence_transformers": "sentence_models",
    "open_clip": "clip_models",
    "torch": "torch_modules",
}


@dataclass(frozen=True)
class Entry:
    """An architecture: its name with the library in front, and what the library calls it."""

    name: str
    kind: str

    @property
    def library(self) -> str:
        return self.name.partition("/")[0]

    def build(self) -> "Built":
        torch.manual_seed(0)
        built: Built = _module(self.library).build(self.library, self.kind)
        with torch.no_grad():
            for weight in built.model.parameters():  # heads that start at zero would hide everything before them
                if weight.dim() > 1 and not weight.any():
                    weight.normal_(std=0.05)
        built.model.train()  # some models compute attention biases once and save them until their mode changes
        built.model.eval()
        return built


@dataclass
class Built:
    """A model and its batches, of different sizes, in evaluation mode.

    ids: the name of the input that holds token ids, if it has one. call: how to run it, by name if it is None.
    """

    model: nn.Module
    batches: list[Any]
    ids: str = ""
    call: Callable[[nn.Module, Any], Any] | None = None
    notes: list[str] = field(default_factory=list)

    def run(self, batch: Any) -> Any:
        if self.call is not None:
            return self.call(self.model, batch)
        return self.model(**batch) if isinstance(batch, dict) else self.model(batch)


def all_entries(library: str | None = None) -> Iterator[Entry]:
    """Yield all architectures, or those of one library."""
    for name in LIBRARIES:
        if library in (None, name):
            yield from _module(name).entries(name)


def _module(library: str) -> Any:
    return importlib.import_module(f".{LIBRARIES[library]}", __package__)


def padded_mask(count: int, length: int) -> Tensor:
    """Return a mask (count, length) of 1 for real tokens; every text after the first ends in padding."""
    lengths = torch.tensor([max(4, length - 2 * number) for number in range(count)])
    return (torch.arange(length) < lengths[:, None]).long()
