"""Put a cure into a model that somebody else wrote, and take it out again."""

import itertools
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from uncollapse import backbones
from uncollapse.attachment.install import Cures, Installed, install
from uncollapse.attachment.plan import PlannedCure, context_names, places_for_cure, plan
from uncollapse.backbones import forward
from uncollapse.backbones.select import At, Layers, TokenChoice, check_tokens, final_places, select_layers
from uncollapse.backbones.sites import Layout, Stack
from uncollapse.registry import CURES, Cure

_numbers = itertools.count()  # of attachments, in the order in which they were made


def attach(
    model: nn.Module,
    cure: str,
    *,
    at: At | None = None,
    layers: Layers | None = None,
    part: str | None = None,
    modules: str | Sequence[str] | None = None,
    layout: Layout | None = None,
    tokens: TokenChoice = "patches",
    padding: Literal["masked", "counted"] = "masked",
    causal: bool = False,
    **options: Any,
) -> "Attachment":
    """Put a cure into a model; its code and its own weights do not change.

    Everything is checked before anything is done. The cure's parameters are parameters of the model from then on:
    attach before you make the optimizer or wrap the model in DDP. `remove()` of what is returned, or leaving `with`,
    restores the model to the bit. Attach before or after `torch.compile`: compiled code is compiled again.
    `torch.export` keeps the cure; TorchScript is refused.

    Args:
        model: a HuggingFace, timm, PyG or torch model, or any module with `modules`; it may be wrapped in your own.
        cure: its name, one of `uncollapse list cures`.
        at: the place or places in each block, of `uc.places(model)`, or numbers of the ContraNorm paper for BERT and
            ALBERT. "norms" is the input of every norm, the last one too. If it is not given: that of the cure,
            which is "attention.residual" for ContraNorm; "conv.output" in graph networks; else "block".
        layers: in which blocks, counted from 0 and negative from the end: a number, a list, a slice, "first", "last",
            "first 4", "last 4" or "4:8"; all if not given. Where blocks share their weights, as in ALBERT, passes are
            counted.
        part: the part to mend in a model with several stacks of blocks, such as "vision_model".
        modules: names or patterns of the modules that are the blocks, for models that are not known ("blocks.*").
        layout: how the tensors of `modules` are laid out, see `diagnose`.
        tokens: "patches" leaves CLS, distillation and register tokens of images as they are and out of all averages;
            "all" treats them as patches, as published code does. Cures of attention and edges act on all tokens.
        padding: "counted" takes padding for real tokens, as published code does: what a cure makes of a text then
            depends on the other texts of its batch. Only to compare with such results.
        causal: a token sees earlier ones only. Known decoders need not say so; your own, by `modules`, must.
        options: arguments of the cure, such as scale=0.1, and preset="bert" for a published variant of ContraNorm.
            `dim` is needed only where the number of features cannot be told from the modules.

    Returns:
        The attachment: `remove()` takes the cure out, `cures` are its modules.

    >>> import torch, uncollapse as uc
    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 4)
    >>> handle = uc.attach(model, "contra_norm", scale=0.1, at="attention.residual", layers="last 2")
    >>> print(handle)
    contra_norm (scale=0.1) at attention.residual in blocks 2–3 of TransformerEncoder
    >>> handle.remove()
    """
    _check(model, tokens, padding)
    model = forward.unwrap_compiled(model)
    entry = _entry(cure)
    modules = [modules] if isinstance(modules, str) else modules
    stack = backbones.find(model, modules=modules, part=part, layout=layout)
    names = places_for_cure(stack, entry, at)
    _check_choice(stack, entry, layers, padding)
    numbers = select_layers(stack, layers, ends=False).blocks
    points = plan(model, stack, entry, names, numbers, tokens, padding, causal, options)
    _check_wrapped(model, points)
    _warn_of_batches(stack, points)
    asked: dict[str, Any] = {"part": part, "modules": None if modules is None else list(modules), "layout": layout}
    asked |= {"tokens": tokens, "padding": padding, "causal": causal}
    _warn_if_there(model, entry.name, points)
    return Attachment(model, stack, entry.name, names, numbers, points, asked, dict(options))


