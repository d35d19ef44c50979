"""Hooks that write into a model: at most one `ModuleHooks` per module, whose writers act in a fixed order.

Hooks, call states and writers are plain objects that refer only to modules of their own model, so a copy or a pickle
of the model gets its own. What they know of a forward pass comes from the arguments of the running block, because
gradient checkpointing runs a block again during the backward pass, after other batches may have passed.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from uncollapse.attachment.calls import CallState, EarlierTensor
from uncollapse.attachment.causality import Causality
from uncollapse.attachment.writers import Receiver
from uncollapse.backbones.nested import describe, get_nested, set_nested
from uncollapse.backbones.read_hooks import check_one_kind
from uncollapse.backbones.sites import HOOKS, Side, find_tokens, is_tokens, without_masks

CHECKPOINT = "_gradient_checkpointing_func"  # the attribute of transformers' blocks
NO_SCRIPT = (
    "A model with a cure cannot become TorchScript or be traced, as for ONNX without dynamo. Use torch.export.export, "
    "which keeps the cure, or take the cure out with uncollapse.detach(model)."
)
JIT: Any = torch.jit  # it has no types
OUTSIDE, RECEIVE, STREAM, PLAIN, READ = range(5)  # the order of writers at one side of a module

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Write = Callable[[Tensor], Tensor]


class Recomputation:
    """Opens the call states of a block again when gradient checkpointing recomputes it.

    transformers (from 5.20 on) checkpoints `forward` of a block: its hooks run once, outside the checkpoint, and the
    backward pass recomputes only what is inside. This replaces the block's checkpointing function during one call.
    What the block carries past its norms is added inside too: a tensor that leaves a reentrant checkpoint by another
    way than its output has no gradient.
    """

    def __init__(self, checkpoint: Callable[..., Any], hooks: "ModuleHooks", kwargs: dict[str, Any]) -> None:
        self.checkpoint, self.hooks, self.states, self.kwargs = checkpoint, hooks, list(hooks.states), kwargs

    def __call__(self, forward: Callable[..., Any], *args: Any) -> Any:
        """Checkpoint the block's forward pass."""

        def run(*args: Any) -> Any:
            if torch._C._current_graph_task_id() == -1:  # the first run, inside the module's own call
                return self.hooks.receive(forward(*args))
            output = None
            try:
                for state in self.states:
                    state.open(args, self.kwargs)
                output = self.hooks.receive(forward(*args))
                return output
            finally:
                for state in self.states:
                    state.close(failed=output is None)

        return self.checkpoint(run, *args)


