"""From a cure and places to modules, ports and writers in a model."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from uncollapse.backbones import arguments, random_weights
from uncollapse.backbones.widths import width
from uncollapse.registry import Cure
from uncollapse.sites import CHILD, OUTPUT, Block, Side, Site, Stack
from uncollapse.writing.choosing import ends
from uncollapse.writing.edges import EdgeWriter
from uncollapse.writing.heads import HeadWriter, ValueReader
from uncollapse.writing.ports import (
    NO_SCRIPT,
    OUTSIDE,
    PLAIN,
    RECEIVE,
    STREAM,
    Frame,
    Receiver,
    StreamWriter,
    Writer,
    close_idle,
    port_of,
)

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # they run or list whatever is put into them
TELLS = ("mask", "causal", "edge_index", "batch")


@dataclass
class Point:
    """One module of a cure, and where it goes: checked, and not yet in the model."""

    key: str
    kind: Cure
    cure: nn.Module
    site: Site
    block: Block
    stack: Stack
    calls: frozenset[int] | None
    patches: bool
    causal: bool


def plan(
    model: nn.Module,
    stack: Stack,
    cure: Cure,
    places: tuple[str, ...],
    blocks: tuple[int, ...],
    tokens: str,
    causal: bool,
    options: dict[str, Any],
) -> list[Point]:
    """The points of an attachment. Nothing of the model is changed; whatever does not fit is an error."""
    found: dict[Site, Point] = {}
    for key, site, block in _sites(stack, cure, places, blocks):
        if site in found:
            continue
        made = _made(model, stack, cure, site, block, options)
        calls = None if key in ends(stack) else _calls(stack, block, blocks)
        found[site] = Point(key, cure, made, site, block, stack, calls, tokens == "patches", causal)
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
    inner = [(f"{b.name} {place}", b.places[place], b) for place in places if place not in ends(stack) for b in chosen]
    return inner + [(place, ends(stack)[place], last) for place in places if place in ends(stack)]


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
        raise ValueError(f"{cure.name} {problem}. Its options are: {', '.join(parameters)}.")
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
        raise ValueError(f"{cure.name} has no preset {name!r}. There are: {', '.join(known) or 'none'}.")
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


def _try(point: Point) -> None:
    """Run the cure on a few tokens, with what will be told to it, so that options that do not fit fail now."""
    if point.kind.acts_on != "tokens" or any(p.is_meta for p in point.cure.parameters()):
        return
    causal = point.causal or point.stack.context((), {}).causal
    tells = takes(point.cure)
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


def takes(cure: nn.Module) -> tuple[str, ...]:
    """Which of the context a cure is told: what its `reads` says, or else what its forward pass takes."""
    reads = getattr(cure, "reads", None)
    names = tuple(reads) if reads is not None else tuple(inspect.signature(cure.forward).parameters)
    return tuple(name for name in TELLS if name in names)


class Cures(nn.ModuleDict):
    """The cures that a module keeps, and what each of them is a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.parts_of: dict[str, Any] = {}

    def __prepare_scriptable__(self) -> "Cures":
        """What torch.jit.script asks for first."""
        raise RuntimeError(NO_SCRIPT)


@dataclass
class Wire:
    """What was put into a model for one point: at a side of a module, with the cure as a child of its host."""

    host: nn.Module
    name: str
    module: nn.Module
    side: Side
    frames: list[Frame] = field(default_factory=list)
    counted: list[Frame] = field(default_factory=list)
    receivers: list[Receiver] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    writers: list[Callable[..., Any]] = field(default_factory=list)

    def undo(self) -> None:
        """Take it out again."""
        drop = {id(writer) for writer in self.writers}
        for module in self.modules:
            port_of(module, "").drop(drop)
        for frame in self.frames:
            frame.users -= 1
            if frame.users == 0:
                frame.retire()
        for frame in self.counted:
            frame.counted -= 1
        for receiver in self.receivers:
            receiver.users -= 1
        for module in self.modules:
            close_idle(module)
        cures: Any = self.host._modules[CHILD]
        del cures[self.name], cures.parts_of[self.name]
        if not len(cures):
            del self.host._modules[CHILD]


def wire(model: nn.Module, point: Point, whole: Any) -> Wire:
    """Put a point into a model. whole: what it is a part of, for whoever finds it there."""
    host = _host(model, point.site.path)
    name = _added(host, point.kind.name, point.cure, whole)
    new = Wire(host, name, model.get_submodule(point.site.path), point.site.side)
    try:
        _connect(model, point, new)
    except BaseException:
        new.undo()
        raise
    return new


