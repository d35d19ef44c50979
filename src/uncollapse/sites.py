"""Places in somebody else's model: where its blocks are, what flows through them, and what goes with it.

A backbone (`uncollapse.backbones`) describes a model as a `Stack` of `Block`s; every place of a block is a `Site`.
Reading a model and writing into it go through the same sites.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

Layout = Literal["auto", "tokens", "sequence_first", "nodes", "vectors", "channels_first"]
Side = Literal["input", "output"]
BY_RANK: dict[int, Layout] = {2: "vectors", 3: "tokens", 4: "channels_first"}  # what "auto" means

OUTPUT = "block"  # the place that every block has: the residual stream after it


@dataclass(frozen=True)
class Site:
    """The input or the output of a module, by its name in the model.

    path: dotted name of the module, "" for the model itself. side: which end of it.
    what: "tokens" is the first floating-point tensor, "attention" the first with shape (b, heads, n, n).
    """

    path: str
    side: Side = "output"
    what: Literal["tokens", "attention"] = "tokens"

    def read(self, given: tuple[tuple[Any, ...], Mapping[str, Any]], output: Any) -> Tensor | None:
        """The tensor at this site in one call of the module, or None if there is none."""
        value = [*given[0], *given[1].values()] if self.side == "input" else output
        return next((tensor for tensor in tensors(value) if self._fits(tensor)), None)

    def _fits(self, tensor: Tensor) -> bool:
        if self.what == "attention":
            return tensor.is_floating_point() and tensor.dim() == 4 and tensor.shape[-1] == tensor.shape[-2]
        return tensor.is_floating_point() and tensor.dim() >= 2


@dataclass(frozen=True)
class Block:
    """One layer of a model.

    name: what people call it, such as "block 3". places: place name -> site; "block" is the residual stream after it.
    call: which call of these modules in one pass of the model, for layers that share their weights.
    attention: where the attention map after the softmax appears once the stack's `expose_attention` is entered.
    """

    name: str
    places: Mapping[str, Site]
    call: int = 0
    attention: Site | None = None


@dataclass(frozen=True)
class Context:
    """What goes with the tokens of one forward pass.

    mask: (b, n) bool, True = real. edge_index: (2, E). batch: (N,), the graph of each node.
    prefix: leading tokens that are not patches (CLS, distillation, registers).
    causal: a token sees only earlier ones.
    """

    mask: Tensor | None = None
    edge_index: Tensor | None = None
    batch: Tensor | None = None
    prefix: int = 0
    causal: bool = False

    def filled(self, other: "Context") -> "Context":
        """This context, with what it leaves open taken from another one."""
        return replace(
            self,
            mask=self.mask if self.mask is not None else other.mask,
            edge_index=self.edge_index if self.edge_index is not None else other.edge_index,
            batch=self.batch if self.batch is not None else other.batch,
            prefix=self.prefix or other.prefix,
            causal=self.causal or other.causal,
        )


ReadContext = Callable[[tuple[Any, ...], Mapping[str, Any]], Context]


def no_context(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Context:
    """For stacks of which nothing is known: every token is real."""
    return Context()


def as_it_is(model: nn.Module) -> AbstractContextManager[None]:
    """For stacks that run the same with and without hooks."""
    return nullcontext()


@dataclass(frozen=True)
class Stack:
    """The blocks of a model in the order in which they run.

    path: the module whose forward pass runs all of them once; its arguments carry the mask or the graph.
    family: name of the backbone. architecture: class name of that module.
    embed: what enters the first block. final: what leaves the last norm, where the model has one.
    layout: how tensors at its sites are laid out, see `as_sets`.
    context: arguments of the module at `path` -> Context. Without arguments it tells what is known beforehand.
    context_inside: a module that runs before or as the first block, and arguments of it -> Context, for what the
    arguments at `path` leave open: `context(…).filled(context_inside[1](…))`.
    running: model -> context manager that is entered while the model runs under hooks.
    expose_attention: model -> context manager under which attention maps can be read; None if there are no maps.
    reinitialised: model -> a new one with random weights of the same architecture; None if nobody knows how.
    """

    path: str
    family: str
    architecture: str
    blocks: tuple[Block, ...]
    embed: Site | None
    final: Site | None = None
    layout: Layout = "tokens"
    context: ReadContext = no_context
    context_inside: tuple[str, ReadContext] | None = None
    running: Callable[[nn.Module], AbstractContextManager[None]] = as_it_is
    expose_attention: Callable[[nn.Module], AbstractContextManager[None]] | None = None
    reinitialised: Callable[[nn.Module], nn.Module] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def places(self) -> tuple[str, ...]:
        """The names of all places that every block has."""
        return tuple(place for place in self.blocks[0].places if all(place in b.places for b in self.blocks))


def inside(path: str, part: str) -> str:
    """Dotted name of a part of the module at `path`; either may be "", the module itself."""
    return f"{path}.{part}" if path and part else path or part


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists and mappings, in order. Objects such as caches are not looked into."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from tensors(item)


def as_sets(x: Tensor, layout: Layout, context: Context, *, prefix: bool = False) -> tuple[Tensor, Tensor | None]:
    """What a site holds as sets of tokens (b, n, d), and which of them are real (b, n), None if all are.

    A sequence, an image or a graph is a set. `prefix` keeps CLS, distillation and register tokens in.
    Layout "auto" goes by the rank: (b, n, d) tokens, (b, d) vectors, (b, d, h, w) channels first.
    """
    mask = context.mask
    if layout == "auto":
        layout = BY_RANK.get(x.dim(), "tokens")
    if layout == "nodes":
        return _graphs(x, context.batch)
    if layout == "vectors":
        return x.reshape(1, -1, x.shape[-1]), None
    if layout == "sequence_first":
        x = x.transpose(0, 1) if x.dim() == 3 else x
    elif layout == "channels_first":
        x = x.flatten(2).mT
    if x.dim() == 2:  # one sequence without a batch dimension
        x, mask = x[None], mask if mask is None or mask.dim() == 2 else mask[None]
    elif x.dim() > 3:  # tokens on a grid
        x = x.flatten(1, -2)
    if mask is not None and mask.shape != x.shape[:2]:
        raise ValueError(
            f"The mask of shape {tuple(mask.shape)} does not fit tokens of shape {tuple(x.shape)}: expected "
            f"{tuple(x.shape[:2])}. This layer has other tokens than the input; name layers that share them."
        )
    if mask is not None and bool(mask.all()):
        mask = None  # nothing is left out
    skip = 0 if prefix else context.prefix
    return x[:, skip:], None if mask is None else mask[:, skip:]


def _graphs(x: Tensor, batch: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Nodes (N, d) as (graphs, largest graph, d) and their mask."""
    if batch is None or len(batch) == 0 or int(batch.max()) == 0:
        return x[None], None
    if len(batch) != len(x):
        raise ValueError(
            f"The batch vector of {len(batch)} nodes does not fit {len(x)} nodes: this layer has other nodes than the "
            "input, such as after pooling; name layers that share them."
        )
    order = torch.argsort(batch, stable=True)
    sizes = torch.bincount(batch)
    offsets = sizes.cumsum(0) - sizes
    column = torch.arange(len(batch), device=x.device) - offsets[batch[order]]
    dense = x.new_zeros(len(sizes), int(sizes.max()), x.shape[-1])
    mask = torch.zeros(dense.shape[:2], dtype=torch.bool, device=x.device)
    dense[batch[order], column], mask[batch[order], column] = x[order], True
    return dense, mask