class ModuleHooks:
    """The hooks of one module.

    states: call states that a call of the module opens. probes: what its first call may find out. arguments: functions
    that change its arguments as a whole. sides: writers at its input and at its output, with their rank.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.name = name or "the model"
        self.warned = False  # that it is not certain on which tensor a cure must act
        self.states: list[CallState] = []
        self.probes: list[Causality] = []
        self.checkpoint: Callable[..., Any] | None = None  # the module's own, while it is replaced
        self.arguments: list[Callable[[tuple[Any, ...], dict[str, Any]], Arguments]] = []
        self.sides: dict[Side, list[tuple[int, Write]]] = {"input": [], "output": []}
        # Before all other hooks, so that whoever reads the model sees what flows on.
        self.handles = [
            module.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True),
            module.register_forward_hook(self.leave, prepend=True, with_kwargs=True, always_call=True),
        ]

    def add(self, side: Side, rank: int, writer: Write) -> None:
        """Add a writer after those of its rank and of lower ranks."""
        self.sides[side].append((rank, writer))
        self.sides[side].sort(key=lambda entry: entry[0])

    def drop(self, writers: set[int]) -> None:
        """Remove the writers with these ids."""
        for side, entries in self.sides.items():
            self.sides[side] = [entry for entry in entries if id(entry[1]) not in writers]
        self.arguments = [change for change in self.arguments if id(change) not in writers]
        self.probes = [probe for probe in self.probes if id(probe) not in writers]

    def is_idle(self) -> bool:
        """Drop states and receivers without users, and return whether nothing is left."""
        self.states = [state for state in self.states if state.users]
        for side, entries in self.sides.items():
            self.sides[side] = [e for e in entries if not isinstance(e[1], Receiver | EarlierTensor) or e[1].users]
        return not any((self.states, self.arguments, self.probes, *self.sides.values()))

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Run before the module."""
        if getattr(module, "_is_replica", False):
            raise RuntimeError(
                "A model with a cure does not run under nn.DataParallel, whose threads share one cure. Use one process "
                "per device (torchrun, accelerate launch), or make one device visible (CUDA_VISIBLE_DEVICES=0)."
            )
        if JIT.is_tracing():
            raise RuntimeError(NO_SCRIPT)  # a trace would fix the padding and the number of tokens of one batch
        for change in self.arguments:
            args, kwargs = change(args, kwargs)
        for probe in self.probes:
            probe.probe(module, args, kwargs)
        for state in self.states:
            state.open(args, kwargs)
        if self.states and getattr(module, "gradient_checkpointing", False) and CHECKPOINT in module.__dict__:
            self.checkpoint = module.__dict__[CHECKPOINT]
            setattr(module, CHECKPOINT, Recomputation(self.checkpoint, self, kwargs))
        new: Arguments = self._write("input", (args, kwargs))
        return new

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Run after the module, also if it failed: then there is no output."""
        if self.checkpoint is not None:
            setattr(module, CHECKPOINT, self.checkpoint)
            self.checkpoint = None
        if output is not None:
            output = self._write("output", output)
        for state in self.states:
            state.close(failed=output is None)
        return output

    def receive(self, output: Any) -> Any:
        """Add what the states carry to an output, once."""
        receivers = [writer for _, writer in self.sides["output"] if isinstance(writer, Receiver)]
        output = self._write("output", output, receivers)
        for state in self.states:
            state.carried = None
        return output

    def _write(self, side: Side, value: Any, writers: Sequence[Write] | None = None) -> Any:
        writers = [writer for _, writer in self.sides[side]] if writers is None else writers
        if not writers:
            return value
        if side == "output":
            check_one_kind(self.name, value)
        keys = find_tokens(without_masks(value) if side == "input" else value)
        if keys is None:
            raise RuntimeError(
                f"There are no tokens at the {side} of {self.name}, where a cure was attached: it is "
                f"{describe(value if side == 'output' else value[0])}. Attach it to a module with tensors there."
            )
        x: Tensor = get_nested(value, keys)
        if side == "output" and not self.warned and _has_rivals(value, x):
            self.warned = True
            warnings.warn(
                f"{self.name} returns {describe(value)}. The cure acts on the first tensor; if the model continues "
                "with another one, attach it to a module inside.",
                stacklevel=2,
            )
        for writer in writers:
            x = writer(x)
        return set_nested(value, keys, x)


def _has_rivals(value: Any, x: Tensor) -> bool:
    """Return whether a tuple holds a second image of other size than x: it is not certain which one is passed on."""
    if not isinstance(value, tuple) or x.dim() != 4 or torch.compiler.is_compiling():
        return False
    others = [part for part in value if isinstance(part, Tensor) and part is not x and is_tokens(part)]
    return any(part.dim() == 4 and part.shape[0] == x.shape[0] and part.shape[1:] != x.shape[1:] for part in others)


def hooks_of(module: nn.Module, name: str) -> ModuleHooks:
    """Return the hooks of a module, created if it has none."""
    if HOOKS not in module.__dict__:
        object.__setattr__(module, HOOKS, ModuleHooks(module, name))
    hooks: ModuleHooks = module.__dict__[HOOKS]
    return hooks


def remove_if_idle(module: nn.Module) -> None:
    """Remove a module's hooks if nobody needs them."""
    hooks: ModuleHooks | None = module.__dict__.get(HOOKS)
    if hooks is not None and hooks.is_idle():
        for handle in hooks.handles:
            handle.remove()
        object.__delattr__(module, HOOKS)
