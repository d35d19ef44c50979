"""Put planned cures into a model, by children, ports and writers, and take them out again."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from uncollapse.attachment.calls import CallState
from uncollapse.attachment.plan import PlannedCure, context_names
from uncollapse.attachment.write_hooks import NO_SCRIPT, OUTSIDE, PLAIN, RECEIVE, STREAM, hooks_of, remove_if_idle
from uncollapse.attachment.writers import EdgeWriter, HeadWriter, Receiver, StreamWriter, ValueReader, Writer
from uncollapse.backbones import introspection
from uncollapse.backbones.sites import CHILD, OUTPUT, Side, Site, Stack

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # they run or list whatever is put into them


class Cures(nn.ModuleDict):
    """The cures that a module keeps, and what each of them is a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.parts_of: dict[str, Any] = {}

    def __prepare_scriptable__(self) -> "Cures":
        """What torch.jit.script asks for first."""
        raise RuntimeError(NO_SCRIPT)


@dataclass
class Installed:
    """What was put into a model for one point: at a side of a module, with the cure as a child of its host."""

    host: nn.Module
    name: str
    module: nn.Module
    side: Side
    frames: list[CallState] = field(default_factory=list)
    counted: list[CallState] = field(default_factory=list)
    receivers: list[Receiver] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    writers: list[Callable[..., Any]] = field(default_factory=list)

    def undo(self) -> None:
        """Take it out again."""
        drop = {id(writer) for writer in self.writers}
        for module in self.modules:
            hooks_of(module, "").drop(drop)
        for frame in self.frames:
            frame.users -= 1
            if frame.users == 0:
                frame.retire()
        for frame in self.counted:
            frame.counted -= 1
        for receiver in self.receivers:
            receiver.users -= 1
        for module in self.modules:
            remove_if_idle(module)
        cures: Any = self.host._modules[CHILD]
        del cures[self.name], cures.parts_of[self.name]
        if not len(cures):
            del self.host._modules[CHILD]


def install(model: nn.Module, point: PlannedCure, whole: Any) -> Installed:
    """Put a point into a model. whole: what it is a part of, for whoever finds it there."""
    host = _host(model, point.site.path)
    name = _added(host, point.kind.name, point.cure, whole)
    new = Installed(host, name, model.get_submodule(point.site.path), point.site.side)
    try:
        _connect(model, point, new)
    except BaseException:
        new.undo()
        raise
    return new


def _connect(model: nn.Module, point: PlannedCure, new: Installed) -> None:
    stack, block, site = point.stack, point.block, point.site
    inside = site.path == block.path or site.path.startswith(f"{block.path}." if block.path else "")
    owner = _owner_frame(model, stack, new)
    if point.kind.acts_on == "edges":
        change = EdgeWriter(point.cure, stack.arguments)
        new.writers.append(change)
        _port(model, site.path, new).arguments.append(change)
        return
    frame = _frame(model, f"{stack.family} block", block.path, block.context, new)
    _belong(frame, owner, asks=stack.needs_owner and not stack.lacks_batch)
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


def _writer(
    model: nn.Module, point: PlannedCure, frame: CallState, inside: bool, new: Installed
) -> Callable[[Tensor], Tensor]:
    if point.kind.acts_on == "attention":
        assert point.block.values is not None
        _write(model, Site(point.block.values.path), OUTSIDE, ValueReader(frame), new)
        return HeadWriter(point.cure, frame, point.block.values, point.calls, point.causal)
    kind = StreamWriter if point.site.carried else Writer
    return kind(
        point.cure,
        frame,
        point.stack.layout,
        context_names(point.cure),
        inside=inside,
        calls=point.calls,
        patches=point.patches,
        counts_padding=point.counts_padding,
        causal=point.causal,
    )


def _let_receive(model: nn.Module, point: PlannedCure, frame: CallState, new: Installed) -> None:
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


def _write(model: nn.Module, site: Site, rank: int, writer: Callable[[Tensor], Tensor], new: Installed) -> None:
    new.writers.append(writer)
    _port(model, site.path, new).add(site.side, rank, writer)


def _port(model: nn.Module, path: str, new: Installed) -> Any:
    module = model.get_submodule(path)
    if not any(known is module for known in new.modules):
        new.modules.append(module)
    return hooks_of(module, path)


def _frame(model: nn.Module, key: str, path: str, read: Any, new: Installed) -> CallState:
    """The frame of a module, made if it has none; it is in use from now on."""
    port = _port(model, path, new)
    frame = next((frame for frame in port.opens if frame.key == key), None)
    if frame is None:
        frame = CallState(key, path, read)
        port.opens.append(frame)
    frame.users += 1
    new.frames.append(frame)
    return frame


def _owner_frame(model: nn.Module, stack: Stack, new: Installed) -> CallState:
    read = stack.context if stack.needs_owner else stack.refusal
    frame = _frame(model, f"{stack.family} owner", stack.path, read, new)
    if not frame.held:
        for path, attribute, value in stack.overrides:
            module = model.get_submodule(path)
            frame.held.append((module, attribute, getattr(module, attribute)))
            setattr(module, attribute, value)
    if stack.outer is not None:
        _belong(frame, _frame(model, f"{stack.family} outer", *stack.outer, new), asks=True)
    return frame


def _belong(frame: CallState, owner: CallState, asks: bool) -> None:
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
    return isinstance(module, CONTAINERS) or any(name in introspection.code_names(module) for name in asked)


def _added(host: nn.Module, kind: str, cure: nn.Module, whole: Any) -> str:
    """Add a cure to its host, under a name that is free."""
    if CHILD not in host._modules:
        host.add_module(CHILD, Cures())
    cures: Any = host._modules[CHILD]
    number = next(n for n in range(1, len(cures) + 2) if (kind if n == 1 else f"{kind}_{n}") not in cures)
    name = kind if number == 1 else f"{kind}_{number}"
    cures[name], cures.parts_of[name] = cure, whole
    return name
