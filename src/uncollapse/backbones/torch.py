"""`nn.TransformerEncoder`, `nn.TransformerDecoder`, `nn.Transformer` with both, and their layers in other models."""

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from uncollapse.backbones import introspection, random_weights
from uncollapse.backbones.sites import OUTPUT, Block, Context, ReadContext, Site, Stack, join_path, no_context

Layer = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
WHOLES = (nn.TransformerEncoder, nn.TransformerDecoder)
BRANCHES: dict[type, tuple[str, ...]] = {
    nn.TransformerEncoderLayer: ("attention", "mlp"),
    nn.TransformerDecoderLayer: ("attention", "cross", "mlp"),
}
_lock = threading.Lock()
_settings: list[bool] = []  # of the fast path, which belongs to the whole process, before each use of `step_by_step`
STEPS = ("forward", "_sa_block", "_mha_block", "_ff_block")


def stacks(model: nn.Module) -> tuple[Stack, ...]:
    """Return the encoders, decoders and loose series of their layers in a model."""
    modules = dict(model.named_modules(remove_duplicate=False))
    wholes = [path for path, module in modules.items() if isinstance(module, WHOLES)]
    once = {id(modules[path]): path for path in reversed(wholes)}  # a module with two names gets the first
    found = [_whole(path, modules) for path in wholes if once[id(modules[path])] == path]
    return (*found, *(_loose(paths, modules) for paths in _series(modules, wholes)))


def _series(modules: Mapping[str, nn.Module], wholes: list[str]) -> list[list[str]]:
    """Return the paths of layers outside encoders and decoders; paths that differ only in numbers are one series."""
    groups: dict[tuple[str, bool], list[str]] = {}
    for path, module in modules.items():
        within = any(path.startswith(f"{whole}." if whole else "") for whole in wholes)
        if isinstance(module, Layer) and not within:
            key = re.sub(r"\d+", "*", path), isinstance(module, nn.TransformerDecoderLayer)
            groups.setdefault(key, []).append(path)
    least = 2 if wholes else 1  # a single layer next to an encoder is the template that it was copied from
    series = [paths for paths in groups.values() if len(paths) >= least]
    contents = [{id(modules[path]) for path in paths} for paths in series]
    return [paths for paths, own in zip(series, contents, strict=True) if not any(own < other for other in contents)]


def _whole(path: str, modules: Mapping[str, nn.Module]) -> Stack:
    module: Any = modules[path]
    paths = [join_path(path, f"layers.{number}") for number in range(len(module.layers))]
    final = Site(join_path(path, "norm")) if module.norm is not None else None
    return _stack(path, paths, modules, final=final, context=partial(_context, introspection.argument_names(module)))


def _loose(paths: list[str], modules: Mapping[str, nn.Module]) -> Stack:
    """Describe loose layers. Only they know the masks: the names of the masks in the model around them are unknown."""
    return _stack(_owner(paths, modules), paths, modules)


def _owner(paths: list[str], modules: Mapping[str, nn.Module]) -> str:
    """Return the nearest module around all paths that has a forward pass."""
    split = [path.split(".")[:-1] for path in paths]
    shared = split[0]
    while any(parts[: len(shared)] != shared for parts in split):
        shared = shared[:-1]
    while shared and isinstance(modules[".".join(shared)], nn.ModuleList | nn.ModuleDict):
        shared = shared[:-1]
    return ".".join(shared)


