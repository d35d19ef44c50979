"""From a cure and places to the modules that will go there, checked before anything changes."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from uncollapse.backbones import random_weights
from uncollapse.backbones.introspection import width
from uncollapse.backbones.select import At, final_places, select_places
from uncollapse.backbones.sites import Block, Site, Stack
from uncollapse.errors import did_you_mean
from uncollapse.registry import Cure

TELLS = ("mask", "causal", "edge_index", "batch")


@dataclass
class PlannedCure:
    """One module of a cure, and where it goes: checked, and not yet in the model."""

    key: str
    kind: Cure
    cure: nn.Module
    site: Site
    block: Block
    stack: Stack
    calls: frozenset[int] | None
    patches: bool
    counts_padding: bool
    causal: bool


def plan(
    model: nn.Module,
    stack: Stack,
    cure: Cure,
    places: tuple[str, ...],
    blocks: tuple[int, ...],
    tokens: str,
    padding: str,
    causal: bool,
    options: dict[str, Any],
) -> list[PlannedCure]:
    """The points of an attachment. Nothing of the model is changed; whatever does not fit is an error."""
    found: dict[Site, PlannedCure] = {}
    for key, site, block in _sites(stack, cure, places, blocks):
        if site in found:
            continue
        made = _made(model, stack, cure, site, block, options)
        calls = None if key in final_places(stack) else _calls(stack, block, blocks)
        told = tokens == "patches", padding == "counted", causal
        found[site] = PlannedCure(key, cure, made, site, block, stack, calls, *told)
    points = list(found.values())
    for point in points:
        _try(point)
    return points


def _sites(stack: Stack, cure: Cure, places: tuple[str, ...], blocks: tuple[int, ...]) -> list[tuple[str, Site, Block]]:
    """Key, site and block of each point."""
    last = stack.blocks[-1]
    if cure.acts_on == "edges":
        if not stack.arguments:
            raise ValueError(f"{cure.name} drops edges, and {stack.architecture} takes no edge_index by name.")
        return [("edges", Site(stack.path, "input"), stack.blocks[0])]
    if cure.acts_on == "attention" and not all(stack.blocks[n].values for n in blocks):
        raise ValueError(
            f"{cure.name} needs the values of attention, and in {stack.architecture} they are not known. It works on "
            "models of timm and transformers that compute them in a module of their own."
        )
    chosen = [stack.blocks[number] for number in blocks]
    inner = [
        (f"{b.name} {place}", b.places[place], b)
        for place in places
        if place not in final_places(stack)
        for b in chosen
    ]
    return inner + [(place, final_places(stack)[place], last) for place in places if place in final_places(stack)]


def _calls(stack: Stack, block: Block, blocks: tuple[int, ...]) -> frozenset[int] | None:
    """In which calls of its module a block is meant; None for all."""
    passes = {b.call for b in stack.blocks if b.path == block.path}
    wanted = {stack.blocks[number].call for number in blocks if stack.blocks[number].path == block.path}
    return None if wanted in (passes, set()) else frozenset(wanted)


def _made(model: nn.Module, stack: Stack, cure: Cure, site: Site, block: Block, options: dict[str, Any]) -> nn.Module:
    """The cure's module for a site, on its device, in its dtype."""
    module, parameters = model.get_submodule(site.path), inspect.signature(cure.layer).parameters
    given = {**cure.attached, **_preset(cure, options)}
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
        made: nn.Module = cure.layer(**given)
    except (ValueError, TypeError) as error:
        where = site.path or "the model"
        if "dim" in given and given["dim"] is None:
            raise ValueError(
                f"{cure.name} must know the number of features, which {where} does not tell before it runs: give dim=…"
            ) from error
        raise ValueError(f"{cure.name} at {where}: {error}") from error
    return _at_home(made, module, model.get_submodule(block.path), model).train(module.training)


def _preset(cure: Cure, options: dict[str, Any]) -> dict[str, Any]:
    """The options, with those of a published variant where they say nothing else; norms are left to the model."""
    rest = {name: value for name, value in options.items() if name != "preset"}
    name = options.get("preset")
    if name is None:
        return rest
    known = getattr(cure.layer, "PRESETS", {})
    if name not in known:
        hint = did_you_mean(name, known)
        raise ValueError(f"{cure.name} has no preset {name!r}.{hint} There are: {', '.join(known) or 'none'}.")
    return {**known[name], **cure.attached, **rest}


def _at_home(made: nn.Module, *modules: nn.Module) -> nn.Module:
    """A new module on the device and in the dtype of the first of these that has weights."""
    weights = (
        p for module in modules for p in module.parameters() if p.dtype.is_floating_point and p.dtype.itemsize > 1
    )
    weight = next(weights, None)
    if weight is not None:
        made.to(weight.device, weight.dtype)
        made.apply(random_weights.reset)  # a number that was rounded to another dtype before
    return made


def _try(point: PlannedCure) -> None:
    """Run the cure on a few tokens, with what will be told to it, so that options that do not fit fail now."""
    if point.kind.acts_on != "tokens" or any(p.is_meta for p in point.cure.parameters()):
        return
    causal = point.causal or point.stack.context((), {}).causal
    tells = context_names(point.cure)
    if causal and "causal" not in tells:
        raise ValueError(
            f"{point.kind.name} reads later tokens and does not fit {point.stack.architecture}, a decoder."
        )
    weight = next(point.cure.parameters(), torch.empty(0))
    dim = getattr(point.cure, "dim", None) or weight.shape[-1] or 4
    x = torch.zeros(4, dim, dtype=weight.dtype, device=weight.device)
    context: dict[str, Any] = {"mask": torch.ones(1, 4, dtype=torch.bool, device=x.device), "causal": causal}
    if point.stack.layout == "nodes":
        context = {"edge_index": torch.zeros(2, 1, dtype=torch.long, device=x.device), "batch": None}
    mode = point.cure.training
    try:
        with torch.no_grad():
            point.cure.eval()(
                x if point.stack.layout == "nodes" else x[None],
                **{name: value for name, value in context.items() if name in tells},
            )
    except ValueError as error:
        raise ValueError(f"{point.kind.name} does not fit {point.stack.architecture}: {error}") from error
    finally:
        point.cure.train(mode)


def context_names(cure: nn.Module) -> tuple[str, ...]:
    """Which of the context a cure is told: what its `reads` says, or else what its forward pass takes."""
    reads = getattr(cure, "reads", None)
    names = tuple(reads) if reads is not None else tuple(inspect.signature(cure.forward).parameters)
    return tuple(name for name in TELLS if name in names)


def places_for_cure(stack: Stack, cure: Cure, at: At | None) -> tuple[str, ...]:
    """Return the places that `at` selects for a cure; None selects the cure's own."""
    fixed = {"attention": "attention.context", "edges": "edges"}.get(cure.acts_on)
    if fixed is not None:
        if at not in (None, fixed, [fixed], (fixed,)):
            raise ValueError(f"{cure.name} acts on {cure.acts_on}: its place is {fixed!r}, got at={at!r}.")
        return (fixed,)
    if at is None:
        known = (*stack.places(), *final_places(stack))
        return (next(place for place in (cure.place, "conv.output", "block") if place in known),)
    return select_places(stack, at, ends=True)
