"""Places in somebody else's model: its blocks, the tensors that pass through them, and their masks and graphs.

A backbone (`uncollapse.backbones`) describes a model as a `Stack` of `Block`s; every place of a block is a `Site`.
Reading a model and writing into it go through the same sites.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from uncollapse.backbones.nested import find_tensor, get_nested

Layout = Literal["auto", "tokens", "sequence_first", "nodes", "vectors", "channels_first", "channels_last"]
Side = Literal["input", "output"]
BY_RANK: dict[int, Layout] = {2: "vectors", 3: "tokens", 4: "channels_first"}  # what "auto" means

OUTPUT = "block"  # the place that every block has: the residual stream after it
CHILD = "uncollapse"  # the name of the child module that holds cures
HOOKS = "_uncollapse_hooks"  # the attribute that holds a module's hooks for cures


def _is_one(size: int, widths: tuple[int, ...]) -> bool:
    """Return whether a size is one of these widths; sizes of exported models cannot be looked up in a set."""
    return any(size == width for width in widths)


class MisfitError(ValueError):
    """A mask or a batch vector belongs to other tokens than those at a site."""


@dataclass(frozen=True)
class SequenceAxes:
    """What the modules at a site say about tensors of three axes: (b, n, d), (n, b, d), or (b, d, n) of convolutions.

    channels: widths of convolutions over sequences, which act on the second axis. features: widths of linear layers and
    norms, which act on the last one. norms: those of norms alone. permutes: the code of the modules may swap axes, so
    that parts need not see a tensor as it enters and leaves. sequence_first: attention or a recurrent layer says so.
    """

    channels: tuple[int, ...] = ()
    features: tuple[int, ...] = ()
    norms: tuple[int, ...] = ()
    permutes: bool = False
    sequence_first: bool = False

    def decide(self, x: Tensor) -> "Layout":
        """Return the layout of a tensor of three axes."""
        first, last = _is_one(x.shape[1], self.channels), _is_one(x.shape[-1], self.features)
        if first and last:  # by chance, or an MLP-Mixer, whose convolutions take tokens for channels
            last = self.permutes or _is_one(x.shape[-1], self.norms)
        if (first and not last) or (self.channels and not self.features):
            return "channels_first"
        return "sequence_first" if self.sequence_first and not self.permutes else "tokens"


@dataclass(frozen=True)
class Axes:
    """What the modules at a site say about images there: channels first (b, d, h, w) or last (b, h, w, d).

    name: of the module, for errors. widths: the numbers of features of its parts. layout: which all of its parts need
    that need one; None if they differ. declared: what the model around it says. features: their number, if it is known.
    sequences: what they say about tensors of three axes.
    """

    name: str
    widths: tuple[int, ...] = ()
    layout: "Layout | None" = None
    declared: "Layout | None" = None
    features: int | None = None
    sequences: SequenceAxes = SequenceAxes()

    def decide(self, x: Tensor) -> Layout:
        """Return the layout of an image or a sequence; ValueError if the modules allow both layouts of an image."""
        if x.dim() == 3:
            return self.sequences.decide(x)
        ends: dict[Layout, int] = {"channels_first": x.shape[1], "channels_last": x.shape[-1]}
        widths = self.widths if self.features is None else (self.features,)
        fits = [layout for layout, size in ends.items() if _is_one(size, widths)]
        if self.layout is not None and (self.layout in fits or not fits):
            return self.layout
        if len(fits) == 1 and (self.layout is None or self.features is not None):
            return fits[0]
        if self.declared is not None:
            return self.declared
        pixels = x[0].numel()
        readings = (f"{layout}: {size} features × {pixels // max(1, size)} tokens" for layout, size in ends.items())
        raise ValueError(
            f"The axes of {self.name}, of shape {tuple(x.shape)}, can be read in two ways, and its modules do not "
            f'decide it ({"; ".join(readings)}). Pass layout="channels_first" or layout="channels_last", '
            "--layout on the command line. If it is not an image but something else that the module returns before its "
            "tokens, such as an attention map, name a module inside it with modules=[…] instead."
        )


@dataclass(frozen=True)
class Site:
    """The input or the output of a module, by its name in the model.

    path: dotted name of the module, "" for the model itself. side: which end of it.
    what: "tokens" is the first floating-point tensor, "attention" the first with shape (b, heads, n, n).
    carried: the module only reads the residual stream, which bypasses it, as at a pre-norm: a change of the stream here
    must be repeated at every later read in the block, and after the block.
    axes: how images and sequences at it are laid out, in a stack whose layout is "auto".
    """

    path: str
    side: Side = "output"
    what: Literal["tokens", "attention"] = "tokens"
    carried: bool = False
    axes: Axes | None = field(default=None, compare=False)

    def read(self, given: tuple[tuple[Any, ...], Mapping[str, Any]], output: Any) -> Tensor | None:
        """Return the tensor at this site in one call of the module, or None if there is none."""
        value = without_masks(given) if self.side == "input" else output
        keys = find_tensor(value, is_square) if self.what == "attention" else find_tokens(value)
        return None if keys is None else get_nested(value, keys)


def is_tokens(tensor: Tensor) -> bool:
    """Return whether a tensor may hold tokens, nodes or vectors."""
    return tensor.is_floating_point() and tensor.dim() >= 2


def is_square(tensor: Tensor) -> bool:
    """Return whether a tensor may be an attention map (b, heads, n, n)."""
    return tensor.is_floating_point() and tensor.dim() == 4 and tensor.shape[-1] == tensor.shape[-2]


def find_tokens(value: Any) -> tuple[Any, ...] | None:
    """Return the keys of the first tensor that may hold tokens, see `find_tensor`; None if there is none.

    An attention map (b, heads, n, n) before the n tokens that it belongs to is passed over.
    """
    keys = find_tensor(value, is_tokens)
    if keys is None or not is_square(first := get_nested(value, keys)):
        return keys
    count, length = first.shape[0], first.shape[-1]
    tokens = find_tensor(value, lambda x: is_tokens(x) and x.dim() == 3 and x.shape[:2] == (count, length))
    return keys if tokens is None else tokens


@dataclass(frozen=True)
class Block:
    """One layer of a model.

    name: such as "block 3". path: the module whose call is the block.
    places: place name -> site; "block" is the residual stream after it. Tokens pass the others in this order.
    context: arguments of the module at `path` -> Context. It can be copied and pickled.
    call: the number of the call of these modules in one pass of the model, for layers that share their weights.
    attention: where the attention map after the softmax appears inside the stack's `expose_attention`.
    values: what attention averages, for cures of attention. second: how its map is applied twice.
    fused: the attention, if it calls torch's `scaled_dot_product_attention`: its map can be read in tiles.
    """

    name: str
    path: str
    places: Mapping[str, Site]
    context: "ReadContext"
    call: int = 0
    attention: Site | None = None
    values: "Values | None" = None
    second: "Second | None" = None
    fused: Site | None = None


@dataclass(frozen=True)
class Second:
    """How to apply the attention map A of a block twice: A(Av), for cures of attention.

    path: the attention. attribute: what must be changed there while such a cure is in the model. change: the attention
    and a receiver -> the new value. The receiver is called with A(Av) (b, heads, n, d) in each pass; if `map` is given,
    with A itself, which appears there.
    """

    path: str
    attribute: str
    change: "Callable[[nn.Module, Callable[[Tensor], Tensor]], Any]"
    map: Site | None = None


@dataclass(frozen=True)
class Values:
    """Where a block computes the values v of its attention.

    path: the module whose output holds them. first: the feature at which they begin; features of queries and keys may
    come before. heads: the number of their heads. repeats: query heads per value head.
    """

    path: str
    heads: int
    first: int = 0
    repeats: int = 1


@dataclass(frozen=True)
class Context:
    """What belongs to the tokens of one forward pass.

    mask: (b, n) bool, True = real. edge_index: (2, E). batch: (N,), the graph of each node.
    prefix: leading tokens that are not patches (CLS, distillation, registers).
    causal: a token sees only earlier ones.
    refuse: why the tokens of this pass must not be changed, such as earlier tokens in a cache.
    """

    mask: Tensor | None = None
    edge_index: Tensor | None = None
    batch: Tensor | None = None
    prefix: int = 0
    causal: bool = False
    refuse: str = ""

    def fill_from(self, other: "Context") -> "Context":
        """Return this context, with missing entries taken from another one."""
        return replace(
            self,
            mask=self.mask if self.mask is not None else other.mask,
            edge_index=self.edge_index if self.edge_index is not None else other.edge_index,
            batch=self.batch if self.batch is not None else other.batch,
            prefix=self.prefix or other.prefix,
            causal=self.causal or other.causal,
            refuse=self.refuse or other.refuse,
        )


ReadContext = Callable[[tuple[Any, ...], Mapping[str, Any]], Context]


def no_context(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Context:
    """Return an empty context: every token is real."""
    return Context()


def run_as_is(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context manager that changes nothing: the stack runs the same with and without hooks."""
    return nullcontext()


