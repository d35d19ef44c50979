"""Models of other libraries as stacks of blocks. Each library is imported only when a model needs it.

A backbone is a module of this folder with `stacks(model)`, which returns every stack of blocks that it knows in a model
or in a part of it. A new backbone needs that function and one line below.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
        Backbone("open_clip", "open_clip", "image and text towers of CLIP, CoCa and SigLIP"),
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
    """Return the stack of blocks of a model; ValueError if it has several. See `find_all`."""
    found = find_all(model, modules=modules, part=part, layout=layout)
    if len(found) > 1:
        raise ValueError(f"{type(model).__name__} has several stacks of blocks; select one. {list_parts(found)}")
    return found[0]


def find_all(
    model: nn.Module,
    *,
    modules: str | Sequence[str] | None = None,
    part: str | None = None,
    layout: Layout | None = None,
) -> tuple[Stack, ...]:
    """Return the stacks of blocks of a model: one, or one for each of its parts. ValueError if there is none.

    Args:
        model: any module; the stack may lie anywhere in it.
        modules: names or patterns ("blocks.*") of the modules that are the blocks, for models that are not known. If
            not given, the obvious series of blocks of such a model is taken, with a remark.
        part: dotted name of the part to take where a model has several stacks, such as "vision_model": the module that
            runs the blocks, or the list that holds them.
        layout: how the outputs of `modules` are laid out; if not given, it depends on their rank and modules.
    """
    if layout is not None and layout not in get_args(Layout):
        hint = did_you_mean(layout, get_args(Layout))
        raise ValueError(f"layout must be one of {', '.join(get_args(Layout))}, got {layout!r}.{hint}")
    if modules is not None:
        return (named.stack(model, [modules] if isinstance(modules, str) else list(modules), layout),)
    known = _all_stacks(model)
    more = list(named.obvious_stacks(model, layout, beside=known))
    if known and not known[0].remark:
        known[0] = replace(known[0], remark=named.left_out(model, known, more))
    found = known + more
    if part is not None:
        listed = [s for s, name in zip(found, part_names(found), strict=True) if name == part]
        selected = [s for s in found if s.path == part] or listed or [s for s in found if _lies_in(s, part)]
        if not selected:
            hint = did_you_mean(part, (stack.path for stack in found))
            raise ValueError(
                f"There is no stack of blocks in part {part!r}.{hint} {list_parts(found) or named.suggestion(model)}"
            )
        found = selected
    if not found:
        raise ValueError(f"{type(model).__name__} is not a known model. {named.suggestion(model)}")
    return tuple(found)


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


def part_names(found: Sequence[Stack]) -> list[str]:
    """Return the name of each stack as `part` takes it: the module that runs it, or the list that holds its blocks."""
    owners = [stack.path for stack in found]
    own = [owners.count(path) == 1 and bool(path or len(found) == 1) for path in owners]
    return [stack.path if unique else _block_list(stack) for stack, unique in zip(found, own, strict=True)]


def list_parts(found: Sequence[Stack]) -> str:
    """Return the parts of a model that can be selected, as a sentence; "" if there are none."""
    if not found:
        return ""
    named_parts = zip(part_names(found), found, strict=True)
    parts = (f"part={name!r} ({stack.architecture}, {len(stack.blocks)} blocks)" for name, stack in named_parts)
    return f"There are: {', '.join(parts)} (--part on the command line)."


def _block_list(stack: Stack) -> str:
    """Return the module that holds the blocks, for stacks that one module runs."""
    return stack.blocks[0].places[OUTPUT].path.rpartition(".")[0]
