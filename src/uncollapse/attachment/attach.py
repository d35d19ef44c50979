"""`uc.attach`: put a cure into a model that somebody else wrote, and take it out again."""

import itertools
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from uncollapse import backbones
from uncollapse.attachment.causality import find_causality
from uncollapse.attachment.install import Cures, Installed, install
from uncollapse.attachment.plan import (
    PlannedCure,
    Request,
    context_names,
    plan,
    select_blocks,
    select_cure_places,
)
from uncollapse.backbones import forward
from uncollapse.backbones.select import At, Layers, TokenChoice, check_tokens, final_places, select_layers
from uncollapse.backbones.sites import Layout, Stack
from uncollapse.io import display
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
    causal: bool | None = None,
    **options: Any,
) -> "Attachment":
    """Attach a cure to a model, without changing its code or its own weights.

    Everything is checked before the model changes. The cure's parameters become parameters of the model, so attach it
    before you create the optimizer or wrap the model in DDP. `remove()` of the returned attachment, or the end of a
    `with` block, restores the model bit for bit. Attach before or after `torch.compile`, which recompiles the model.
    `torch.export` includes the cure; TorchScript is not supported.

    Args:
        model: a HuggingFace, timm, PyG or torch model, or any module with `modules`; it may be wrapped in your own.
        cure: name of a cure, see `uncollapse list cures`.
        at: one or several places in each block, from `uc.places(model)`, or their numbers in ContraNorm's code for BERT
            and ALBERT. "norms" is the input of every norm, including the final one. If not given: the default place of
            the cure, which is "attention.residual" for ContraNorm; "conv.output" in graph networks; otherwise "block".
        layers: blocks, counted from 0, or from the end if negative: a number, a list, a slice, "first", "last",
            "first 4", "last 4" or "4:8"; all if not given. If blocks share their weights, as in ALBERT, these are
            passes.
        part: the part to mend in a model with several stacks of blocks, such as "vision_model".
        modules: names or patterns of the modules to treat as blocks in an unknown model ("blocks.*"). If not given, the
            outermost series of blocks is used, with a warning that says which one.
        layout: layout of the tensors of `modules`, see `diagnose`.
        tokens: "patches" excludes CLS, distillation and register tokens of images, which stay unchanged; "all" treats
            them as patches, as published code does. Cures of attention and edges act on all tokens.
        padding: "counted" treats padding as real tokens, as published code does: the result for a text then depends on
            the other texts of its batch. Use it only to compare with such results.
        causal: whether a token sees only earlier ones. If not given and not known, a trial with copies of the model
            decides, on a few tokens here or on the input of the first call. Pass it to skip the trial, and before
            `torch.compile`.
        options: arguments of the cure, such as scale=0.1, and preset="bert" for a published variant of ContraNorm.
            `dim` is needed only if the number of features cannot be read from the modules.

    Returns:
        The attachment: `remove()` removes the cure, and `cures` has its modules.

    >>> import torch, uncollapse as uc
    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 4)
    >>> handle = uc.attach(model, "contra_norm", scale=0.1, at="attention.residual", layers="last 2")
    >>> print(handle)
    contra_norm (scale=0.1) at attention.residual in blocks 2–3 of TransformerEncoder
    >>> handle.remove()
    """
    _check_arguments(model, tokens, padding)
    model = forward.unwrap_compiled(model)
    entry = _find_cure(cure)
    modules = [modules] if isinstance(modules, str) else modules
    stack = backbones.find(model, modules=modules, part=part, layout=layout)
    places = select_cure_places(stack, entry, at)
    _check_useful(stack, entry, layers, padding)
    blocks = select_layers(stack, layers, ends=False).blocks
    arguments: dict[str, Any] = {"part": part, "modules": None if modules is None else list(modules), "layout": layout}
    arguments |= {"tokens": tokens, "padding": padding, "causal": causal}
    causality = find_causality(model, stack, entry.mixes and entry.acts_on != "edges", causal)
    request = Request(stack, entry, places, blocks, dict(options), arguments, causality)
    request = replace(request, blocks=select_blocks(model, request))
    planned = plan(model, request)
    if stack.remark:
        warnings.warn(stack.remark, stacklevel=2)
    _check_not_wrapped(model, planned)
    _warn_without_batch(stack, planned)
    _warn_if_present(model, entry.name, planned)
    return Attachment(model, request, planned)


