"""Take the obvious series of blocks of a model that is not known: the outermost lists of alike modules.

Stages next to each other (`layer1` … `layer4`, or a list of stages) are the layers of a hierarchical model, each with
its own width. A list of blocks is a series; two lists, such as those of an encoder and a decoder, are two.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn
from torch.nn.parameter import is_lazy

from uncollapse.backbones import named
from uncollapse.backbones.sites import Layout, Stack, join_path

LISTS = (nn.ModuleList, nn.Sequential)
SMALL = 0.1  # of the parameters of the largest series: what is smaller is a part of something else
BESIDE = (
    0.25  # of the parameters of all known blocks: what is smaller next to them is no part of its own, see `left_out`
)


def stacks(model: nn.Module, layout: Layout | None = None, beside: Sequence[Stack] = ()) -> tuple[Stack, ...]:
    """Return the obvious series of blocks as stacks; their `remark` says what was taken.

    beside: stacks of the model that are known. Next to them, only a series that is a part of its own is taken, such as
    the second of two towers.
    """
    modules = dict(model.named_modules())
    found = find_series(modules, beside)
    return tuple(named.stack(model, names, layout, remark=_remark(names, modules)) for names in found)


def find_series(
    modules: Mapping[str, nn.Module], beside: Sequence[Stack] = (), share: float = BESIDE
) -> list[list[str]]:
    """Return the names of the blocks of each obvious series, in the order of the model; see `stacks`.

    share: of the parameters of the known blocks, which a series next to them must have.
    """
    found = [names for path, module in modules.items() for names in _series_in(path, module)]
    found = [names for names in found if not any(_is_inside(names[0], other) for other in found if other != names)]
    groups: dict[str, list[list[str]]] = {}  # the lists of several stages, as `stages.0.blocks` and `stages.1.blocks`
    for names in found:
        groups.setdefault(re.sub(r"\d+", "*", names[0]), []).append(names)
    joined = [[name for names in group for name in names] for group in groups.values()]
    joined = [names for names in joined if not any(_is_near(names[0], stack) for stack in beside)]
    sizes = [_size(names, modules) for names in joined]
    known = [block.path for stack in beside for block in stack.blocks]
    least = share * _size(known, modules) if beside else SMALL * max(sizes, default=0)
    return [names for names, size in zip(joined, sizes, strict=True) if size >= least]


def left_out(model: nn.Module, known: Sequence[Stack], taken: Sequence[Stack]) -> str:
    """Return a remark on series in other children of a model than its known stacks; "" if there are none.

    They are small for a part of their own, or cannot be one, such as the flows after the text encoder of VITS, but hold
    many of its weights. taken: series that are parts of the model, and need no remark.
    """
    if any(stack.layout == "nodes" for stack in known):
        return ""
    modules = dict(model.named_modules())
    found = find_series(modules, [replace(stack, path=stack.blocks[0].path) for stack in known], SMALL)
    found = [names for names in found if names[0] not in {block.path for stack in taken for block in stack.blocks}]
    listed = ", ".join(f"{len(names)} × {type(modules[names[0]]).__name__} in {_common(names)}" for names in found)
    return f"Not among the blocks: {listed}. Name them with modules=[…] to use them." if found else ""


def _is_near(name: str, stack: Stack) -> bool:
    """Return whether a module belongs to the tower of a stack: within its owner, or in the same child of the model."""
    towers = {path.partition(".")[0] for path in (stack.path, stack.blocks[0].path)}
    return "" in towers or name.partition(".")[0] in towers


def _size(names: Sequence[str], modules: Mapping[str, nn.Module]) -> int:
    return sum(_numel(modules[name]) for name in names)


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if not is_lazy(p))


def _series_in(path: str, module: nn.Module) -> Iterator[list[str]]:
    """Yield the blocks that a module lists, or its children that are numbered stages, such as `layer1` to `layer4`."""
    children = {name: child for name, child in module.named_children() if _is_block(child)}
    if isinstance(module, LISTS):
        if _repeats(module, list(children.values())):
            yield [join_path(path, name) for name in children]
        return
    groups: dict[tuple[str, type], list[str]] = {}
    for name, child in children.items():
        if re.fullmatch(r"\D*\d+", name):  # not the branches of a block, such as `branch3x3_1`
            groups.setdefault((re.sub(r"\d+", "*", name), type(child)), []).append(name)
    yield from ([join_path(path, name) for name in names] for names in groups.values() if len(names) > 1)


def _repeats(holder: nn.Module, blocks: list[nn.Module]) -> bool:
    """Return whether classes that occur more than once hold at least half of the parameters."""
    kinds = Counter(map(type, blocks))
    return 2 * sum(_numel(b) for b in blocks if kinds[type(b)] > 1) >= max(1, _numel(holder))


def _is_block(module: nn.Module) -> bool:
    has_parts = any(True for _ in module.children()) and not named.never_runs(module)
    if "Embed" in type(module).__name__:  # what divides an image into patches, between stages
        return False
    return (has_parts or isinstance(module, nn.RNNBase)) and any(True for _ in module.parameters())


def _is_inside(name: str, blocks: list[str]) -> bool:
    return any(name.startswith(f"{block}.") for block in blocks)


def _remark(names: list[str], modules: Mapping[str, nn.Module]) -> str:
    kinds = Counter(type(modules[name]).__name__ for name in names)
    where = _common(names) or "the model"
    what = " and ".join(f"{count} × {kind}" for kind, count in kinds.most_common(3))
    return f"The blocks were not known and taken from the modules: {what} in {where}. Name others with modules=[…]."


def _common(names: list[str]) -> str:
    """Return the list that holds all names, or the pattern of several lists."""
    holders = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    return holders[0] if len(holders) == 1 and holders[0] else re.sub(r"\d+", "*", names[0]) if names else ""
