"""The state of a block while it runs: what belongs to the tokens of one call, such as the padding mask."""

import threading
import warnings
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from uncollapse.backbones.nested import get_nested
from uncollapse.backbones.sites import Context, ReadContext, find_tokens, without_masks

_THREADS = (
    "Two threads run {} at the same time, and its cure would mistake the padding of one for that of the other. Give "
    "each thread its own copy of the model."
)


class Override:
    """An attribute of a module that has another value while cures need it.

    users: how many cures do, where they share it.
    """

    def __init__(self, module: nn.Module, attribute: str, value: Any) -> None:
        self.module, self.attribute, self.before, self.users = module, attribute, getattr(module, attribute), 0
        setattr(module, attribute, value)

    def restore(self) -> None:
        """Set the attribute to what it was."""
        setattr(self.module, self.attribute, self.before)


class CallState:
    """What is known of one call of a block, or of a module around all blocks (its owner).

    Args:
        key: which state of its module this is.
        name: the name of the module in errors.
        read: arguments of the module -> Context.
    """

    def __init__(self, key: str, name: str, read: ReadContext) -> None:
        self.key, self.name, self.read = key, name or "the model", read
        self.owners: list[CallState] = []  # of the modules around this one that matter to it
        self.needs_owner = False  # an owner knows what the arguments of the block do not say
        self.thread = 0
        self.counters = 0  # writers that count calls, starting at each call of an owner; they need the owner too
        self.followed = False  # something directly after the block reads its context
        self.finds_pass = False  # a cure in this block needs a tensor of an earlier block
        self.users = 0
        self.inner: list[CallState] = []
        self.overrides: list[Override] = []  # for as long as this state is used
        self.twice: Override | None = None  # what lets the attention of a block apply its map twice
        self.warned = False
        self.warns_if_unreached = False  # warns if no inner state runs: the user named those modules
        self.running = self.reached = False  # reached: an inner state ran
        self.context: Context | None = None
        self.carried: Tensor | None = None  # the change of the residual stream where it bypasses a norm
        self.held: dict[str, Tensor] = {}  # tensors that a cure needs further on in the block
        self.earlier: list[EarlierTensor] = []  # for later blocks; an owner has them
        self.with_gradients = False  # whether an owner was called with gradients
        self.address: int | None = None  # of the block's input, by which its pass is known again
        self.next_call = self.call = 0

    def open(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a call."""
        if self.running and not self._is_of_this_thread():
            raise RuntimeError(_THREADS.format(self.name))
        self.thread = _thread()
        for state in self.inner:
            state.next_call, state.context = 0, None
        for owner in self.owners:
            owner.reached = True
        context = self.read(args, kwargs)
        if self.inner and context.refuse:
            raise RuntimeError(f"The cure in {self.name} cannot act: {context.refuse}. `remove()` takes it out.")
        if self.needs_owner or self.counters:
            context = self._ask_owners(context)
        if self.counters:  # otherwise nobody resets the count, and compiled code would recompile in every pass
            self.call, self.next_call = self.next_call, self.next_call + 1
        self.context, self.carried, self.held, self.running = context, None, {}, True
        for tensor in self.earlier:
            tensor.forget()
            self.with_gradients = torch.is_grad_enabled()
        if self.finds_pass and not torch.compiler.is_compiling():
            keys = find_tokens(given := without_masks((args, kwargs)))
            self.address = None if keys is None else get_nested(given, keys).data_ptr()

    def close(self, failed: bool) -> None:
        """End the call. The context stays if something directly after the block reads it."""
        if not self._is_of_this_thread():  # its call was rejected
            return
        if self.warns_if_unreached and not failed and not self.reached:
            self.warns_if_unreached = False
            warnings.warn(
                f"None of the modules with a cure ran in a pass of {self.name}, so the cure did nothing: "
                f"{', '.join(state.name for state in self.inner)}. Some modules are never called themselves, such as "
                "the out_proj of torch's attention. Name others.",
                stacklevel=2,
            )
        self.carried, self.held, self.running, self.reached = None, {}, False, False
        for tensor in self.earlier:
            tensor.forget()
        if not self.followed:
            self.context = None

    def retire(self) -> None:
        """Restore overridden attributes and cut all links, when nobody uses this state any more."""
        for override in self.overrides:
            override.restore()
        for state in self.inner:
            state.owners.remove(self)
        for owner in self.owners:
            owner.inner.remove(self)
        self.overrides, self.inner, self.owners, self.earlier = [], [], [], []

    def current_context(self, inside: bool) -> Context:
        """Return the context of the call that is running, or (not `inside`) that has just ended."""
        if not self._is_of_this_thread():
            raise RuntimeError(_THREADS.format(self.name))
        if self.context is None and not inside:
            raise RuntimeError(
                f"{self.name} did not run in this pass, as when layers are dropped in training: the cure after it does "
                "not know the padding of the batch. Switch layer dropping off, or remove the cure."
            )
        if self.context is None or (inside and not self.running):
            raise RuntimeError(
                f"A part of {self.name} runs outside of it, as when only parts of blocks are checkpointed: its cure "
                "does not know the padding of the batch. Checkpoint whole blocks, or remove the cure."
            )
        if self.context.refuse:
            raise RuntimeError(f"The cure at {self.name} cannot act: {self.context.refuse}. `remove()` takes it out.")
        return self.context

    def _ask_owners(self, context: Context) -> Context:
        running = [owner.context for owner in self.owners if owner.running and owner.context is not None]
        for known in running:
            context = context.fill_from(known)
        if running:
            return context
        is_known = context.mask is not None or context.batch is not None
        around = " or ".join(owner.name for owner in self.owners)
        if self.counters or (is_recomputing() and not is_known):
            raise RuntimeError(
                f"{self.name} runs outside of a forward pass of {around}, as under gradient checkpointing, and its "
                f"cure needs the arguments of {around}. Switch checkpointing off, or remove the cure."
            )
        if not is_known and not self.warned:
            self.warned = True
            warnings.warn(
                f"{self.name} runs outside of a forward pass of {around}, such as by another method: its cure does not "
                "know the mask or the batch that was passed there, and treats all tokens as real, all nodes as one "
                "graph.",
                stacklevel=2,
            )
        return context

    def _is_of_this_thread(self) -> bool:
        """Return whether this thread may use the state: it holds one call at a time."""
        return self.thread in (0, _thread()) or _thread() == 0


class EarlierTensor:
    """What a block has at a place, for later blocks of the same forward pass.

    When gradient checkpointing recomputes a later block, other batches may have passed: the tensor of its own pass is
    found by the address of the block's input, which the checkpoint keeps. It lives as long as the graph of its pass.

    Args:
        owner: of the blocks; its calls begin and end a pass.
        state: of the block, if its modules run several times in a pass; the first of these calls counts.
    """

    def __init__(self, owner: CallState, state: CallState | None) -> None:
        self.owner, self.state, self.users = owner, state, 0
        self.tensor: Tensor | None = None
        self.saved: _Saved | None = None
        self.passes: WeakValueDictionary[int, _Saved] = WeakValueDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "tensor": None,
            "saved": None,
            "passes": None,
        }  # a copy of the model has its own passes

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "passes": WeakValueDictionary()})

    def __call__(self, x: Tensor) -> Tensor:
        """Save the tensor, at its place, and return it."""
        if not is_recomputing() and (self.state is None or self.state.call == 0):
            self.tensor = x.clone()  # the model may change x in place
            self.saved = None if torch.compiler.is_compiling() else _Saved(self.tensor)
        return x

    def forget(self) -> None:
        """Drop the tensor; the graph of its pass may still hold it."""
        self.tensor, self.saved = None, None

    def read(self, state: CallState) -> Tensor:
        """Return the tensor that belongs to the running call of a later block."""
        if is_recomputing():
            saved = None if state.address is None else self.passes.get(state.address)
            if saved is None:
                raise RuntimeError(
                    f"The cure in {state.name} needs a tensor of an earlier block, which is not known when gradient "
                    "checkpointing recomputes this block. Switch checkpointing off, or remove the cure."
                )
            return saved.tensor
        if self.owner.running and self.owner.with_gradients and not torch.is_grad_enabled():
            raise RuntimeError(
                f"{state.name} runs without gradients in a pass with them, as under reentrant checkpointing, where the "
                "gradient of an earlier block's tensor would be lost. Checkpoint with use_reentrant=False."
            )
        if self.tensor is None:
            raise RuntimeError(
                f"The cure in {state.name} needs a tensor of an earlier block, which did not run in this pass, as when "
                "layers are dropped in training. Switch layer dropping off, or remove the cure."
            )
        return self.tensor

    def hold(self, state: CallState, x: Tensor) -> None:
        """Let the graph of x, which the tensor has entered, hold it for a recomputation of this block."""
        saved, address = self.saved, state.address
        if saved is not None and address is not None and x.requires_grad and not is_recomputing():
            self.passes[address] = saved
            x.register_hook(saved.pass_on)  # type: ignore[no-untyped-call]


class _Saved:
    """A tensor without its graph, which would otherwise hold itself."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach().requires_grad_(tensor.requires_grad)

    def pass_on(self, gradient: Tensor) -> None:
        """Leave a gradient as it is: a hook of a graph, which holds this object for as long as the graph lives."""


def is_recomputing() -> bool:
    """Return whether a backward pass is running, in which gradient checkpointing runs blocks again."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _thread() -> int:
    """Return the number of this thread; 0 in code that is being compiled, which has none."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()