class Attachment:
    """A cure in a model. Leaving `with`, or `remove()`, takes it out.

    cure: its name. at: places. blocks: numbers of the blocks. options: arguments of the cure.
    """

    def __init__(
        self,
        model: nn.Module,
        stack: Stack,
        cure: str,
        at: tuple[str, ...],
        blocks: tuple[int, ...],
        points: list[PlannedCure],
        asked: Mapping[str, Any],
        options: dict[str, Any],
    ) -> None:
        self.cure, self.at, self.blocks, self.options, self.asked = cure, at, blocks, options, dict(asked)
        self.architecture, self.family, self.count = stack.architecture, stack.family, len(stack.blocks)
        self.number, self.root = next(_numbers), weakref.ref(model)
        self._points = points
        self._wires: list[Installed] = []
        try:
            for point in points:
                self._wires.append(install(model, point, self))
        except BaseException:  # never a half-changed model
            self._leave()
            raise
        forward.reset_compiled()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "root": None}  # a copy or a pickle has no reference to the original's

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the cure, such as for an optimizer that was made before it."""
        return [parameter for point in self._points for parameter in point.cure.parameters()]

    @property
    def cures(self) -> dict[str, nn.Module]:
        """The modules by block and place."""
        return {point.key: point.cure for point in self._points}

    def remove(self) -> None:
        """Take the cure out; the model is as it was before. A second call does nothing."""
        if self._wires:
            self._leave()
            forward.reset_compiled()

    def _leave(self) -> None:
        for laid in reversed(self._wires):
            laid.undo()
        self._wires.clear()

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        where = f" in {_counted(self.blocks, self.count)}" if self.blocks else ""
        return f"{self.cure}{f' ({options})' if options else ''} at {', '.join(self.at)}{where} of {self.architecture}"

    def __repr__(self) -> str:
        return f"<Attachment: {self}>"


def attachments(model: nn.Module) -> tuple[Attachment, ...]:
    """All cures that are attached in a model or a part of it, in the order in which they were attached."""
    found = (a for module in model.modules() if isinstance(module, Cures) for a in module.parts_of.values())
    return tuple(sorted({a.number: a for a in found}.values(), key=lambda a: a.number))


def detach(model: nn.Module) -> None:
    """Take all cures out of a model, also out of a copy of the one that they were attached to."""
    for attachment in reversed(attachments(model)):
        attachment.remove()


def places(
    model: nn.Module,
    *,
    part: str | None = None,
    modules: str | Sequence[str] | None = None,
    layout: Layout | None = None,
) -> tuple[str, ...]:
    """Return the places of a model at which `attach` can put a cure.

    >>> import torch, uncollapse as uc
    >>> uc.places(torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2))
    ('block', 'attention.input', 'attention.output', 'attention.residual', 'attention.norm', 'mlp.output', ...)
    """
    stack = backbones.find(forward.unwrap_compiled(model), modules=modules, part=part, layout=layout)
    return (*stack.places(), *final_places(stack))


def _counted(blocks: tuple[int, ...], count: int) -> str:
    if len(blocks) == count:
        return f"all {count} blocks" if count > 1 else "the block"
    first, last = blocks[0], blocks[-1]
    if len(blocks) == 1:
        return f"block {first}"
    is_run = last - first + 1 == len(blocks)
    return f"blocks {first}–{last}" if is_run else f"blocks {', '.join(map(str, blocks))}"


def _entry(cure: str) -> Cure:
    if not isinstance(cure, str):
        raise ValueError(
            f"cure must be the name of a registered cure, got {type(cure).__name__}. There are: {', '.join(CURES)}. "
            "Register your own with `uncollapse.registry.cure`."
        )
    return CURES[cure]


def _check(model: Any, tokens: str, padding: str) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    check_tokens(tokens)
    if padding not in ("masked", "counted"):
        raise ValueError(f'padding must be "masked" or "counted", got {padding!r}.')
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError("Nothing can be attached to a TorchScript module. Attach before you script or trace it.")


def _warn_of_batches(stack: Stack, points: list[PlannedCure]) -> None:
    told = [context_names(point.cure) for point in points if point.kind.acts_on == "tokens"]
    if stack.lacks_batch and any("batch" in names for names in told):
        warnings.warn(
            f"{stack.architecture} takes no batch: all nodes of a call are one graph to the cure. For batches of "
            "graphs, let its forward pass take `batch`, or a Data object.",
            stacklevel=3,
        )


def _check_choice(stack: Stack, cure: Cure, layers: Layers | None, padding: str) -> None:
    """Raise if an argument would do nothing."""
    if padding == "counted" and (cure.acts_on != "tokens" or stack.layout == "nodes"):
        raise ValueError(f"{cure.name} in {stack.architecture} meets no padding of sequences. Leave out padding.")
    if cure.acts_on == "edges" and layers is not None:
        raise ValueError(f"{cure.name} changes the edges of all layers at once; leave out layers.")


def _warn_if_there(model: nn.Module, cure: str, points: list[PlannedCure]) -> None:
    """A cell of a notebook that runs again would put the same cure in a second time."""
    spots = {(id(model.get_submodule(point.site.path)), point.site.side) for point in points}
    for old in attachments(model):
        if old.cure == cure and spots & {(id(laid.module), laid.side) for laid in old._wires}:
            warnings.warn(f"The model has this cure there already: {old}. Both act now.", stacklevel=3)
            return


def _check_wrapped(model: nn.Module, points: list[PlannedCure]) -> None:
    """What synchronises gradients knows only the parameters that were there when it was made."""
    wrappers = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
    kinds = forward.class_names(model)
    found = next((name for name in wrappers if name in kinds), None)
    if found is not None and any(True for point in points for _ in point.cure.parameters()):
        raise ValueError(f"A cure with parameters must be attached before the model is wrapped in {found}.")