@dataclass(frozen=True)
class Stack:
    """The blocks of a model in the order in which they run.

    path: the module (owner) whose forward pass runs all of them once; its arguments include the mask or the graph.
    family: name of the backbone. architecture: class name of the owner.
    embed: what enters the first block. final: what leaves the last norm, where the model has one.
    layout: how tensors at its sites are laid out, see `sets_with_mask`.
    context: arguments of the owner -> Context. Without arguments it returns what is known before the model runs. The
    blocks know the rest: `context(…).fill_from(block.context(…))`. It can be copied and pickled.
    refusal: the same arguments -> Context, which only says why nothing may be changed in this pass.
    needs_owner: what the arguments of a block do not say must be taken from the owner's, such as the batch of graphs.
    arguments: names of the owner's arguments, where a graph is among them.
    outer: (path, its arguments -> Context) of a module around the owner, for what the owner does not get.
    lacks_batch: no module gets the graph of each node.
    knows_causality: a context says whether a token sees only earlier ones; otherwise it may not know.
    width: features of the residual stream, None if they are not known before it runs.
    numbers: the numbers of the ContraNorm paper for places of this architecture.
    overrides: (path, attribute, value) that must be set while a cure is in the model.
    under_hooks: model -> context manager for running the model with hooks.
    expose_attention: model -> context manager under which attention maps can be read; None if there are no maps.
    reinitialize: model -> a new one of the same architecture with random weights; None if that is not possible.
    facts: settings of the architecture, for a diagnosis.
    remark: what a user must know about the choice of the blocks, if it was a guess.
    """

    path: str
    family: str
    architecture: str
    blocks: tuple[Block, ...]
    embed: Site | None
    final: Site | None = None
    layout: Layout = "tokens"
    context: ReadContext = no_context
    refusal: ReadContext = no_context
    needs_owner: bool = False
    arguments: tuple[str, ...] = ()
    outer: tuple[str, ReadContext] | None = None
    lacks_batch: bool = False
    knows_causality: bool = True
    width: int | None = None
    numbers: Mapping[int, str] = field(default_factory=dict)
    overrides: tuple[tuple[str, str, Any], ...] = ()
    under_hooks: Callable[[nn.Module], AbstractContextManager[None]] = run_as_is
    expose_attention: Callable[[nn.Module], AbstractContextManager[None]] | None = None
    reinitialize: Callable[[nn.Module], nn.Module] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    remark: str = ""

    def places(self) -> tuple[str, ...]:
        """Return the names of the places that every block has."""
        return tuple(place for place in self.blocks[0].places if all(place in b.places for b in self.blocks))

    def layout_at(self, site: Site, x: Tensor) -> Layout:
        """Return the layout of the tensor at a site."""
        return resolve_layout(self.layout, x, site.axes)