def _stack(
    path: str,
    paths: list[str],
    modules: Mapping[str, nn.Module],
    *,
    final: Site | None = None,
    context: ReadContext = no_context,
) -> Stack:
    layers: list[Any] = [modules[p] for p in paths]
    first = {id(module): p for p, module in zip(reversed(paths), reversed(layers), strict=True)}
    shared = [first[id(layer)] for layer in layers]  # a layer in several positions runs once in each
    blocks = tuple(_block(n, p, shared[:n].count(p), layers[n]) for n, p in enumerate(shared))
    maps = tuple(b.attention.path for b in blocks if b.attention is not None)
    attention = getattr(layers[0], "self_attn", None)
    heads = getattr(attention, "num_heads", None)
    return Stack(
        path=path,
        family="torch",
        architecture=type(modules[path]).__name__,
        blocks=blocks,
        embed=Site(shared[0], "input"),
        final=final,
        layout="tokens" if getattr(attention, "batch_first", False) else "sequence_first",
        context=context,
        knows_causality=all(map(_is_as_written, layers)),
        width=getattr(attention, "embed_dim", None),
        overrides=((path, "use_nested_tensor", False),) if hasattr(modules[path], "use_nested_tensor") else (),
        under_hooks=step_by_step,
        expose_attention=partial(_with_weights, maps) if maps else None,
        reinitialize=random_weights.reinitialize,
        facts={"heads": heads} if heads else {},
    )


def _block(number: int, path: str, call: int, layer: Any) -> Block:
    places = {OUTPUT: Site(path), "attention.input": Site(path, "input")}
    if _is_as_written(layer):
        places |= {
            name: Site(join_path(path, site.path), site.side, carried=site.carried)
            for name, site in _parts(layer).items()
        }
    has_map = isinstance(getattr(layer, "self_attn", None), nn.MultiheadAttention)
    attention = Site(join_path(path, "self_attn"), "output", "attention") if has_map else None
    context = partial(_context, introspection.argument_names(layer))
    return Block(f"block {number}", path, places, context, call=call, attention=attention)


def _is_as_written(layer: nn.Module) -> bool:
    """Return whether a layer runs as torch wrote it; a subclass that changes a step may have other places."""
    base = next((base for base in BRANCHES if isinstance(layer, base)), None)
    return base is not None and all(
        getattr(getattr(layer, step), "__func__", None) is getattr(base, step) for step in STEPS if hasattr(base, step)
    )


def _parts(layer: Any) -> dict[str, Site]:
    """Return place -> site within the layer: what each branch adds, the stream after it, and its norm.

    The heads before the projection ("attention.context") do not pass through a module of their own.
    """
    branches = next(names for base, names in BRANCHES.items() if isinstance(layer, base))
    parts: dict[str, Site] = {}
    for number, branch in enumerate(branches, start=1):
        norm = f"norm{number}"
        if not layer.norm_first:
            parts[f"{branch}.output"] = Site(f"dropout{number}")
            parts[f"{branch}.residual"] = Site(norm, "input")
            parts[f"{branch}.norm"] = Site(norm)
            continue
        parts[f"{branch}.norm.input"] = Site(norm, "input")
        parts[f"{branch}.norm"] = Site(norm)
        parts[f"{branch}.output"] = Site(f"dropout{number}")
        last = number == len(branches)
        parts[f"{branch}.residual"] = Site("") if last else Site(f"norm{number + 1}", "input", carried=True)
    return parts


def _context(names: introspection.Names, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Context:
    given = introspection.bind_arguments(names, args, kwargs)
    side = "tgt" if "tgt" in names else "src"
    mask = given.get(f"{side}_mask", given.get("mask"))
    hint = given.get("tgt_is_causal", given.get("is_causal"))
    causal = bool(hint) or introspection.is_causal(mask)
    return Context(
        mask=introspection.mask_from_padding(given.get(f"{side}_key_padding_mask")),
        causal=causal,
        refuse=introspection.PARTLY if not causal and introspection.hides_some_later(mask) else "",
    )


@contextmanager
def step_by_step(model: nn.Module) -> Iterator[None]:
    """Switch the fast path off, which runs a layer in one operator and packs padded batches into nested tensors."""
    with _lock:
        _settings.append(torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _lock:
            before = _settings.pop()  # the last one that is left is the user's own
            torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _with_weights(paths: tuple[str, ...], model: nn.Module) -> Iterator[None]:
    """Let self-attention return the map of every head; the layers ignore it."""
    modules = [model.get_submodule(path) for path in dict.fromkeys(paths)]
    hooks = [module.register_forward_pre_hook(_ask_for_weights, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _ask_for_weights(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given = introspection.bind_arguments(introspection.argument_names(module), args, kwargs)
    return (), {**given, "need_weights": True, "average_attn_weights": False}
