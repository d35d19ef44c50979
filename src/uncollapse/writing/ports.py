"""Hooks that write into a model: at most one port a module, whose writers act in a fixed order.

Ports, frames and writers are plain objects that refer to modules of their model only, so that a copy or a pickle of the
model has its own. What they know of a forward pass comes from the arguments of the block that runs, because gradient
checkpointing runs a block again during the backward pass, after other batches may have passed.
"""

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from uncollapse.sites import (
    Context,
    Layout,
    ReadContext,
    Side,
    at,
    fitted,
    known_layout,
    laid_back,
    put,
    sets_of,
    tokens_among,
    where,
)

PORT = "_uncollapse_port"  # the attribute under which a module keeps its port
NO_SCRIPT = (
    "A model with a cure cannot become TorchScript, nor be traced for anything else such as ONNX without dynamo. Use "
    "torch.export.export, which keeps the cure, or take it out with uncollapse.detach(model)."
)
_THREADS = (
    "Two threads run {} at the same time, and the cure in it would take the padding of one for that of the other. Give "
    "each thread a copy of the model."
)
JIT: Any = torch.jit  # it has no types
OUTSIDE, RECEIVE, STREAM, PLAIN = range(4)  # the order of writers at one side of a module

Given = tuple[tuple[Any, ...], dict[str, Any]]


