"""Hooks that write into a model: at most one port a module, whose writers act in a fixed order.

Ports, frames and writers are plain objects that refer to modules of their model only, so that a copy or a pickle of the
model has its own. What they know of a forward pass comes from the arguments of the block that runs, because gradient
checkpointing runs a block again during the backward pass, after other batches may have passed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from uncollapse.attachment.calls import CallState
from uncollapse.attachment.writers import Receiver
from uncollapse.backbones.sites import Side, find_tensor, get_nested, is_tokens, set_nested, without_masks

CHECKPOINT = "_gradient_checkpointing_func"  # the attribute of transformers' blocks
PORT = "_uncollapse_port"  # the attribute under which a module keeps its port
NO_SCRIPT = (
    "A model with a cure cannot become TorchScript, nor be traced for anything else such as ONNX without dynamo. Use "
    "torch.export.export, which keeps the cure, or take it out with uncollapse.detach(model)."
)
JIT: Any = torch.jit  # it has no types
OUTSIDE, RECEIVE, STREAM, PLAIN = range(4)  # the order of writers at one side of a module

Given = tuple[tuple[Any, ...], dict[str, Any]]
Writers = list[tuple[int, Callable[[Tensor], Tensor]]]


class Recomputation:
    """Open the frames of a block again when gradient checkpointing recomputes it.

    transformers (from 5.20 on) checkpoints `forward` of a block: its hooks run once, outside the checkpoint, and the
    backward pass recomputes only what is inside. This replaces the block's checkpointing function during one call.
    What the block carries past its norms is added inside too: a tensor that leaves a reentrant checkpoint by another
    way than its output has no gradient.
    """

    def __init__(self, checkpoint: Callable[..., Any], port: "ModuleHooks", kwargs: dict[str, Any]) -> None:
        self.checkpoint, self.port, self.frames, self.kwargs = checkpoint, port, list(port.opens), kwargs

    def __call__(self, forward: Callable[..., Any], *args: Any) -> Any:
        """Checkpoint the block's forward pass."""

        def run(*args: Any) -> Any:
            if torch._C._current_graph_task_id() == -1:  # the first run, inside the module's own call
                return self.port.receive(forward(*args))
            output = None
            try:
                for frame in self.frames:
                    frame.open(args, self.kwargs)
                output = self.port.receive(forward(*args))
                return output
            finally:
                for frame in self.frames:
                    frame.close(failed=output is None)

        return self.checkpoint(run, *args)


class ModuleHooks:
    """The hooks of one module. `opens`: frames that a call of it is; `arguments`: what changes arguments as a whole."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.name = name or "the model"
        self.opens: list[CallState] = []
        self.checkpoint: Callable[..., Any] | None = None  # the module's own, while it is replaced
        self.arguments: list[Callable[[tuple[Any, ...], dict[str, Any]], Given]] = []
        self.sides: dict[Side, Writers] = {"input": [], "output": []}
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
        if self.opens and getattr(module, "gradient_checkpointing", False) and CHECKPOINT in module.__dict__:
            self.checkpoint = module.__dict__[CHECKPOINT]
            setattr(module, CHECKPOINT, Recomputation(self.checkpoint, self, kwargs))
        written: Given = self._written("input", (args, kwargs))
        return written

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """After it ran, also if it failed, without an output then."""
        if self.checkpoint is not None:
            setattr(module, CHECKPOINT, self.checkpoint)
            self.checkpoint = None
        if output is not None:
            output = self._written("output", output)
        for frame in self.opens:
            frame.close(failed=output is None)
        return output

    def receive(self, output: Any) -> Any:
        """Add what the frames carry to an output, once."""
        receivers = [(rank, writer) for rank, writer in self.sides["output"] if isinstance(writer, Receiver)]
        output = self._written("output", output, receivers)
        for frame in self.opens:
            frame.carried = None
        return output

    def _written(self, side: Side, value: Any, chosen: Writers | None = None) -> Any:
        writers = self.sides[side] if chosen is None else chosen
        if not writers:
            return value
        keys = find_tensor(without_masks(value) if side == "input" else value, is_tokens)
        if keys is None:
            raise RuntimeError(f"There are no tokens at the {side} of {self.name}, where a cure was attached.")
        x: Tensor = get_nested(value, keys)
        for _, writer in writers:
            x = writer(x)
        return set_nested(value, keys, x)


def hooks_of(module: nn.Module, name: str) -> ModuleHooks:
    """The port of a module, made if it has none."""
    if PORT not in module.__dict__:
        object.__setattr__(module, PORT, ModuleHooks(module, name))
    port: ModuleHooks = module.__dict__[PORT]
    return port


def remove_if_idle(module: nn.Module) -> None:
    """Take a module's hooks away if nobody needs them."""
    port: ModuleHooks | None = module.__dict__.get(PORT)
    if port is not None and port.is_idle():
        for hook in port.hooks:
            hook.remove()
        object.__delattr__(module, PORT)
