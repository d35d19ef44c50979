"""From what `attach` was asked for to the modules that will go into the model, checked before anything changes."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from uncollapse.attachment.causality import Causality
from uncollapse.backbones import random_weights
from uncollapse.backbones.introspection import block_width, width
from uncollapse.backbones.select import At, final_places, select_places
from uncollapse.backbones.sites import Block, Site, Stack
from uncollapse.errors import did_you_mean
from uncollapse.registry import FIXED_PLACES, Cure

CONTEXT_NAMES = ("mask", "causal", "edge_index", "batch", "inputs", "first", "previous", "second")


@dataclass(frozen=True, eq=False)
class Request:
    """What `attach` was asked for.

    stack: the blocks. cure: of the registry. at: names of places. blocks: numbers of blocks. options: arguments of the
    cure. arguments: the other arguments of `attach` as they were given: part, modules, layout, tokens, padding, causal.
    causality: what is known of the order in which tokens see each other, beyond what a context says.
    """

    stack: Stack
    cure: Cure
    at: tuple[str, ...]
    blocks: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    causality: Causality | None = None


@dataclass(frozen=True, eq=False)
class PlannedCure:
    """One module of a cure and where it goes: checked, not yet in the model.

    key: block and place. cure: the module. calls: in which calls of the block it acts, None for all. earlier: the
    site of the first or the previous block from which it needs the tensor, if it takes that.
    """

    key: str
    cure: nn.Module
    site: Site
    block: Block
    request: Request
    calls: frozenset[int] | None = None
    earlier: Site | None = None


def select_cure_places(stack: Stack, cure: Cure, at: At | None) -> tuple[str, ...]:
    """Return the places that `at` selects for a cure; None selects the cure's own places."""
    fixed = FIXED_PLACES.get(cure.acts_on)
    if fixed is not None:
        if at not in (None, *fixed, list(fixed), fixed):
            raise ValueError(f"{cure.name} acts on {cure.acts_on}: its place is {fixed[0]!r}, got at={at!r}.")
        return fixed
    known = (*stack.places(), *final_places(stack))
    if cure.pre_norm and "attention.norm.input" not in known:
        raise ValueError(f"{cure.name} is for blocks with pre-norm, and {stack.architecture} has none that are known.")
    if at is not None:
        return select_places(stack, at, ends=True)
    own = tuple(place for place in cure.place if place in known)
    found = own or next(((place,) for place in cure.elsewhere if place in known), ())
    if not found:
        raise ValueError(
            f"{cure.name} acts at {cure.place[0]}, and {stack.architecture} has no such place. To put it elsewhere, "
            f"choose with at=…: {', '.join(known)}."
        )
    return found


def select_blocks(model: nn.Module, request: Request) -> tuple[int, ...]:
    """Return those of the selected blocks where a cure fits.

    A cure that brings back what an earlier block had acts from the second block on. One that adds tensors of two
    places needs the same number of features in both.
    """
    stack, cure = request.stack, request.cure
    if cure.acts_on in ("values", "attention") and not all(stack.blocks[number].values for number in request.blocks):
        raise ValueError(
            f"{cure.name} needs the values of attention, and in {stack.architecture} they are not known. It works on "
            "models of timm and transformers that compute the values in a module of their own."
        )
    if cure.takes("second") and not all(stack.blocks[number].second for number in request.blocks):
        raise ValueError(
            f"{cure.name} applies the attention map twice, and the attention of {stack.architecture} cannot be asked "
            "for that. It works on models of timm, and of transformers with its common attention functions."
        )
    if cure.acts_on == "edges" or not (cure.takes_earlier or cure.takes("inputs")):
        return request.blocks
    later = [number for number in request.blocks if number > 0 or not cure.takes_earlier]
    fitting = tuple(n for n in later if all(_has_width(model, request, place, n) for place in request.at))
    if not fitting:
        where = "from the second block on, where" if cure.takes_earlier else "where"
        raise ValueError(
            f"{cure.name} fits none of the selected blocks of {stack.architecture}: it acts {where} the number of "
            "features stays the same."
        )
    return fitting


def _has_width(model: nn.Module, request: Request, place: str, number: int) -> bool:
    """Return whether a site has as many features as the one whose tensor is added there, as far as is known."""
    stack, cure = request.stack, request.cure
    site = _find_site(stack, stack.blocks[number], place)
    if cure.acts_on != "tokens":
        return True
    earlier = _find_earlier(request, stack.blocks[number], place)
    other = replace(site, side="input") if earlier is None else earlier
    widths = {width(model.get_submodule(one.path), one.side) for one in (site, other)}
    return len(widths - {None}) < 2


def _find_site(stack: Stack, block: Block, place: str) -> Site:
    """Return the site of a place in a block, or after all blocks."""
    if place == "attention.values" and block.values is not None:
        return Site(block.values.path)
    return final_places(stack).get(place) or block.places[place]


def plan(model: nn.Module, request: Request) -> list[PlannedCure]:
    """Create the modules of an attachment. The model does not change; whatever does not fit is a ValueError."""
    found: dict[Site, PlannedCure] = {}
    for place, site, block in _list_sites(request):
        key = place if place in ("edges", *final_places(request.stack)) else f"{block.name} {place}"
        if site not in found:
            _check_site(request, site, place)
            cure = _create_cure(model, request, site, block)
            calls = None if key in final_places(request.stack) else _select_calls(request, block)
            found[site] = PlannedCure(key, cure, site, block, request, calls, _find_earlier(request, block, place))
    planned = list(found.values())
    for one in planned:
        _try_out(one)
    return planned