def _connect(model: nn.Module, point: Point, new: Wire) -> None:
    stack, block, site = point.stack, point.block, point.site
    inside = site.path == block.path or site.path.startswith(f"{block.path}." if block.path else "")
    asks = (stack.asks_owner and not stack.lacks_batch) or point.calls is not None
    owner = _owner_frame(model, stack, new)
    if point.kind.acts_on == "edges":
        change = EdgeWriter(point.cure, stack.arguments)
        new.writers.append(change)
        _port(model, site.path, new).arguments.append(change)
        return
    frame = _frame(model, f"{stack.family} block", block.path, block.context, new)
    _belong(frame, owner, asks)
    owner.expects = stack.family == "named"
    if point.calls is not None:
        frame.counted += 1
        new.counted.append(frame)
    frame.followed = frame.followed or not inside
    writer = _writer(model, point, frame, inside, new)
    rank = STREAM if site.carried else PLAIN if inside else OUTSIDE
    _write(model, site, rank, writer, new)
    if site.carried:
        _let_receive(model, point, frame, new)


def _writer(model: nn.Module, point: Point, frame: Frame, inside: bool, new: Wire) -> Callable[[Tensor], Tensor]:
    if point.kind.acts_on == "attention":
        assert point.block.values is not None
        _write(model, Site(point.block.values.path), OUTSIDE, ValueReader(frame), new)
        return HeadWriter(point.cure, frame, point.block.values, point.calls, point.causal)
    kind = StreamWriter if point.site.carried else Writer
    return kind(
        point.cure,
        frame,
        point.stack.layout,
        takes(point.cure),
        inside=inside,
        calls=point.calls,
        patches=point.patches,
        causal=point.causal,
    )


def _let_receive(model: nn.Module, point: Point, frame: Frame, new: Wire) -> None:
    """Every later look of the block at the stream, and its end, gets what is carried."""
    looks = [site for site in point.block.places.values() if site.carried]
    later = looks[looks.index(point.site) + 1 :]
    for site in (*later, point.block.places[OUTPUT]):
        port = _port(model, site.path, new)
        own = (w for _, w in port.sides[site.side] if isinstance(w, Receiver) and w.frame is frame)
        receiver = next(own, None)
        if receiver is None:
            receiver = Receiver(frame)
            port.add(site.side, RECEIVE, receiver)
        receiver.users += 1
        new.receivers.append(receiver)


def _write(model: nn.Module, site: Site, rank: int, writer: Callable[[Tensor], Tensor], new: Wire) -> None:
    new.writers.append(writer)
    _port(model, site.path, new).add(site.side, rank, writer)


def _port(model: nn.Module, path: str, new: Wire) -> Any:
    module = model.get_submodule(path)
    if not any(known is module for known in new.modules):
        new.modules.append(module)
    return port_of(module, path)


def _frame(model: nn.Module, key: str, path: str, read: Any, new: Wire) -> Frame:
    """The frame of a module, made if it has none; it is in use from now on."""
    port = _port(model, path, new)
    frame = next((frame for frame in port.opens if frame.key == key), None)
    if frame is None:
        frame = Frame(key, path, read)
        port.opens.append(frame)
    frame.users += 1
    new.frames.append(frame)
    return frame


def _owner_frame(model: nn.Module, stack: Stack, new: Wire) -> Frame:
    read = stack.context if stack.asks_owner else stack.refuses
    frame = _frame(model, f"{stack.family} owner", stack.path, read, new)
    if not frame.held:
        for path, attribute, value in stack.held:
            module = model.get_submodule(path)
            frame.held.append((module, attribute, getattr(module, attribute)))
            setattr(module, attribute, value)
    if stack.outer is not None:
        _belong(frame, _frame(model, f"{stack.family} outer", *stack.outer, new), asks=True)
    return frame


def _belong(frame: Frame, owner: Frame, asks: bool) -> None:
    """A start of the owner is one of the frame too: its calls are counted anew, and what it was told is forgotten."""
    frame.asks = frame.asks or asks
    if not any(known is owner for known in frame.owners):
        frame.owners.append(owner)
        owner.inner.append(frame)


def _host(model: nn.Module, path: str) -> nn.Module:
    """The module that keeps a cure as its child: the one at the site, or the next around it that runs its own code."""
    while path and _runs_children(model.get_submodule(path)):
        path = path.rpartition(".")[0]
    module = model.get_submodule(path)
    return next((inner for inner in module.modules() if not _runs_children(inner)), module)


def _runs_children(module: nn.Module) -> bool:
    """Whether a child that is added to a module would run with the others."""
    asked = ("children", "named_children", "_modules")
    return isinstance(module, CONTAINERS) or any(name in arguments.names_in_forward(module) for name in asked)


def _added(host: nn.Module, kind: str, cure: nn.Module, whole: Any) -> str:
    """Add a cure to its host, under a name that is free."""
    if CHILD not in host._modules:
        host.add_module(CHILD, Cures())
    cures: Any = host._modules[CHILD]
    number = next(n for n in range(1, len(cures) + 2) if (kind if n == 1 else f"{kind}_{n}") not in cures)
    name = kind if number == 1 else f"{kind}_{number}"
    cures[name], cures.parts_of[name] = cure, whole
    return name
