"""Put planned cures into a model, as child modules with hooks and writers, and take them out again."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from uncollapse.attachment.calls import CallState, EarlierTensor, Override
from uncollapse.attachment.plan import PlannedCure, context_names
from uncollapse.attachment.write_hooks import (
    NO_SCRIPT,
    OUTSIDE,
    PLAIN,
    READ,
    RECEIVE,
    STREAM,
    ModuleHooks,
    hooks_of,
    remove_if_idle,
)
from uncollapse.attachment.writers import (
    SECOND,
    EdgeWriter,
    HeadWriter,
    Holder,
    Receiver,
    Scope,
    StreamWriter,
    ValueWriter,
    Writer,
)
from uncollapse.backbones import introspection
from uncollapse.backbones.sites import CHILD, OUTPUT, ReadContext, Second, Side, Site, Stack

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # they run or list whatever is put into them


class Cures(nn.ModuleDict):
    """The cures that a module holds, and the attachment that each belongs to."""

    def __init__(self) -> None:
        super().__init__()
        self.attachments: dict[str, Any] = {}

    def __prepare_scriptable__(self) -> "Cures":
        """Refuse torch.jit.script, which calls this first."""
        raise RuntimeError(NO_SCRIPT)


@dataclass
class Installed:
    """What was put into a model for one planned cure: at a side of a module, with the cure as a child of its host."""

    host: nn.Module
    name: str
    module: nn.Module
    side: Side
    states: list[CallState] = field(default_factory=list)
    counters: list[CallState] = field(default_factory=list)
    shared: list[Receiver | EarlierTensor | Override] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    writers: list[Any] = field(default_factory=list)

    def undo(self) -> None:
        """Take it out again."""
        drop = {id(writer) for writer in self.writers}
        for module in self.modules:
            hooks_of(module, "").drop(drop)
        for state in self.states:
            state.users -= 1
            if state.users == 0:
                state.retire()
        for state in self.counters:
            state.counters -= 1
        for shared in self.shared:
            shared.users -= 1
            if isinstance(shared, EarlierTensor) and not shared.users:
                shared.owner.earlier = [tensor for tensor in shared.owner.earlier if tensor is not shared]
            if isinstance(shared, Override) and not shared.users:
                shared.restore()
        for module in self.modules:
            remove_if_idle(module)
        cures: Any = self.host._modules[CHILD]
        del cures[self.name], cures.attachments[self.name]
        if not len(cures):
            del self.host._modules[CHILD]


def install(model: nn.Module, planned: PlannedCure, attachment: Any) -> Installed:
    """Put a planned cure into a model, as a part of an attachment."""
    host = _find_host(model, planned.site.path)
    name = _add_child(host, planned.request.cure.name, planned.cure, attachment)
    new = Installed(host, name, model.get_submodule(planned.site.path), planned.site.side)
    try:
        _connect(model, planned, new)
    except BaseException:
        new.undo()
        raise
    return new


def _connect(model: nn.Module, planned: PlannedCure, new: Installed) -> None:
    stack, block, site = planned.request.stack, planned.block, planned.site
    inside = site.path == block.path or site.path.startswith(f"{block.path}." if block.path else "")
    owner = _use_owner_state(model, stack, new)
    if planned.request.cure.acts_on == "edges":
        change = EdgeWriter(planned.cure, stack.arguments)
        new.writers.append(change)
        _use_hooks(model, site.path, new).arguments.append(change)
        return
    state = _use_state(model, f"{stack.family} block", block.path, block.context, new)
    _link(state, owner, needs_owner=stack.needs_owner and not stack.lacks_batch)
    owner.warns_if_unreached = stack.family == "named"
    if planned.calls is not None:
        state.counters += 1
        new.counters.append(state)
    state.followed = state.followed or not inside
    _add_probe(model, planned, new)
    scope = _create_scope(model, planned, state, inside, new)
    rank = STREAM if site.carried else PLAIN if inside else OUTSIDE
    _add_writer(model, site, rank, _create_writer(model, planned, state, scope, new), new)
    if site.carried:
        _add_receivers(model, planned, state, new)


def _add_probe(model: nn.Module, planned: PlannedCure, new: Installed) -> None:
    """Let the next call of the owner find out whether the model is causal, if that is not known."""
    causality, path = planned.request.causality, planned.request.stack.path
    if causality is not None and causality.is_open:
        hooks = _use_hooks(model, path, new)
        new.writers.append(causality)
        if not any(probe is causality for probe in hooks.probes):
            hooks.probes.append(causality)


def _create_scope(model: nn.Module, planned: PlannedCure, state: CallState, inside: bool, new: Installed) -> Scope:
    """Describe where a cure acts, and let the tensors that it needs from other places be held for it."""
    request, takes = planned.request, context_names(planned.cure)
    earlier, inputs = None, ""
    if planned.earlier is not None:
        earlier = _use_earlier(model, planned, state, new)
    values, second = planned.block.values, planned.block.second
    if "inputs" in takes:
        path = planned.site.path if request.cure.acts_on == "tokens" or values is None else values.path
        inputs = f"{path} input"
        _add_writer(model, Site(path, "input"), READ, Holder(state, inputs), new)
    if "second" in takes and second is not None:
        _attend_twice(model, second, state, new)
    return Scope(
        request.stack.layout,
        takes,
        planned.site.axes,
        inside,
        planned.calls,
        patches=request.arguments["tokens"] == "patches",
        counts_padding=request.arguments["padding"] == "counted",
        causality=request.causality,
        mixes=request.cure.mixes,
        earlier=earlier,
        inputs=inputs,
        maps=second is not None and second.map is not None,
    )


def _attend_twice(model: nn.Module, second: Second, state: CallState, new: Installed) -> None:
    """Let the attention of a block apply its map twice, or show it: once for all cures of the block that need it."""
    module, receive = model.get_submodule(second.path), Holder(state, SECOND)
    if state.twice is None or not state.twice.users:
        state.twice = Override(module, second.attribute, second.change(module, receive))
    state.twice.users += 1
    new.shared.append(state.twice)
    if second.map is not None:
        _add_writer(model, second.map, READ, receive, new)


def _create_writer(
    model: nn.Module, planned: PlannedCure, state: CallState, scope: Scope, new: Installed
) -> Callable[[Tensor], Tensor]:
    values = planned.block.values
    if planned.request.cure.acts_on == "attention":
        assert values is not None
        _add_writer(model, Site(values.path), READ, Holder(state, values.path), new)
        return HeadWriter(planned.cure, state, scope, values)
    if planned.request.cure.acts_on == "values":
        assert values is not None
        return ValueWriter(planned.cure, state, scope, values)
    return (StreamWriter if planned.site.carried else Writer)(planned.cure, state, scope)


def _add_receivers(model: nn.Module, planned: PlannedCure, state: CallState, new: Installed) -> None:
    """Let every later read of the stream in the block, and its end, receive what is carried."""
    reads = [site for site in planned.block.places.values() if site.carried]
    later = reads[reads.index(planned.site) + 1 :]
    for site in (*later, planned.block.places[OUTPUT]):
        hooks = _use_hooks(model, site.path, new)
        own = (w for _, w in hooks.sides[site.side] if isinstance(w, Receiver) and w.state is state)
        receiver = next(own, None)
        if receiver is None:
            receiver = Receiver(state)
            hooks.add(site.side, RECEIVE, receiver)
        receiver.users += 1
        new.shared.append(receiver)


def _use_earlier(model: nn.Module, planned: PlannedCure, state: CallState, new: Installed) -> EarlierTensor:
    """Return the tensor of an earlier block that a cure needs, saved there in each pass for later blocks."""
    stack, site = planned.request.stack, planned.earlier
    assert site is not None
    owner = new.states[0]
    hooks = _use_hooks(model, site.path, new)
    own = (w for _, w in hooks.sides[site.side] if isinstance(w, EarlierTensor) and w.owner is owner)
    earlier = next(own, None)
    if earlier is None:
        is_shared = [block.path for block in stack.blocks].count(stack.blocks[0].path) > 1
        earlier = EarlierTensor(owner, state if is_shared else None)
        owner.earlier.append(earlier)
        hooks.add(site.side, READ, earlier)
    earlier.users += 1
    new.shared.append(earlier)
    state.finds_pass = True
    return earlier


def _add_writer(model: nn.Module, site: Site, rank: int, writer: Callable[[Tensor], Tensor], new: Installed) -> None:
    new.writers.append(writer)
    _use_hooks(model, site.path, new).add(site.side, rank, writer)


def _use_hooks(model: nn.Module, path: str, new: Installed) -> ModuleHooks:
    module = model.get_submodule(path)
    if not any(known is module for known in new.modules):
        new.modules.append(module)
    return hooks_of(module, path)


def _use_state(model: nn.Module, key: str, path: str, read: ReadContext, new: Installed) -> CallState:
    """Return the call state of a module, created if it has none, and count this use of it."""
    hooks = _use_hooks(model, path, new)
    state = next((state for state in hooks.states if state.key == key), None)
    if state is None:
        state = CallState(key, path, read)
        hooks.states.append(state)
    state.users += 1
    new.states.append(state)
    return state


def _use_owner_state(model: nn.Module, stack: Stack, new: Installed) -> CallState:
    read = stack.context if stack.needs_owner else stack.refusal
    state = _use_state(model, f"{stack.family} owner", stack.path, read, new)
    if not state.overrides:
        state.overrides += [Override(model.get_submodule(path), *changed) for path, *changed in stack.overrides]
    if stack.outer is not None:
        _link(state, _use_state(model, f"{stack.family} outer", *stack.outer, new), needs_owner=True)
    return state


def _link(state: CallState, owner: CallState, needs_owner: bool) -> None:
    """Let each call of the owner reset the state: its count of calls and its context."""
    state.needs_owner = state.needs_owner or needs_owner
    if not any(known is owner for known in state.owners):
        state.owners.append(owner)
        owner.inner.append(state)


def _find_host(model: nn.Module, path: str) -> nn.Module:
    """Return the module that holds a cure as its child: at the site, or the next around it with its own code."""
    while path and _runs_children(model.get_submodule(path)):
        path = path.rpartition(".")[0]
    module = model.get_submodule(path)
    return next((inner for inner in module.modules() if not _runs_children(inner)), module)


def _runs_children(module: nn.Module) -> bool:
    """Return whether a child that is added to a module would run with the others."""
    names = ("children", "named_children", "_modules")
    return isinstance(module, CONTAINERS) or any(name in introspection.code_names(module) for name in names)


def _add_child(host: nn.Module, kind: str, cure: nn.Module, attachment: Any) -> str:
    """Add a cure to its host under a free name, and return the name."""
    if CHILD not in host._modules:
        host.add_module(CHILD, Cures())
    cures: Any = host._modules[CHILD]
    number = next(n for n in range(1, len(cures) + 2) if (kind if n == 1 else f"{kind}_{n}") not in cures)
    name = kind if number == 1 else f"{kind}_{number}"
    cures[name], cures.attachments[name] = cure, attachment
    return name