def _list_sites(request: Request) -> list[tuple[str, Site, Block]]:
    """Return place, site and block of each module that is needed."""
    stack, cure = request.stack, request.cure
    if cure.acts_on == "edges":
        if not stack.arguments:
            raise ValueError(f"{cure.name} drops edges, and {stack.architecture} takes no edge_index by name.")
        return [("edges", Site(stack.path, "input"), stack.blocks[0])]
    blocks = [stack.blocks[number] for number in request.blocks]
    ends = final_places(stack)
    inner = [(place, _find_site(stack, b, place), b) for place in request.at if place not in ends for b in blocks]
    return inner + [(place, ends[place], stack.blocks[-1]) for place in request.at if place in ends]


def _check_site(request: Request, site: Site, place: str) -> None:
    """Refuse a site that does not have what a cure adds to it."""
    stack, cure = request.stack, request.cure
    if cure.takes("inputs") and cure.acts_on == "tokens" and site.side == "input":
        raise ValueError(
            f"{cure.name} adds the input of a module to its output, and {place} of {stack.architecture} is the input "
            "of one. Choose another place with at=…."
        )
    if cure.takes_earlier and place in final_places(stack):
        raise ValueError(f"{cure.name} acts within blocks, and {place} is after them. Choose another place with at=….")
    if cure.takes("previous") and len({block.path for block in stack.blocks}) < len(stack.blocks):
        raise ValueError(f"{cure.name} needs the block before, and blocks of {stack.architecture} share their modules.")


def _find_earlier(request: Request, block: Block, place: str) -> Site | None:
    """Return the site of the first or the previous block whose tensor a cure needs; None if it needs none."""
    stack, cure = request.stack, request.cure
    if not cure.takes_earlier:
        return None
    earlier = stack.blocks[max(stack.blocks.index(block) - 1, 0) if cure.takes("previous") else 0]
    return _find_site(stack, earlier, place if cure.acts_on == "tokens" else "attention.values")


def _select_calls(request: Request, block: Block) -> frozenset[int] | None:
    """Return in which calls of its module a block was selected; None for all."""
    same = [other for other in request.stack.blocks if other.path == block.path]
    selected = [request.stack.blocks[number] for number in request.blocks]
    wanted = {other.call for other in selected if other.path == block.path}
    return None if wanted in ({other.call for other in same}, set()) else frozenset(wanted)


def _create_cure(model: nn.Module, request: Request, site: Site, block: Block) -> nn.Module:
    """Create the cure's module for a site, on its device and in its dtype."""
    cure = request.cure
    module, parameters = model.get_submodule(site.path), inspect.signature(cure.layer).parameters
    given = {**cure.attached, **_resolve_preset(cure, request.options)}
    supplied = _supply(model, request, site, block)
    given = {name: value for name, value in supplied.items() if name in parameters} | given
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


def _supply(model: nn.Module, request: Request, site: Site, block: Block) -> dict[str, Any]:
    """Return the arguments of a cure's module that its place determines."""
    stack, values, module = request.stack, block.values, model.get_submodule(site.path)
    found: dict[str, Any] = {
        "dim": width(module, site.side) or stack.width or block_width(module, site.side),
        "depth": stack.blocks.index(block) + 1,
        "blocks": len(stack.blocks),
    }
    if values is not None:
        found["heads"] = values.heads * values.repeats
        found["dim_in"] = width(model.get_submodule(values.path), "input")
    if "depth" in inspect.signature(request.cure.layer).parameters and _is_shared(stack, block):
        raise ValueError(
            f"{request.cure.name} depends on the depth of a block, and blocks of {stack.architecture} share theirs."
        )
    return found


def _is_shared(stack: Stack, block: Block) -> bool:
    return [other.path for other in stack.blocks].count(block.path) > 1


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
    causal = bool(request.causality and request.causality.causal) or stack.context((), {}).causal
    takes = context_names(cure)
    if causal and request.cure.mixes and "causal" not in takes:
        raise ValueError(f"{name} reads later tokens, so it does not fit {stack.architecture}, a decoder.")
    weight = next(cure.parameters(), torch.empty(0))
    dim = getattr(cure, "dim", None) or (weight.shape[-1] if weight.dim() else 0) or 4
    x = torch.zeros(4, dim, dtype=weight.dtype, device=weight.device)
    context: dict[str, Any] = {"mask": torch.ones(1, 4, dtype=torch.bool, device=x.device), "causal": causal}
    if stack.layout == "nodes":
        context = {"edge_index": torch.zeros(2, 1, dtype=torch.long, device=x.device), "batch": None}
    x = x if stack.layout == "nodes" else x[None]
    context |= {"inputs": x, "first": x, "previous": x}
    mode = cure.training
    try:
        with torch.no_grad():
            cure.eval()(x, **{name: value for name, value in context.items() if name in takes})
    except ValueError as error:
        raise ValueError(f"{name} does not fit {stack.architecture}: {error}") from error
    finally:
        cure.train(mode)


def context_names(cure: nn.Module) -> tuple[str, ...]:
    """Return which parts of the context a cure takes: what its `reads` says, or else the arguments of its forward."""
    reads = getattr(cure, "reads", None)
    names = tuple(reads) if reads is not None else tuple(inspect.signature(cure.forward).parameters)
    return tuple(name for name in CONTEXT_NAMES if name in names)