class Attachment:
    """A cure in a model. Leaving `with`, or `remove()`, takes it out.

    cure: its name. at: places. blocks: numbers of the blocks. options: arguments of the cure. arguments: the other
    arguments of `attach`.
    """

    def __init__(self, model: nn.Module, request: Request, planned: list[PlannedCure]) -> None:
        self.cure, self.at, self.blocks = request.cure.name, request.at, request.blocks
        self.options, self.arguments = dict(request.options), dict(request.arguments)
        stack = request.stack
        self.architecture, self.family, self.count = stack.architecture, stack.family, len(stack.blocks)
        self.number, self.root = next(_numbers), weakref.ref(model)
        self._planned = planned
        self._installed: list[Installed] = []
        try:
            for one in planned:
                self._installed.append(install(model, one, self))
        except BaseException:  # never leave a half-changed model
            self._undo()
            raise
        forward.reset_compiled()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "root": None}  # a copy or a pickle does not refer to the original

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the cure, such as for an optimizer that was created before it."""
        return [parameter for one in self._planned for parameter in one.cure.parameters()]

    @property
    def cures(self) -> dict[str, nn.Module]:
        """The modules of the cure, by block and place."""
        return {one.key: one.cure for one in self._planned}

    def remove(self) -> None:
        """Take the cure out and restore the model. A second call does nothing."""
        if self._installed:
            self._undo()
            forward.reset_compiled()

    def _undo(self) -> None:
        for installed in reversed(self._installed):
            installed.undo()
        self._installed.clear()

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        where = f" in {_describe_blocks(self.blocks, self.count)}" if self.blocks else ""
        return f"{self.cure}{f' ({options})' if options else ''} at {', '.join(self.at)}{where} of {self.architecture}"

    def __repr__(self) -> str:
        return f"<Attachment: {self}>"

    def _repr_html_(self) -> str:
        rows = [
            [key, repr(module), str(sum(p.numel() for p in module.parameters()))] for key, module in self.cures.items()
        ]
        return display.html_table(["block and place", "cure", "parameters"], rows, str(self))


def attachments(model: nn.Module) -> tuple[Attachment, ...]:
    """Return all attachments in a model or a part of it, in the order in which they were made."""
    found = (a for module in model.modules() if isinstance(module, Cures) for a in module.attachments.values())
    return tuple(sorted({a.number: a for a in found}.values(), key=lambda a: a.number))


def detach(model: nn.Module) -> None:
    """Remove all cures from a model, or from a copy of the model that they were attached to."""
    for attachment in reversed(attachments(model)):
        attachment.remove()


def places(
    model: nn.Module,
    *,
    part: str | None = None,
    modules: str | Sequence[str] | None = None,
    layout: Layout | None = None,
) -> "Places":
    """Return the places of a model at which `attach` can put a cure, as a tuple of names that a notebook shows.

    >>> import torch, uncollapse as uc
    >>> uc.places(torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2))
    ('block', 'attention.input', 'attention.output', 'attention.residual', 'attention.norm', 'mlp.output', ...)
    """
    stack = backbones.find(forward.unwrap_compiled(model), modules=modules, part=part, layout=layout)
    return Places(stack)


class Places(tuple[str, ...]):
    """The names of the places of a model; in a notebook, with the modules of the first block that they are at."""

    def __new__(cls, stack: Stack) -> "Places":
        """Return the places of a stack of blocks."""
        found = super().__new__(cls, (*stack.places(), *final_places(stack)))
        found._stack = stack
        return found

    _stack: Stack

    def __reduce__(self) -> tuple[type, tuple[tuple[str, ...]]]:
        return tuple, (tuple(self),)  # a stack is not pickled with its names

    def _repr_html_(self) -> str:
        block, count = self._stack.blocks[0], len(self._stack.blocks)
        numbers = {place: str(number) for number, place in self._stack.numbers.items()}
        sites = [block.places.get(place) for place in self]
        where = ["" if site is None else f"{site.side} of {site.path or 'the model'}" for site in sites]
        rows = [[place, at, numbers.get(place, "")] for place, at in zip(self, where, strict=True)]
        head = ["place", f"in {block.name}", "ContraNorm paper"]
        return display.html_table(head, rows, f"{self._stack.architecture}, {count} blocks")


def _describe_blocks(blocks: tuple[int, ...], count: int) -> str:
    if len(blocks) == count:
        return f"all {count} blocks" if count > 1 else "the block"
    first, last = blocks[0], blocks[-1]
    if len(blocks) == 1:
        return f"block {first}"
    is_run = last - first + 1 == len(blocks)
    return f"blocks {first}–{last}" if is_run else f"blocks {', '.join(map(str, blocks))}"


def _find_cure(cure: str) -> Cure:
    if not isinstance(cure, str):
        raise ValueError(
            f"cure must be the name of a registered cure, got {type(cure).__name__}. There are: {', '.join(CURES)}. "
            "Register your own with `uncollapse.registry.cure`."
        )
    return CURES[cure]


def _check_arguments(model: Any, tokens: str, padding: str) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    check_tokens(tokens)
    if padding not in ("masked", "counted"):
        raise ValueError(f'padding must be "masked" or "counted", got {padding!r}.')
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            "A cure cannot be attached to a TorchScript module. Attach it before you script or trace the model."
        )


def _check_useful(stack: Stack, cure: Cure, layers: Layers | None, padding: str) -> None:
    """Raise if an argument would have no effect."""
    if padding == "counted" and (cure.acts_on != "tokens" or not cure.mixes or stack.layout == "nodes"):
        raise ValueError(f"{cure.name} in {stack.architecture} handles no padded sequences; leave out padding.")
    if cure.acts_on == "edges" and layers is not None:
        raise ValueError(f"{cure.name} changes the edges of all layers at once; leave out layers.")


def _check_not_wrapped(model: nn.Module, planned: list[PlannedCure]) -> None:
    """Raise if the model is wrapped: what synchronizes gradients only knows the parameters that it started with."""
    wrappers = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
    kinds = forward.class_names(model)
    found = next((name for name in wrappers if name in kinds), None)
    if found is not None and any(True for one in planned for _ in one.cure.parameters()):
        raise ValueError(f"A cure with parameters must be attached before the model is wrapped in {found}.")


def _warn_without_batch(stack: Stack, planned: list[PlannedCure]) -> None:
    """Warn if a cure would separate graphs, and the model does not know which node belongs to which."""
    on_tokens = [context_names(one.cure) for one in planned if one.request.cure.acts_on == "tokens"]
    if stack.lacks_batch and any("batch" in names for names in on_tokens):
        warnings.warn(
            f"{stack.architecture} takes no batch: the cure treats all nodes of a call as one graph. For batches of "
            "graphs, let its forward pass take `batch`, or a Data object.",
            stacklevel=3,
        )


def _warn_if_present(model: nn.Module, cure: str, planned: list[PlannedCure]) -> None:
    """Warn if the same cure is there already, as when a notebook cell runs twice."""
    spots = {(id(model.get_submodule(one.site.path)), one.site.side) for one in planned}
    for old in attachments(model):
        if old.cure == cure and spots & {(id(installed.module), installed.side) for installed in old._installed}:
            warnings.warn(f"The model already has this cure there: {old}. Both are active.", stacklevel=3)
            return
