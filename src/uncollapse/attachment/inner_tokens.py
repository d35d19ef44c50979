"""`uc.tokens`: the tokens of inner layers with their gradients, for losses on them."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from uncollapse import backbones
from uncollapse.backbones import forward
from uncollapse.backbones.read_hooks import SiteReader
from uncollapse.backbones.select import (
    EMBED,
    FINAL,
    Layers,
    TokenChoice,
    check_tokens,
    select_layers,
    select_places,
)
from uncollapse.backbones.sites import OUTPUT, Context, Layout, Site, Stack, fit_mask, to_sets

LayerName = str | int
FLAT = ("nodes", "vectors")  # layouts of tensors that have no batch of sequences


def tokens(
    model: nn.Module,
    layers: Layers = ("first", "last"),
    *,
    at: str | int = OUTPUT,
    part: str | None = None,
    modules: str | Sequence[str] | None = None,
    layout: Layout | None = None,
    tokens: TokenChoice = "patches",
) -> "Tokens":
    """Return the tokens of some layers while the model runs, so that a loss can be computed on them.

    Each forward pass inside `with` replaces the tokens of the one before. Recomputation by gradient checkpointing, a
    diagnosis or a `Monitor` does not. Nothing is copied or detached. On leaving, hooks and tensors are gone. The tokens
    are those that flow on: with a cure attached at the same place, the cured ones.

    If the model is compiled, open it once around the training loop: entering and leaving call
    `torch.compiler.reset()`, because compiled code does not notice changed hooks.

    Args:
        model: a HuggingFace, timm, PyG or torch model, or any module with `modules`; it may be wrapped in your own.
        layers: "embed" is what enters block 0, "first" and "last" are blocks, "final" is what leaves the last norm;
            numbers count blocks from 0, or from the end if negative; "first 4", "last 4", "4:8" and slices are several
            blocks, which are then known by their numbers. Where blocks share their weights, as in ALBERT, passes are
            counted.
        at: the place in each block, of `uc.places(model)`: "block" is the residual stream after it.
        part: the part to read in a model with several stacks of blocks, such as "vision_model".
        modules: names or patterns of the modules that are the blocks, for models that are not known ("blocks.*").
        layout: how the tensors of `modules` are laid out, see `diagnose`.
        tokens: "patches" leaves out CLS, distillation and register tokens of images, "all" includes them.

    Returns:
        A context manager: `t["last"]` are the tokens of a layer, by the names given as `layers`.

    >>> import torch, uncollapse as uc
    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 4)
    >>> with uc.tokens(model, layers=("embed", "last")) as t:
    ...     out = model(torch.randn(8, 16, 32))
    ...     loss = out.square().mean() + 0.1 * uc.contra_uniform_loss(t["last"])
    >>> loss.backward()
    """
    inner = forward.unwrap_compiled(model)
    check_tokens(tokens)
    stack = backbones.find(inner, modules=modules, part=part, layout=layout)
    select_layers(stack, layers)  # one error for all of them
    place = _one_place(stack, at)
    spots = {name: spot for entry in _entries(layers) for name, spot in _spots(stack, entry, place).items()}
    return Tokens(model, stack, spots, tokens)


class Spot(NamedTuple):
    """Where a layer is: a site, the number of its call in a pass, and how many calls a pass has."""

    site: Site
    call: int
    calls: int


class Tokens:
    """The tokens of some layers in the last forward pass, inside `with`. Created by `tokens`.

    Layers have the names under which they were requested. Iterating gives these names.
    """

    def __init__(self, model: nn.Module, stack: Stack, spots: dict[LayerName, Spot], tokens: TokenChoice) -> None:
        self._model, self._stack, self._spots, self._tokens = model, stack, spots, tokens
        self._found: dict[LayerName, tuple[Tensor, bool]] = {}  # with whether gradients were recorded there
        sites = (spot.site for spot in spots.values())
        self._reader = SiteReader(
            forward.unwrap_compiled(model), stack, sites, self._receive, self._begin, inspections=False
        )
        self._is_open = self._wants_gradients = False

    def __enter__(self) -> "Tokens":
        if self._is_open:
            raise RuntimeError(
                "These tokens are already in use: leave the first `with` block before you enter another one."
            )
        self._reader.__enter__()
        self._is_open = True
        if forward.is_compiled(self._model):
            forward.reset_compiled()
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.__exit__(*error)
        self._is_open = False
        self._found.clear()
        self._reader.context = Context()  # masks and edges go too
        if forward.is_compiled(self._model):
            forward.reset_compiled()

    def __getitem__(self, layer: LayerName) -> Tensor:
        """Return the tokens (b, n, d) of a layer, patches or all of them; padding is included, see `mask`.

        Nodes (N, d) of graph networks and vectors (b, d) of `modules` come as they are.
        """
        x, layout = self._raw(layer), self._layout(layer)
        return x if layout in FLAT else to_sets(x, layout)[:, self._count_skipped() :]

    def __iter__(self) -> Iterator[LayerName]:
        return iter(self._spots)

    def mask(self, layer: LayerName) -> Tensor | None:
        """Return the mask (b, n) of `t[layer]`, True = real; None if the model was called without a mask."""
        x, layout = self._raw(layer), self._layout(layer)
        if layout in FLAT:
            return None
        mask = fit_mask(self._context().mask, to_sets(x, layout))
        return None if mask is None else mask[:, self._count_skipped() :]

    def real(self, layer: LayerName) -> Tensor:
        """Return the tokens of all sequences (m, d), without padding."""
        x, mask = self[layer], self.mask(layer)
        return x.flatten(0, -2) if mask is None else x[mask]

    def prefix(self, layer: LayerName) -> Tensor:
        """Return the prefix tokens (b, p, d): CLS, distillation, registers. p is 0 in models without them."""
        x, layout = self._raw(layer), self._layout(layer)
        if layout in FLAT:
            raise ValueError(f"Layer {layer!r} has nodes or vectors of shape {tuple(x.shape)}, and no prefix tokens.")
        return to_sets(x, layout)[:, : self._context().prefix]

    @property
    def batch(self) -> Tensor | None:
        """The graph (N,) of each node; None if the model was called without it."""
        return self._context().batch

    @property
    def edge_index(self) -> Tensor | None:
        """The edges (2, E); None if the model was called without them."""
        return self._context().edge_index

    def _begin(self) -> None:
        self._found.clear()  # before the new pass fills the memory
        self._wants_gradients = torch.is_grad_enabled()

    def _receive(self, site: Site, call: int, x: Tensor) -> None:
        if not self._is_open:  # a function that was compiled inside `with` still has the hooks
            return
        silent = not self._reader.inside  # no call of the owner marks where this pass began
        if silent:
            self._wants_gradients = False
        for name, spot in self._spots.items():
            number = call % spot.calls if silent else call
            again = number >= spot.calls and spot.call == spot.calls - 1 and name != EMBED  # the model runs it again
            if spot.site == site and (number == spot.call or again):
                self._found[name] = x, torch.is_grad_enabled()

    def _check_open(self) -> None:
        if not self._is_open:
            raise RuntimeError("Tokens exist only inside `with uc.tokens(…) as t:`; compute the loss there.")

    def _context(self) -> Context:
        self._check_open()
        return self._reader.context

    def _count_skipped(self) -> int:
        """Return how many leading tokens are left out."""
        return self._context().prefix if self._tokens == "patches" else 0

    def _raw(self, layer: LayerName) -> Tensor:
        if layer not in self._spots:
            asked = ", ".join(map(repr, self._spots))
            raise ValueError(f"Layer {layer!r} was not requested, only {asked}; add it to layers.")
        self._check_open()
        if layer not in self._found:
            raise RuntimeError(
                f"No forward pass of {self._stack.architecture} has reached layer {layer!r} since `with` was entered. "
                "Run the model inside it, in this thread; also compile functions that run the model inside it."
            )
        x, recorded = self._found[layer]
        if self._wants_gradients and not recorded:
            raise RuntimeError(
                f"Layer {layer!r} ran without gradients in a pass with gradients, as with reentrant checkpointing. "
                "Checkpoint with use_reentrant=False; in transformers "
                'gradient_checkpointing_enable({"use_reentrant": False}).'
            )
        return x

    def _layout(self, layer: LayerName) -> Layout:
        return self._stack.layout_at(self._spots[layer].site, self._raw(layer))


def _entries(layers: Layers) -> list[Any]:
    return [layers] if isinstance(layers, str | int | slice) else list(layers)


def _one_place(stack: Stack, at: str | int) -> str:
    places = select_places(stack, at)
    if len(places) > 1:
        raise ValueError(f"at must be one place, got {at!r}, which is {', '.join(places)}.")
    return places[0]


def _spots(stack: Stack, entry: Any, place: str) -> dict[LayerName, Spot]:
    """Return the layers of one entry of `layers`: by the name that was given, or by number if they may be several."""
    selection = select_layers(stack, entry)
    spots: dict[LayerName, Spot] = {number: _spot(stack, number, place) for number in selection.blocks}
    if isinstance(entry, int) or entry in ["first", "last", *(block.name for block in stack.blocks)]:
        return {entry: next(iter(spots.values()))}
    if selection.embed and stack.embed is not None:
        spots = {EMBED: _spot(stack, 0, place)._replace(site=stack.embed), **spots}
    if selection.final and stack.final is not None:
        spots[FINAL] = Spot(stack.final, 0, 1)
    return spots


def _spot(stack: Stack, number: int, place: str) -> Spot:
    block = stack.blocks[number]
    calls = sum(other.path == block.path for other in stack.blocks)
    return Spot(block.places[place], block.call, calls)
