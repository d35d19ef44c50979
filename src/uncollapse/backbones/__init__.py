"""Models of other libraries as stacks of blocks. Each library is imported only when a model needs it.

A backbone is a module of this folder with `stacks(model)`, which returns every stack of blocks that it knows in a model
or in a part of it. A new backbone needs that function and one line below.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from torch import nn

from uncollapse.backbones import named
from uncollapse.backbones.sites import OUTPUT, Layout, Stack
from uncollapse.errors import did_you_mean


@dataclass(frozen=True)
class Backbone:
    """A family of models: the library whose classes identify it, and the models that are known."""

    name: str
    library: str
    models: str

    def stacks(self, model: nn.Module) -> tuple[Stack, ...]:
        """Return all stacks of this family in the model."""
        module = importlib.import_module(f"uncollapse.backbones.{self.name}")
        found: tuple[Stack, ...] = module.stacks(model)
        return found


BACKBONES = {
    b.name: b
    for b in (
        Backbone(
            "huggingface",
            "transformers",
            "BERT, RoBERTa, DistilBERT, ELECTRA, ALBERT, ViT, DeiT, DINOv2, CLIP, GPT-2, Llama and others like them",
        ),
        Backbone("timm", "timm", "vision transformers: vit, deit (also distilled), beit, eva"),
        Backbone("pyg", "torch_geometric", "BasicGNN models and any stack of MessagePassing layers"),
        Backbone(
            "torch", "torch", "nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer, and series of their layers"
        ),
    )
}


def find(
    model: nn.Module,
    *,
    modules: str | Sequence[str] | None = None,
    part: str | None = None,
    layout: Layout | None = None,
) -> Stack:
    """Return the stack of blocks of a model.

    Args:
        model: any module; the stack may lie anywhere in it.
        modules: names or patterns ("blocks.*") of the modules that are the blocks, for models that are not known.
        part: dotted name of the part to take where a model has several stacks, such as "vision_model": the module that
            runs the blocks, or the list that holds them.
        layout: how the outputs of `modules` are laid out; if not given, it depends on their rank and modules.
    """
    if layout is not None and layout not in get_args(Layout):
        hint = did_you_mean(layout, get_args(Layout))
        raise ValueError(f"layout must be one of {', '.join(get_args(Layout))}, got {layout!r}.{hint}")
    if modules is not None:
        return named.stack(model, [modules] if isinstance(modules, str) else list(modules), layout)
    found = _all_stacks(model)
    if part is not None:
        selected = [s for s in found if s.path == part] or [s for s in found if _lies_in(s, part)]
        if not selected:
            hint = did_you_mean(part, (stack.path for stack in found))
            raise ValueError(
                f"There is no stack of blocks in part {part!r}.{hint} {_list_parts(found) or named.suggestion(model)}"
            )
        found = selected
    if not found:
        raise ValueError(f"{type(model).__name__} is not a known model. {named.suggestion(model)}")
    if len(found) > 1:
        raise ValueError(f"{type(model).__name__} has several stacks of blocks; select one. {_list_parts(found)}")
    return found[0]


def _all_stacks(model: nn.Module) -> list[Stack]:
    """Return the stacks of all backbones; blocks that two backbones know are taken from the first."""
    found: list[Stack] = []
    taken: set[str] = set()
    for backbone in BACKBONES.values():
        for stack in backbone.stacks(model) if _has(model, backbone) else ():
            paths = {block.places[OUTPUT].path for block in stack.blocks}
            if not paths & taken:
                found.append(stack)
                taken |= paths
    return found


def _lies_in(stack: Stack, part: str) -> bool:
    return all(block.places[OUTPUT].path.startswith(f"{part}." if part else "") for block in stack.blocks)


def _has(model: nn.Module, backbone: Backbone) -> bool:
    """Return whether a class of the backbone's library is among the model's modules."""
    roots = {c.__module__.partition(".")[0] for m in model.modules() for c in type(m).__mro__}
    return backbone.library in roots


def _list_parts(found: list[Stack]) -> str:
    if not found:
        return ""
    owners = [stack.path for stack in found]
    names = [stack.path if owners.count(stack.path) == 1 else _block_list(stack) for stack in found]
    parts = (f"part={n!r} ({s.architecture}, {len(s.blocks)} blocks)" for n, s in zip(names, found, strict=True))
    return f"There are: {', '.join(parts)} (--part on the command line)."


def _block_list(stack: Stack) -> str:
    """Return the module that holds the blocks, for stacks that one module runs."""
    return stack.blocks[0].places[OUTPUT].path.rpartition(".")[0]
