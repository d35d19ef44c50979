"""Tokens of inner layers with their gradients, for losses on them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from uncollapse import backbones
from uncollapse.backbones import forward
from uncollapse.backbones.read_hooks import Watch
from uncollapse.backbones.sites import OUTPUT, Context, Layout, Site, Stack, fitted, known_layout, sets_of
from uncollapse.errors import did_you_mean

LayerName = str | int


def tokens(
    model: nn.Module,
    layers: LayerName | Sequence[LayerName] = ("first", "last"),
    *,
    at: str = OUTPUT,
    part: str | None = None,
    modules: Sequence[str] | None = None,
    layout: Layout | None = None,
) -> "Tokens":
    """Hold the tokens of some layers while the model runs, so that a loss can be put on them.

    Each forward pass inside `with` replaces what the one before left; what gradient checkpointing computes again during
    a backward pass does not, nor does a diagnosis or a `Monitor`. Nothing is copied or detached. On leaving, hooks and
    tensors are gone. Tokens are those that flow on: with a cure attached at the same place, the cured ones.

    Open it once around the training loop if the model is compiled: on entering and leaving, `torch.compiler.reset()`
    lets compiled code be compiled again, because it does not notice changed hooks.

    Args:
        model: a HuggingFace, timm, PyG or torch model, or any module with `modules`; it may be wrapped in your own.
        layers: "embed" is what enters block 0, "first" and "last" are blocks, "final" is what leaves the last norm;
            numbers count blocks from 0, or from the end if negative. Where blocks share their weights, as in ALBERT,
            passes are counted.
        at: the place in each block, of `uc.places(model)`: "block" is the residual stream after it.
        part: the part to read in a model with several stacks of blocks, such as "vision_model".
        modules: names or patterns of the modules that are the blocks, for models that are not known ("blocks.*").
        layout: how tensors of named modules lie, see `diagnose`.

    Returns:
        What to open by `with`: `t["last"]` are the tokens of a layer, by the names given as `layers`.

    >>> import torch, uncollapse as uc
    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 4)
    >>> with uc.tokens(model, layers=("embed", "last")) as t:
    ...     out = model(torch.randn(8, 16, 32))
    ...     loss = out.square().mean() + 0.1 * uc.contra_uniform_loss(t["last"])
    >>> loss.backward()
    """
    inner = forward.uncompiled(model)
    stack = backbones.find(inner, part=part, layers=modules, layout=layout, by="modules")
    names = [layers] if isinstance(layers, str | int) else list(layers)
    if not names:
        raise ValueError(f"layers must name at least one layer. {_listed(stack)}")
    spots = {name: _spot(stack, name, at) for name in names}
    return Tokens(model, stack, spots)


class Spot(NamedTuple):
    """Where a layer is: a site, which call of it in a pass, and how many calls a pass has."""

    site: Site
    call: int
    calls: int


class Tokens:
    """The tokens of some layers in the last forward pass, inside `with`. `tokens` makes it.

    Layers are called as they were asked for. Iterating gives their names.
    """

    def __init__(self, model: nn.Module, stack: Stack, spots: dict[LayerName, Spot]) -> None:
        self._model, self._stack, self._spots = model, stack, spots
        self._held: dict[LayerName, tuple[Tensor, bool]] = {}  # with whether gradients were recorded there
        sites = (spot.site for spot in spots.values())
        self._watch = Watch(forward.uncompiled(model), stack, sites, self._see, self._begin, looks=False)
        self._is_open = self._wants_gradients = False

    def __enter__(self) -> "Tokens":
        if self._is_open:
            raise RuntimeError("These tokens are held already: `with` was entered a second time before it was left.")
        self._watch.__enter__()
        self._is_open = True
        if forward.is_compiled(self._model):
            forward.compile_again()
        return self

    def __exit__(self, *error: object) -> None:
        self._watch.__exit__(*error)
        self._is_open = False
        self._held.clear()
        self._watch.context = Context()  # masks and edges go too
        if forward.is_compiled(self._model):
            forward.compile_again()

    def __getitem__(self, layer: LayerName) -> Tensor:
        """Tokens (b, n, d) without CLS, distillation and register tokens; padding is among them, see `mask`.

        Nodes (N, d) of graph networks and vectors (b, d) of named layers come as they are.
        """
        x = self._raw(layer)
        return x if self._is_flat(x) else sets_of(x, self._stack.layout)[:, self._context().prefix :]

    def __iter__(self) -> Iterator[LayerName]:
        return iter(self._spots)

    def mask(self, layer: LayerName) -> Tensor | None:
        """Which of the tokens `t[layer]` are real (b, n), True = real; None if the model was given no mask."""
        x = self._raw(layer)
        if self._is_flat(x):
            return None
        mask = fitted(self._context().mask, sets_of(x, self._stack.layout))
        return None if mask is None else mask[:, self._context().prefix :]

    def real(self, layer: LayerName) -> Tensor:
        """The real tokens of all sequences (m, d), without prefix tokens and padding."""
        x, mask = self[layer], self.mask(layer)
        return x.flatten(0, -2) if mask is None else x[mask]

    def prefix(self, layer: LayerName) -> Tensor:
        """The prefix tokens (b, p, d): CLS, distillation, registers. p is 0 in models without them."""
        x = self._raw(layer)
        if self._is_flat(x):
            raise ValueError(f"Layer {layer!r} has nodes or vectors of shape {tuple(x.shape)}, and no prefix tokens.")
        return sets_of(x, self._stack.layout)[:, : self._context().prefix]

    @property
    def batch(self) -> Tensor | None:
        """The graph (N,) of each node; None if the model was not given it."""
        return self._context().batch

    @property
    def edge_index(self) -> Tensor | None:
        """The edges (2, E); None if the model was not given them."""
        return self._context().edge_index

    def _begin(self) -> None:
        self._held.clear()  # before the new pass fills the memory
        self._wants_gradients = torch.is_grad_enabled()

    def _see(self, site: Site, call: int, x: Tensor) -> None:
        if not self._is_open:  # a function that was compiled inside `with` still has the hooks
            return
        silent = not self._watch.inside  # no call of the owner tells where this pass began
        if silent:
            self._wants_gradients = False
        for name, spot in self._spots.items():
            number = call % spot.calls if silent else call
            again = number >= spot.calls and spot.call == spot.calls - 1 and name != "embed"  # the model runs it again
            if spot.site == site and (number == spot.call or again):
                self._held[name] = x, torch.is_grad_enabled()

    def _check_open(self) -> None:
        if not self._is_open:
            raise RuntimeError("Tokens are held only inside `with uc.tokens(…) as t:`; compute the loss there.")

    def _context(self) -> Context:
        self._check_open()
        return self._watch.context

    def _raw(self, layer: LayerName) -> Tensor:
        if layer not in self._spots:
            asked = ", ".join(map(repr, self._spots))
            raise ValueError(f"Layer {layer!r} was not asked for, only {asked}; add it to layers.")
        self._check_open()
        if layer not in self._held:
            raise RuntimeError(
                f"No forward pass of {self._stack.architecture} has reached layer {layer!r} since `with` was entered. "
                "Run the model inside it, in this thread; compile functions that run the model inside it as well."
            )
        x, recorded = self._held[layer]
        if self._wants_gradients and not recorded:
            raise RuntimeError(
                f"Layer {layer!r} ran without gradients inside a pass with gradients, as reentrant checkpointing does. "
                "Checkpoint with use_reentrant=False; in transformers "
                'gradient_checkpointing_enable({"use_reentrant": False}).'
            )
        return x

    def _is_flat(self, x: Tensor) -> bool:
        return known_layout(self._stack.layout, x) in ("nodes", "vectors")


def _spot(stack: Stack, layer: LayerName, at: str) -> Spot:
    if at not in stack.places():
        hint = did_you_mean(at, stack.places())
        raise ValueError(f"{stack.architecture} has no place {at!r}.{hint} There are: {', '.join(stack.places())}.")
    if layer == "final" and stack.final is not None:
        return Spot(stack.final, 0, 1)
    names = {block.name: number for number, block in enumerate(stack.blocks)}
    known = {**names, "embed": 0, "first": 0, "last": -1}
    number = known.get(layer) if isinstance(layer, str) else layer
    if number is None or not -len(names) <= number < len(names) or (layer == "embed" and stack.embed is None):
        hint = did_you_mean(layer, (*names, "first", "last", *_ends(stack))) if isinstance(layer, str) else ""
        raise ValueError(f"{stack.architecture} has no layer {layer!r}.{hint} {_listed(stack)}")
    block = stack.blocks[number]
    calls = sum(other.path == block.path for other in stack.blocks)
    return Spot(stack.embed if layer == "embed" and stack.embed else block.places[at], block.call, calls)


def _ends(stack: Stack) -> list[str]:
    return [name for name, site in (("embed", stack.embed), ("final", stack.final)) if site is not None]


def _listed(stack: Stack) -> str:
    count = len(stack.blocks)
    return (
        f'There are: "first", "last", {", ".join(map(repr, _ends(stack)))}, and numbers from {-count} to {count - 1}.'
    )
