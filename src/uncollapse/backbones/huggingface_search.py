"""Find the blocks in models of transformers, and the modules around them. Nothing of transformers is imported."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from uncollapse.backbones import arguments


@dataclass(frozen=True)
class Run:
    """Blocks at work: the path of what holds them, and path and call of each in the order in which they run."""

    path: str
    blocks: tuple[tuple[str, int], ...]


def runs(model: nn.Module) -> list[Run]:
    """All lists of blocks that lie in a model of transformers."""
    found: dict[int, Run] = {}  # by the list itself: a user's module may hold one under a second name
    for path, module in model.named_modules(remove_duplicate=False):
        known = id(module) in found or any(within(path, run.path) for run in found.values())
        if known or not any(is_a(m, "PreTrainedModel") for _, m in above(model, path)):
            continue
        if is_a(module, "AlbertTransformer"):
            found[id(module)] = Run(path, _albert_passes(module, path))
        elif isinstance(module, nn.ModuleList) and _are_blocks(module) and not _past_hooks(model, path):
            found[id(module)] = Run(path, tuple((f"{path}.{i}", 0) for i in range(len(module))))
    return list(found.values())


def _past_hooks(model: nn.Module, path: str) -> bool:
    """Whether blocks are run by their `forward` itself, past all hooks, as in SqueezeBERT: nothing can be seen then."""
    holder = next(module for _, module in above(model, path))
    return "forward" in arguments.names_in_forward(holder)


def _are_blocks(modules: nn.ModuleList) -> bool:
    """Whether the modules are alike and some attend, and none holds blocks of its own, as stages do, or a model."""
    if len({type(m) for m in modules}) > 1 and not all(is_a(m, "GradientCheckpointingLayer") for m in modules):
        return False
    inner = [m for block in modules for m in block.modules()]
    if any(is_a(m, "PreTrainedModel") or (isinstance(m, nn.ModuleList) and _are_blocks(m)) for m in inner):
        return False
    theirs = not any(type(m).__module__.startswith("torch.") for m in modules)  # those have a backbone of their own
    return theirs and any("Attention" in type(m).__name__ for m in inner)


def _albert_passes(transformer: Any, path: str) -> tuple[tuple[str, int], ...]:
    """ALBERT runs few layers many times: groups one after the other, each several times, all its layers each time."""
    layers, groups = transformer.config.num_hidden_layers, transformer.config.num_hidden_groups
    calls: Counter[str] = Counter()
    passes = []
    for i in range(layers):
        group = int(i / (layers / groups))  # as the model computes it
        for j in range(len(transformer.albert_layer_groups[group].albert_layers)):
            block = f"{path}.albert_layer_groups.{group}.albert_layers.{j}"
            passes.append((block, calls[block]))
            calls[block] += 1
    return tuple(passes)


def entrance(model: nn.Module, run: Run, others: list[Run]) -> str:
    """Path of the module that gets what the user gives and runs these blocks alone, or else of what holds them."""
    for path, module in above(model, run.path):
        if takes_input(module):
            if not any(other is not run and within(other.path, path) for other in others):
                return path
            break
    return next(path for path, module in above(model, run.path) if not isinstance(module, nn.ModuleList))


def takes_input(module: nn.Module) -> bool:
    """Whether a module is a model that gets token ids, pixels or sounds, and with them the user's mask."""
    return is_a(module, "PreTrainedModel") and str(module.main_input_name) in arguments.names(module)


def above(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules around the one at `path`, innermost first, with their paths."""
    while path:
        path = path.rpartition(".")[0]
        yield path, model.get_submodule(path)


def pretrained_above(model: nn.Module, path: str) -> list[tuple[str, Any]]:
    """Of the modules around the one at `path` those that are models of transformers, innermost first."""
    return [(name, module) for name, module in above(model, path) if is_a(module, "PreTrainedModel")]


def within(path: str, outer: str) -> bool:
    """Whether `path` lies inside the module at `outer`."""
    return not outer or path.startswith(f"{outer}.")


def is_a(module: nn.Module, name: str) -> bool:
    """Whether one of the module's classes is that of transformers with this name."""
    return any(c.__name__ == name and c.__module__.startswith("transformers.") for c in type(module).__mro__)
