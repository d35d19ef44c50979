"""From what `attach` was asked for to the modules that will go into the model, checked before anything changes."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from uncollapse.backbones import random_weights
from uncollapse.backbones.introspection import width
from uncollapse.backbones.select import At, final_places, select_places
from uncollapse.backbones.sites import Block, Site, Stack
from uncollapse.errors import did_you_mean
from uncollapse.registry import Cure

CONTEXT_NAMES = ("mask", "causal", "edge_index", "batch")


@dataclass(frozen=True, eq=False)
class Request:
    """What `attach` was asked for.

    stack: the blocks. cure: of the registry. at: names of places. blocks: numbers of blocks. options: arguments of the
    cure. arguments: the other arguments of `attach` as they were given: part, modules, layout, tokens, padding, causal.
    """

    stack: Stack
    cure: Cure
    at: tuple[str, ...]
    blocks: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class PlannedCure:
    """One module of a cure and where it goes: checked, not yet in the model.

    key: block and place. cure: the module. calls: in which calls of the block it acts, None for all.
    """

    key: str
    cure: nn.Module
    site: Site
    block: Block
    request: Request
    calls: frozenset[int] | None = None


def select_cure_places(stack: Stack, cure: Cure, at: At | None) -> tuple[str, ...]:
    """Return the places that `at` selects for a cure; None selects the cure's own place."""
    fixed = {"attention": "attention.context", "edges": "edges"}.get(cure.acts_on)
    if fixed is not None:
        if at not in (None, fixed, [fixed], (fixed,)):
            raise ValueError(f"{cure.name} acts on {cure.acts_on}: its place is {fixed!r}, got at={at!r}.")
        return (fixed,)
    if at is None:
        known = (*stack.places(), *final_places(stack))
        return (next(place for place in (cure.place, "conv.output", "block") if place in known),)
    return select_places(stack, at, ends=True)


def plan(model: nn.Module, request: Request) -> list[PlannedCure]:
    """Create the modules of an attachment. The model does not change; whatever does not fit is a ValueError."""
    found: dict[Site, PlannedCure] = {}
    for key, site, block in _list_sites(request):
        if site not in found:
            cure = _create_cure(model, request, site, block)
            calls = None if key in final_places(request.stack) else _select_calls(request, block)
            found[site] = PlannedCure(key, cure, site, block, request, calls)
    planned = list(found.values())
    for one in planned:
        _try_out(one)
    return planned


def _list_sites(request: Request) -> list[tuple[str, Site, Block]]:
    """Return key, site and block of each module that is needed."""
    stack, cure = request.stack, request.cure
    if cure.acts_on == "edges":
        if not stack.arguments:
            raise ValueError(f"{cure.name} drops edges, and {stack.architecture} takes no edge_index by name.")
        return [("edges", Site(stack.path, "input"), stack.blocks[0])]
    blocks = [stack.blocks[number] for number in request.blocks]
    if cure.acts_on == "attention" and not all(block.values for block in blocks):
        raise ValueError(
            f"{cure.name} needs the values of attention, and in {stack.architecture} they are not known. It works on "
            "models of timm and transformers that compute the values in a module of their own."
        )
    ends = final_places(stack)
    inner = [(f"{b.name} {place}", b.places[place], b) for place in request.at if place not in ends for b in blocks]
    return inner + [(place, ends[place], stack.blocks[-1]) for place in request.at if place in ends]


def _select_calls(request: Request, block: Block) -> frozenset[int] | None:
    """Return in which calls of its module a block was selected; None for all."""
    same = [other for other in request.stack.blocks if other.path == block.path]
    selected = [request.stack.blocks[number] for number in request.blocks]
    wanted = {other.call for other in selected if other.path == block.path}
    return None if wanted in ({other.call for other in same}, set()) else frozenset(wanted)