class Frame:
    """A block while it runs, or the module around all blocks: what goes with the tokens of this call.

    Args:
        key: which frame of its module it is.
        name: what errors call it.
        read: arguments of the block -> Context.
    """

    def __init__(self, key: str, name: str, read: ReadContext) -> None:
        self.key, self.name, self.read = key, name or "the model", read
        self.owners: list[Frame] = []  # of the modules around it that have to do with it
        self.asks = False  # one of them, for what its own arguments leave open
        self.thread = 0
        self.counted = 0  # writers that count calls, from each start of the owner on
        self.followed = False  # something right behind the block asks for its context
        self.users = 0
        self.inner: list[Frame] = []
        self.held: list[tuple[nn.Module, str, Any]] = []  # attributes that were set, with what they were before
        self.warned = False
        self.expects = False  # warns if none of the frames inside runs, which were named by the user
        self.running = self.reached = False  # reached: one of the frames inside ran
        self.context: Context | None = None
        self.carried: Tensor | None = None  # what was added to the residual stream where it runs past a norm
        self.values: Tensor | None = None
        self.calls = self.call = 0

    def open(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a call."""
        if self.running and not self._is_of_this_thread():
            raise RuntimeError(_THREADS.format(self.name))
        self.thread = _thread()
        for frame in self.inner:
            frame.calls, frame.context = 0, None
        for owner in self.owners:
            owner.reached = True
        context = self.read(args, kwargs)
        if self.inner and context.refuse:
            raise RuntimeError(f"The cure in {self.name} cannot act: {context.refuse}. `remove()` takes it out.")
        if self.asks:
            context = self._asked(context)
        if self.counted:  # a count that nobody resets would let compiled code be compiled again in every pass
            self.call, self.calls = self.calls, self.calls + 1
        self.context, self.carried, self.values, self.running = context, None, None, True

    def close(self, failed: bool) -> None:
        """End it; the context stays for what stands right behind the block."""
        if not self._is_of_this_thread():  # which was refused
            return
        if self.expects and not failed and not self.reached:
            self.expects = False
            warnings.warn(
                f"None of the modules with a cure ran in a pass of {self.name}, so that it did nothing: "
                f"{', '.join(frame.name for frame in self.inner)}. Some modules are never called themselves, as the "
                "out_proj of torch's attention. Name others.",
                stacklevel=2,
            )
        self.carried, self.values, self.running, self.reached = None, None, False, False
        if not self.followed:
            self.context = None

    def retire(self) -> None:
        """Nobody uses it any more: attributes are as they were, and no frame asks it or waits for it."""
        for module, attribute, before in self.held:
            setattr(module, attribute, before)
        for frame in self.inner:
            frame.owners.remove(self)
        for owner in self.owners:
            owner.inner.remove(self)
        self.held, self.inner, self.owners = [], [], []

    def told(self, inside: bool) -> Context:
        """The context of the call that runs now, or that has just ended."""
        if not self._is_of_this_thread():
            raise RuntimeError(_THREADS.format(self.name))
        if self.context is None and not inside:
            raise RuntimeError(
                f"{self.name} did not run in this pass, as with layers that are dropped in training: the cure behind "
                "it cannot know the padding of the batch. Switch that off, or remove the cure."
            )
        if self.context is None or (inside and not self.running):
            raise RuntimeError(
                f"A part of {self.name} runs outside of it, as when only parts of blocks are checkpointed: the cure in "
                "it cannot know the padding of the batch. Checkpoint whole blocks, or remove the cure."
            )
        if self.context.refuse:
            raise RuntimeError(f"The cure at {self.name} cannot act: {self.context.refuse}. `remove()` takes it out.")
        return self.context

    def _asked(self, context: Context) -> Context:
        running = [owner.context for owner in self.owners if owner.running and owner.context is not None]
        for told in running:
            context = context.filled(told)
        if running:
            return context
        known = context.mask is not None or context.batch is not None
        again = torch._C._current_graph_task_id() != -1  # that is a backward pass: the block is recomputed
        around = " or ".join(owner.name for owner in self.owners)
        if self.counted or (again and not known):
            raise RuntimeError(
                f"{self.name} runs outside of a forward pass of {around}, as under gradient checkpointing, and the "
                f"cure in it needs what {around} was called with. Switch checkpointing off, or remove the cure."
            )
        if not known and not self.warned:
            self.warned = True
            warnings.warn(
                f"{self.name} runs outside of a forward pass of {around}, such as by another method of it: the cure in "
                "it does not know the mask or the batch that was given there, and takes all tokens for real, all nodes "
                "for one graph.",
                stacklevel=2,
            )
        return context

    def _is_of_this_thread(self) -> bool:
        """What goes with the tokens is kept here while a block runs, for one thread at a time."""
        return self.thread in (0, _thread()) or _thread() == 0


def _thread() -> int:
    """The number of this thread; 0 in code that is being compiled, which cannot tell."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


class Writer:
    """A cure at one place.

    Args:
        cure: the module that changes tokens.
        frame: of the block.
        layout: how the tokens lie.
        takes: which of mask, causal, edge_index and batch the cure takes.
        inside: whether the place is within the block; else right behind it.
        calls: in which calls of the block, None for all.
        patches: leaves CLS and other prefix tokens as they are.
        causal: tokens see earlier ones only, also where the context does not say so.
    """

    def __init__(
        self,
        cure: nn.Module,
        frame: Frame,
        layout: Layout,
        takes: tuple[str, ...],
        *,
        inside: bool = True,
        calls: frozenset[int] | None = None,
        patches: bool = False,
        causal: bool = False,
    ) -> None:
        self.cure, self.frame, self.layout, self.takes = cure, frame, layout, takes
        self.inside, self.calls, self.patches, self.causal = inside, calls, patches, causal

    def __call__(self, x: Tensor) -> Tensor:
        """Tokens with the cure."""
        context = self.frame.told(self.inside)
        if self.calls is not None and self.frame.call not in self.calls:
            return x
        new = self.changed(x, context)
        if new.shape != x.shape:
            raise ValueError(f"The cure at {self.frame.name} made {tuple(new.shape)} of {tuple(x.shape)}.")
        return new

    def changed(self, x: Tensor, context: Context) -> Tensor:
        """The tokens, laid out for the cure and back."""
        if self.layout == "nodes":
            graph = {"edge_index": context.edge_index, "batch": context.batch}
            traced = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
            if traced and context.batch is not None and "batch" in self.takes:
                raise RuntimeError(
                    "A cure that tells the graphs of a batch apart is exported by torch.export.export(…, strict=True) "
                    "only: how many graphs there are is not known before it runs."
                )
            return self._cured(x, **graph)
        sets = sets_of(x, self.layout)
        mask = None if known_layout(self.layout, x) == "vectors" else fitted(context.mask, sets)
        skip = context.prefix if self.patches else 0
        new = self._cured(
            sets[:, skip:], mask=None if mask is None else mask[:, skip:], causal=self.causal or context.causal
        )
        return laid_back(new if skip == 0 else torch.cat([sets[:, :skip], new], 1), x, self.layout)

    def _cured(self, x: Tensor, **context: Any) -> Tensor:
        told = {name: value for name, value in context.items() if value is not None and value is not False}
        blind = [name for name in told if name in ("mask", "causal") and name not in self.takes]
        if blind:
            raise RuntimeError(
                f"{type(self.cure).__name__} at {self.frame.name} takes no {blind[0]}, and would read tokens that it "
                f"must not see: {'padding' if blind[0] == 'mask' else 'later ones'}. Give its forward that argument."
            )
        new: Tensor = self.cure(x, **{name: value for name, value in told.items() if name in self.takes})
        return new


class StreamWriter(Writer):
    """A cure on the residual stream in front of a module that only looks at it."""

    def __call__(self, x: Tensor) -> Tensor:
        """Tokens with the cure; the change goes into the stream as well."""
        new = super().__call__(x)
        carried = self.frame.carried
        self.frame.carried = new - x if carried is None else carried + (new - x)
        return new


class Receiver:
    """A later look of the block at the residual stream, or its end: what was changed before is added."""

    def __init__(self, frame: Frame) -> None:
        self.frame, self.users = frame, 0

    def __call__(self, x: Tensor) -> Tensor:
        """Tokens with the change."""
        return x if self.frame.carried is None else x + self.frame.carried


class Port:
    """The hooks of one module. `opens`: frames that a call of it is; `arguments`: what changes arguments as a whole."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.name = name or "the model"
        self.opens: list[Frame] = []
        self.arguments: list[Callable[[tuple[Any, ...], dict[str, Any]], Given]] = []
        self.sides: dict[Side, list[tuple[int, Callable[[Tensor], Tensor]]]] = {"input": [], "output": []}
        # In front of all others, so that whoever reads the model sees what flows on.
        self.hooks = [
            module.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True),
            module.register_forward_hook(self.leave, prepend=True, with_kwargs=True, always_call=True),
        ]

    def add(self, side: Side, rank: int, writer: Callable[[Tensor], Tensor]) -> None:
        """Put a writer behind those of its rank and those before it."""
        self.sides[side].append((rank, writer))
        self.sides[side].sort(key=lambda entry: entry[0])

    def drop(self, writers: set[int]) -> None:
        """Take out the writers with these ids."""
        for side, entries in self.sides.items():
            self.sides[side] = [entry for entry in entries if id(entry[1]) not in writers]
        self.arguments = [change for change in self.arguments if id(change) not in writers]

    def is_idle(self) -> bool:
        """Whether nobody needs the port any more; frames and receivers without users are dropped."""
        self.opens = [frame for frame in self.opens if frame.users]
        for side, entries in self.sides.items():
            self.sides[side] = [e for e in entries if not isinstance(e[1], Receiver) or e[1].users]
        return not any((self.opens, self.arguments, *self.sides.values()))

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """Before the module runs."""
        if getattr(module, "_is_replica", False):
            raise RuntimeError(
                "A model with a cure does not run under nn.DataParallel, whose threads share one cure. Use one process "
                "a device (torchrun, accelerate launch), or show one device only (CUDA_VISIBLE_DEVICES=0)."
            )
        if JIT.is_tracing():
            raise RuntimeError(NO_SCRIPT)  # a trace would keep the padding and the number of tokens of one batch
        for change in self.arguments:
            args, kwargs = change(args, kwargs)
        for frame in self.opens:
            frame.open(args, kwargs)
        written: Given = self._written("input", (args, kwargs))
        return written

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """After it ran, also if it failed, without an output then."""
        if output is not None:
            output = self._written("output", output)
        for frame in self.opens:
            frame.close(failed=output is None)
        return output

    def _written(self, side: Side, value: Any) -> Any:
        if not self.sides[side]:
            return value
        keys = where(tokens_among(value) if side == "input" else value, _is_tokens)
        if keys is None:
            raise RuntimeError(f"There are no tokens at the {side} of {self.name}, where a cure was attached.")
        x: Tensor = at(value, keys)
        for _, writer in self.sides[side]:
            x = writer(x)
        return put(value, keys, x)


def port_of(module: nn.Module, name: str) -> Port:
    """The port of a module, made if it has none."""
    if PORT not in module.__dict__:
        object.__setattr__(module, PORT, Port(module, name))
    port: Port = module.__dict__[PORT]
    return port


def close_idle(module: nn.Module) -> None:
    """Take a module's hooks away if nobody needs them."""
    port: Port | None = module.__dict__.get(PORT)
    if port is not None and port.is_idle():
        for hook in port.hooks:
            hook.remove()
        object.__delattr__(module, PORT)


def _is_tokens(x: Tensor) -> bool:
    return x.is_floating_point() and x.dim() >= 2
