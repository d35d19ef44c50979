"""Cures at places: they change the tokens that pass."""

from typing import Any

import torch
from torch import Tensor, nn

from uncollapse.attachment.calls import CallState
from uncollapse.backbones.sites import Context, Layout, Values, fit_mask, from_sets, resolve_layout, to_sets


class Writer:
    """A cure at one place.

    Args:
        cure: the module that changes tokens.
        frame: of the block.
        layout: how the tokens lie.
        takes: which of mask, causal, edge_index and batch the cure takes.
        inside: whether the place is within the block; else right behind it.
        calls: in which calls of the block, None for all.
        patches: leaves CLS and other prefix tokens as they are.
        counts_padding: the cure is not told which tokens are padding.
        causal: tokens see earlier ones only, also where the context does not say so.
    """

    def __init__(
        self,
        cure: nn.Module,
        frame: CallState,
        layout: Layout,
        takes: tuple[str, ...],
        *,
        inside: bool = True,
        calls: frozenset[int] | None = None,
        patches: bool = False,
        counts_padding: bool = False,
        causal: bool = False,
    ) -> None:
        self.cure, self.frame, self.layout, self.takes = cure, frame, layout, takes
        self.inside, self.calls, self.patches, self.causal = inside, calls, patches, causal
        self.counts_padding = counts_padding

    def __call__(self, x: Tensor) -> Tensor:
        """Tokens with the cure."""
        context = self.frame.told(self.inside)
        if self.calls is not None and self.frame.call not in self.calls:
            return x
        new = self.changed(x, context)
        if new.shape != x.shape:
            raise ValueError(f"The cure at {self.frame.name} made {tuple(new.shape)} of {tuple(x.shape)}.")
        return new

    def changed(self, x: Tensor, context: Context) -> Tensor:
        """The tokens, laid out for the cure and back."""
        if self.layout == "nodes":
            graph = {"edge_index": context.edge_index, "batch": context.batch}
            traced = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
            if traced and context.batch is not None and "batch" in self.takes:
                raise RuntimeError(
                    "A cure that tells the graphs of a batch apart is exported by torch.export.export(…, strict=True) "
                    "only: how many graphs there are is not known before it runs."
                )
            return self._cured(x, **graph)
        sets = to_sets(x, self.layout)
        is_blind = self.counts_padding or resolve_layout(self.layout, x) == "vectors"
        mask = None if is_blind else fit_mask(context.mask, sets)
        skip = context.prefix if self.patches else 0
        new = self._cured(
            sets[:, skip:], mask=None if mask is None else mask[:, skip:], causal=self.causal or context.causal
        )
        return from_sets(new if skip == 0 else torch.cat([sets[:, :skip], new], 1), x, self.layout)

    def _cured(self, x: Tensor, **context: Any) -> Tensor:
        told = {name: value for name, value in context.items() if value is not None and value is not False}
        blind = [name for name in told if name in ("mask", "causal") and name not in self.takes]
        if blind:
            raise RuntimeError(
                f"{type(self.cure).__name__} at {self.frame.name} takes no {blind[0]}, and would read tokens that it "
                f"must not see: {'padding' if blind[0] == 'mask' else 'later ones'}. Give its forward that argument."
            )
        new: Tensor = self.cure(x, **{name: value for name, value in told.items() if name in self.takes})
        return new


class StreamWriter(Writer):
    """A cure on the residual stream in front of a module that only looks at it."""

    def __call__(self, x: Tensor) -> Tensor:
        """Tokens with the cure; the change goes into the stream as well."""
        new = super().__call__(x)
        carried = self.frame.carried
        self.frame.carried = new - x if carried is None else carried + (new - x)
        return new


class Receiver:
    """A later look of the block at the residual stream, or its end: what was changed before is added."""

    def __init__(self, frame: CallState) -> None:
        self.frame, self.users = frame, 0

    def __call__(self, x: Tensor) -> Tensor:
        """Tokens with the change."""
        return x if self.frame.carried is None else x + self.frame.carried


class ValueReader:
    """Keeps what the module that computes the values of a block gives."""

    def __init__(self, frame: CallState) -> None:
        self.frame = frame

    def __call__(self, x: Tensor) -> Tensor:
        """The same tensor."""
        self.frame.values = x
        return x


class HeadWriter(Writer):
    """A cure between the heads of an attention and its projection.

    Args:
        cure: takes the context of each head and its values.
        frame: of the block.
        values: where they are.
        calls: in which calls of the block, None for all.
        causal: tokens see earlier ones only, also where the context does not say so.
    """

    def __init__(
        self, cure: nn.Module, frame: CallState, values: Values, calls: frozenset[int] | None, causal: bool
    ) -> None:
        super().__init__(cure, frame, "tokens", ("mask", "causal"), calls=calls, causal=causal)
        self.values = values

    def changed(self, x: Tensor, context: Context) -> Tensor:
        """The heads (b, n, heads·d) side by side, as the projection takes them."""
        if self.frame.values is None:
            raise RuntimeError(f"{self.values.path} did not run before the projection of its attention.")
        heads, repeats = self.values.heads, self.values.repeats
        v = _split(self.frame.values[..., self.values.first :], heads)  # (b, heads, n, d)
        v = v.repeat_interleave(repeats, -3) if repeats > 1 else v
        new: Tensor = self.cure(
            _split(x, heads * repeats), v, fit_mask(context.mask, x), causal=self.causal or context.causal
        )
        return new.transpose(-2, -3).reshape(x.shape)


def _split(x: Tensor, heads: int) -> Tensor:
    """(b, n, heads·d) -> (b, heads, n, d)."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(-2, -3)


OF_EDGES = ("edge_weight", "edge_attr", "edge_type")  # what goes with the edges, entry by entry


class EdgeWriter:
    """Changes the edges that a model is called with.

    Args:
        cure: takes the edges and something of each of them, and gives both for those that are left.
        names: of the model's arguments.
    """

    def __init__(self, cure: nn.Module, names: tuple[str, ...]) -> None:
        self.cure, self.names = cure, names

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the edges that are left, in training."""
        if not self.cure.training:
            return args, kwargs
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        data = next((value for value in given.values() if hasattr(value, "edge_subgraph")), None)
        if given.get("num_sampled_edges_per_hop") is not None:
            raise ValueError("DropEdge changes how many edges there are: call the model without the numbers per hop.")
        if data is not None and data.edge_index is None:
            raise ValueError("DropEdge needs edge_index (2, E), and the Data object has none.")
        if data is not None:
            kept = self._kept(data.edge_index, getattr(data, "batch", None))
            changed = {id(data): data.edge_subgraph(kept)}
        else:
            changed = self._thinned(given)
        new = tuple(changed.get(id(value), value) for value in args)
        return new, {name: changed.get(id(value), value) for name, value in kwargs.items()}

    def _thinned(self, given: dict[str, Any]) -> dict[int, Any]:
        edges = given.get("edge_index")
        if not isinstance(edges, Tensor) or edges.layout != torch.strided:
            raise ValueError(f"DropEdge needs edge_index as a tensor (2, E), got {type(edges).__name__}.")
        kept = self._kept(edges, given.get("batch"))
        rows = {id(given[name]): given[name][kept] for name in OF_EDGES if isinstance(given.get(name), Tensor)}
        return {id(edges): edges[:, kept], **rows}

    def _kept(self, edges: Tensor, batch: Tensor | None) -> Tensor:
        """Which of the edges (2, E) are left, as numbers."""
        kept: Tensor = self.cure(edges, torch.arange(edges.shape[1], device=edges.device), batch=batch)[1]
        return kept