def _create_cure(model: nn.Module, request: Request, site: Site, block: Block) -> nn.Module:
    """Create the cure's module for a site, on its device and in its dtype."""
    cure, stack = request.cure, request.stack
    module, parameters = model.get_submodule(site.path), inspect.signature(cure.layer).parameters
    given = {**cure.attached, **_resolve_preset(cure, request.options)}
    if "dim" in parameters:
        given.setdefault("dim", width(module, site.side) or stack.width)
    if "heads" in parameters and block.values is not None:
        given.setdefault("heads", block.values.heads * block.values.repeats)
    unknown = [name for name in given if name not in parameters]
    missing = [p.name for p in parameters.values() if p.default is p.empty and given.get(p.name, p.empty) is p.empty]
    if unknown or missing:
        problem = f"does not take {unknown[0]!r}" if unknown else f"needs {missing[0]!r}"
        hint = did_you_mean(unknown[0], parameters) if unknown else ""
        raise ValueError(f"{cure.name} {problem}.{hint} Its options are: {', '.join(parameters)}.")
    try:
        new: nn.Module = cure.layer(**given)
    except (ValueError, TypeError) as error:
        where = site.path or "the model"
        if "dim" in given and given["dim"] is None:
            raise ValueError(
                f"{cure.name} must know the number of features, which {where} does not show before it runs: pass dim=…"
            ) from error
        raise ValueError(f"{cure.name} at {where}: {error}") from error
    return _match_weights(new, module, model.get_submodule(block.path), model).train(module.training)


def _resolve_preset(cure: Cure, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, filled up by those of a published variant; norms are left to the model."""
    rest = {name: value for name, value in options.items() if name != "preset"}
    name = options.get("preset")
    if name is None:
        return rest
    known = getattr(cure.layer, "PRESETS", {})
    if name not in known:
        hint = did_you_mean(name, known)
        raise ValueError(f"{cure.name} has no preset {name!r}.{hint} There are: {', '.join(known) or 'none'}.")
    return {**known[name], **cure.attached, **rest}


def _match_weights(new: nn.Module, *modules: nn.Module) -> nn.Module:
    """Move a new module to the device and dtype of the first of these modules that has weights."""
    weights = (
        p for module in modules for p in module.parameters() if p.dtype.is_floating_point and p.dtype.itemsize > 1
    )
    weight = next(weights, None)
    if weight is not None:
        new.to(weight.device, weight.dtype)
        new.apply(random_weights.reset)  # start values that were rounded to another dtype before
    return new


def _try_out(planned: PlannedCure) -> None:
    """Run the cure on a few tokens with the context that it will get, so that wrong options fail now."""
    cure, request = planned.cure, planned.request
    stack, name = request.stack, request.cure.name
    if request.cure.acts_on != "tokens" or any(p.is_meta for p in cure.parameters()):
        return
    causal = bool(request.arguments["causal"]) or stack.context((), {}).causal
    takes = context_names(cure)
    if causal and "causal" not in takes:
        raise ValueError(f"{name} reads later tokens, so it does not fit {stack.architecture}, a decoder.")
    weight = next(cure.parameters(), torch.empty(0))
    dim = getattr(cure, "dim", None) or weight.shape[-1] or 4
    x = torch.zeros(4, dim, dtype=weight.dtype, device=weight.device)
    context: dict[str, Any] = {"mask": torch.ones(1, 4, dtype=torch.bool, device=x.device), "causal": causal}
    if stack.layout == "nodes":
        context = {"edge_index": torch.zeros(2, 1, dtype=torch.long, device=x.device), "batch": None}
    mode = cure.training
    try:
        with torch.no_grad():
            cure.eval()(
                x if stack.layout == "nodes" else x[None],
                **{name: value for name, value in context.items() if name in takes},
            )
    except ValueError as error:
        raise ValueError(f"{name} does not fit {stack.architecture}: {error}") from error
    finally:
        cure.train(mode)


def context_names(cure: nn.Module) -> tuple[str, ...]:
    """Return which parts of the context a cure takes: what its `reads` says, or else the arguments of its forward."""
    reads = getattr(cure, "reads", None)
    names = tuple(reads) if reads is not None else tuple(inspect.signature(cure.forward).parameters)
    return tuple(name for name in CONTEXT_NAMES if name in names)
