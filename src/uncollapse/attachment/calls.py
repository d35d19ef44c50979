"""A block while it runs, and what goes with its tokens."""

import threading
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from uncollapse.backbones.sites import Context, ReadContext

_THREADS = (
    "Two threads run {} at the same time, and the cure in it would take the padding of one for that of the other. Give "
    "each thread a copy of the model."
)


class CallState:
    """A block while it runs, or the module around all blocks: what goes with the tokens of this call.

    Args:
        key: which frame of its module it is.
        name: what errors call it.
        read: arguments of the block -> Context.
    """

    def __init__(self, key: str, name: str, read: ReadContext) -> None:
        self.key, self.name, self.read = key, name or "the model", read
        self.owners: list[CallState] = []  # of the modules around it that have to do with it
        self.asks = False  # one of them, for what its own arguments leave open; who counts its calls asks as well
        self.thread = 0
        self.counted = 0  # writers that count calls, from each start of the owner on
        self.followed = False  # something right behind the block asks for its context
        self.users = 0
        self.inner: list[CallState] = []
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
        if self.asks or self.counted:
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
            context = context.fill_from(told)
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
