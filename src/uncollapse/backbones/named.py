"""Models of no known library: blocks by the names of their modules, or else the obvious series of alike modules.

Stages next to each other (`layer1` … `layer4`, or a list of stages) are the layers of a hierarchical model, each with
its own width. A list of blocks is a series; two lists, such as those of an encoder and a decoder, are two.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from uncollapse.backbones import axes, introspection, random_weights
from uncollapse.backbones.sites import OUTPUT, Block, Context, Layout, Side, Site, Stack, join_path
from uncollapse.backbones.torch import step_by_step
from uncollapse.errors import did_you_mean

PADDING = ("src_key_padding_mask", "key_padding_mask", "padding_mask")  # True = padding
MASKS = ("attention_mask", "mask")  # True = real, or hide some tokens from others
HOLDERS = (nn.ModuleList, nn.ModuleDict)
ORDERS = ("attn_mask", "src_mask", *MASKS)
LISTS = (nn.ModuleList, nn.Sequential)
SMALL = 0.1  # of the parameters of the largest series: what is smaller is a part of something else
BESIDE = 0.25  # of the parameters of all known blocks: what is smaller next to them is not a part, see `left_out`


def stack(model: nn.Module, patterns: list[str], layout: Layout | None = None, *, remark: str = "") -> Stack:
    """Return the modules whose names match as a stack, in the order in which the model lists them.

    Args:
        model: any module.
        patterns: dotted names, or patterns of them: "blocks.*" is every child of `blocks`; * ? and [] stop at a dot.
        layout: of the modules' outputs; if not given, nodes where the model takes `edge_index`, else by their rank, and
            for images by the modules in them, see `Axes`.
        remark: what a user must know about the choice of the modules, if it was not the user's.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    _check(model, patterns, modules)
    selected = [name for name in modules if name and any(_matches(name, pattern) for pattern in patterns)]
    lists = [name for name in selected if isinstance(modules[name], HOLDERS) and never_runs(modules[name])]
    if lists:
        raise ValueError(f"{lists[0]} is a list of modules, which never runs itself. Name its items: '{lists[0]}.*'.")
    first = {id(modules[name]): name for name in reversed(selected)}
    site = partial(_site, modules)
    paths = [first[id(modules[name])] for name in selected]  # a layer with several names runs once for each
    blocks = tuple(
        Block(
            name,
            path,
            {OUTPUT: site(path, "output"), "input": site(path, "input")},
            partial(_context, introspection.argument_names(modules[path])),
            call=paths[:number].count(path),
        )
        for number, (name, path) in enumerate(zip(selected, paths, strict=True))
    )
    names = introspection.argument_names(model)
    return Stack(
        path="",
        family="named",
        architecture=type(model).__name__,
        blocks=blocks,
        embed=site(paths[0], "input"),
        layout=layout or ("nodes" if "edge_index" in names else "auto"),
        context=partial(_model_context, names),
        arguments=names if "edge_index" in names else (),
        needs_owner=any(name in names for name in (*PADDING, *MASKS, "edge_index", "batch", "use_cache")),
        knows_causality="edge_index" in names or layout == "nodes",
        under_hooks=step_by_step,  # the modules may be torch's own layers
        reinitialize=random_weights.reinitialize,
        remark=remark,
    )


def never_runs(module: nn.Module) -> bool:
    """Return whether a module has no forward pass, like a list; a subclass of one may have one, as in DenseNet."""
    return type(module).forward is nn.Module.forward


def _site(modules: Mapping[str, nn.Module], path: str, side: Side) -> Site:
    return Site(path, side, axes=axes.read_axes(modules, path, side))


def _matches(name: str, pattern: str) -> bool:
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def _check(model: nn.Module, patterns: list[str], names: Iterable[str]) -> None:
    """Raise if a name or pattern matches no module."""
    if not patterns:
        raise ValueError(
            f"modules must name at least one module of {type(model).__name__}, got none. {suggestion(model)}"
        )
    for pattern in patterns:
        if not any(name and _matches(name, pattern) for name in names):
            hint = did_you_mean(pattern, (name for name in names if name), most=3)
            raise ValueError(f"No module of {type(model).__name__} is named {pattern!r}.{hint} {suggestion(model)}")