def join_path(path: str, part: str) -> str:
    """Return the dotted name of a part of the module at `path`; either may be "", the module itself."""
    return f"{path}.{part}" if path and part else path or part


def without_masks(given: tuple[tuple[Any, ...], Mapping[str, Any]]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the arguments without masks that were passed by name, which may come before the tokens."""
    return given[0], {name: value for name, value in given[1].items() if "mask" not in name}


def to_sets(x: Tensor, layout: Layout) -> Tensor:
    """Return a tensor as sets of tokens (b, n, d). A sequence or an image is a set; all vectors are one set."""
    match resolve_layout(layout, x):
        case "vectors" | "nodes":
            return x.reshape(1, -1, x.shape[-1])
        case "sequence_first" if x.dim() == 3:
            return x.transpose(0, 1)
        case "channels_first":
            return x.flatten(2).mT
    return x[None] if x.dim() == 2 else x.flatten(1, -2)


def from_sets(sets: Tensor, like: Tensor, layout: Layout) -> Tensor:
    """Invert `to_sets`: return the sets (b, n, d) in the shape of the tensor that they came from."""
    match resolve_layout(layout, like):
        case "sequence_first" if like.dim() == 3:
            return sets.transpose(0, 1)
        case "channels_first":
            return sets.mT.reshape(like.shape)
    return sets.reshape(like.shape)


def resolve_layout(layout: Layout, x: Tensor, axes: Axes | None = None) -> Layout:
    """Return the layout of a tensor; "auto" depends on its rank, and beyond vectors on the modules at its site."""
    if layout != "auto":
        return layout
    return axes.decide(x) if axes is not None and x.dim() > 2 else BY_RANK.get(x.dim(), "tokens")


def sets_with_mask(
    x: Tensor, layout: Layout, context: Context, *, prefix: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the tensor of a site as sets of tokens (b, n, d) and their mask (b, n), None if all tokens are real.

    A sequence, an image or a graph is a set. `prefix` includes CLS, distillation and register tokens.
    Layout "auto" depends on the rank: (b, n, d) tokens, (b, d) vectors, (b, d, h, w) channels first.
    """
    layout = resolve_layout(layout, x)
    if layout == "nodes":
        return _graphs(x, context.batch)
    shape = x.shape
    x = to_sets(x, layout)
    if layout == "vectors":
        return x, None
    mask = context.mask
    if mask is not None and layout == "tokens" and len(shape) > 3 and mask.shape == shape[:2]:  # (b, n, streams, d)
        mask = mask.reshape(*shape[:2], *(1 for _ in shape[2:-1])).expand(shape[:-1]).flatten(1)
    mask = fit_mask(mask, x)
    if mask is not None and bool(mask.all()):
        mask = None  # nothing is left out
    skip = 0 if prefix else context.prefix
    return x[:, skip:], None if mask is None else mask[:, skip:]


def fit_mask(mask: Tensor | None, sets: Tensor) -> Tensor | None:
    """Return the mask (b, n) of the sets (b, n, d); a mask of one set is repeated."""
    if mask is None:
        return None
    mask = mask[None] if mask.dim() == 1 else mask  # one sequence without a batch dimension
    if mask.shape[0] == 1:
        mask = mask.expand(sets.shape[0], -1)
    if mask.shape != sets.shape[:2]:
        raise MisfitError(
            f"The mask of shape {tuple(mask.shape)} does not fit tokens of shape {tuple(sets.shape)}: expected "
            f"{tuple(sets.shape[:2])}. This layer has other tokens than the input. Pass sequences of one length "
            "without a mask, or select other layers (layers=…) or another part (part=…)."
        )
    return mask


def _graphs(x: Tensor, batch: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return nodes (N, d) as (graphs, largest graph, d) and their mask."""
    if batch is None or len(batch) == 0 or int(batch.max()) == 0:
        return x[None], None
    if len(batch) != len(x):
        raise MisfitError(
            f"The batch vector of {len(batch)} nodes does not fit {len(x)} nodes: this layer has other nodes than the "
            "input, such as after pooling; select layers with the same nodes."
        )
    order = torch.argsort(batch, stable=True)
    sizes = torch.bincount(batch)
    offsets = sizes.cumsum(0) - sizes
    column = torch.arange(len(batch), device=x.device) - offsets[batch[order]]
    dense = x.new_zeros(len(sizes), int(sizes.max()), x.shape[-1])
    mask = torch.zeros(dense.shape[:2], dtype=torch.bool, device=x.device)
    dense[batch[order], column], mask[batch[order], column] = x[order], True
    return dense, mask