def _model_context(names: introspection.Names, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Context:
    context, given = _context(names, args, kwargs), introspection.bind_arguments(names, args, kwargs)
    return replace(context, refuse=introspection.CACHED) if introspection.continues(names, given) else context


def _context(names: introspection.Names, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Context:
    """Read masks and graphs by their usual argument names, as far as their shapes fit the tokens."""
    given = {
        name: value for name, value in introspection.bind_arguments(names, args, kwargs).items() if value is not None
    }
    orders = [given[name] for name in ORDERS if isinstance(given.get(name), Tensor)]
    padding = (given.pop(name, None) for name in PADDING)
    masks = [given.pop(name, None) for name in MASKS]
    masks += [introspection.mask_from_padding(mask) for mask in padding if isinstance(mask, Tensor)]
    causal = bool(given.get("is_causal", False)) or any(map(_is_causal, orders))
    tokens = next((value for value in given.values() if isinstance(value, Tensor)), None)
    edge_index, batch = given.get("edge_index"), given.get("batch")
    return Context(
        mask=next((mask.bool() for mask in masks if _is_mask(mask, tokens) and not _is_causal(mask)), None),
        causal=causal,
        edge_index=edge_index if isinstance(edge_index, Tensor) and edge_index.shape[:1] == (2,) else None,
        batch=batch if isinstance(batch, Tensor) and batch.dim() == 1 else None,
    )


def _is_causal(mask: Tensor) -> bool:
    """Return whether a mask hides later tokens, whichever of its values means hidden: a triangle is not padding."""
    return introspection.is_causal(mask) or introspection.hides_later(mask)


def _is_mask(mask: Any, tokens: Tensor | None) -> bool:
    """Return whether it holds one bool, or 0 or 1, per token of (b, n, ...) or (n, b, ...)."""
    if not isinstance(mask, Tensor) or mask.dim() != 2 or tokens is None:
        return False
    fits = sorted(mask.shape) == sorted(tokens.shape[:2])
    return fits and bool(((mask == 0) | (mask == 1)).all())


def suggestion(model: nn.Module) -> str:
    """Return which blocks there seem to be in a model, and how to name them."""
    series = {name: list(module.children()) for name, module in model.named_modules() if _is_series(module)}
    if not series:
        parts = ", ".join(f"{name} ({type(child).__name__})" for name, child in model.named_children())
        if not parts:
            return "It has no parts that could be its blocks. Measure what it returns with uc.diagnose_activations."
        return f"Name its blocks with modules=[…] or --modules. It consists of: {parts}."
    listed = "; ".join(f"{len(c)} × {type(c[0]).__name__} in {name or 'the model'}" for name, c in series.items())
    pattern = repr(join_path(next(iter(series)), "*"))
    return (
        f"Series of blocks: {listed}. Name them with modules=[{pattern}], or --modules {pattern} on the command line."
    )


def _is_series(module: nn.Module) -> bool:
    """Return whether it lists two or more modules of one class."""
    kinds = [type(child) for child in module.children()]
    return isinstance(module, nn.ModuleList | nn.Sequential) and len(kinds) > 1 and len(set(kinds)) == 1


def obvious_stacks(model: nn.Module, layout: Layout | None = None, beside: Sequence[Stack] = ()) -> tuple[Stack, ...]:
    """Return the obvious series of blocks as stacks; their `remark` says what was taken.

    beside: stacks of the model that are known. Next to them, only a series that is a part of its own is taken, such as
    the second of two towers.
    """
    modules = dict(model.named_modules())
    found = find_series(modules, beside)
    return tuple(stack(model, names, layout, remark=_remark(names, modules)) for names in found)


def find_series(
    modules: Mapping[str, nn.Module], beside: Sequence[Stack] = (), share: float = BESIDE
) -> list[list[str]]:
    """Return the names of the blocks of each obvious series, in the order of the model; see `obvious_stacks`.

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
    has_parts = any(True for _ in module.children()) and not never_runs(module)
    if "Embed" in type(module).__name__:  # what divides an image into patches, between stages
        return False
    return (has_parts or isinstance(module, nn.RNNBase)) and any(True for _ in module.parameters())


def _is_inside(name: str, blocks: list[str]) -> bool:
    return any(name.startswith(f"{block}.") for block in blocks)


def _remark(names: list[str], modules: Mapping[str, nn.Module]) -> str:
    kinds = Counter(type(modules[name]).__name__ for name in names)
    where = _common(names) or "the model"
    what = " and ".join(f"{count} × {kind}" for kind, count in kinds.most_common(3))
    remark = f"The blocks were not known and taken from the modules: {what} in {where}."
    return f"{remark} Name others with modules=[…], or --modules."


def _common(names: list[str]) -> str:
    """Return the list that holds all names, or the pattern of several lists."""
    holders = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    return holders[0] if len(holders) == 1 and holders[0] else re.sub(r"\d+", "*", names[0]) if names else ""
