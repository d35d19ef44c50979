"""Cures at their places: on tokens, on the heads of attention, and on the edges of a graph."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from uncollapse.attachment.calls import CallState, EarlierTensor
from uncollapse.attachment.causality import Causality
from uncollapse.backbones.sites import Axes, Context, Layout, Values, fit_mask, from_sets, resolve_layout, to_sets

SECOND = "second"  # the key under which A(Av), or A, is held
EDGE_ARGUMENTS = ("edge_weight", "edge_attr", "edge_type")  # one entry per edge


@dataclass(frozen=True)
class Scope:
    """Where and on what a cure acts.

    layout: of the tokens. takes: which parts of the context the cure takes, see `plan.CONTEXT_NAMES`. axes: of images,
    where the layout is "auto". inside: whether the place is within the block, or else directly after it. calls: in
    which calls of the block, None for all. patches: leave CLS and other prefix tokens as they are. counts_padding: do
    not tell the cure which tokens are padding. causality: whether tokens see earlier ones only, where the context does
    not say so. mixes: whether the cure lets tokens depend on each other. earlier: the tensor of the first or the
    previous block, if the cure takes it. inputs: the key of the input of its module, likewise. maps: the attention map
    is held, not yet applied a second time.
    """

    layout: Layout
    takes: tuple[str, ...]
    axes: Axes | None = None
    inside: bool = True
    calls: frozenset[int] | None = None
    patches: bool = False
    counts_padding: bool = False
    causality: Causality | None = None
    mixes: bool = True
    earlier: EarlierTensor | None = None
    inputs: str = ""
    maps: bool = False

    @property
    def earlier_name(self) -> str:
        """Return by which name the cure takes the tensor of an earlier block."""
        return "previous" if "previous" in self.takes else "first"


class Writer:
    """A cure at one place.

    Args:
        cure: the module that changes tokens.
        state: of the block.
        scope: where and on what it acts.
    """

    def __init__(self, cure: nn.Module, state: CallState, scope: Scope) -> None:
        self.cure, self.state, self.scope = cure, state, scope
        self.checked = False  # in training, whether its parameters are frozen

    def __call__(self, x: Tensor) -> Tensor:
        """Return the tokens with the cure."""
        if not self.checked and self.cure.training and not torch.compiler.is_compiling():
            self._warn_if_frozen()
        context = self.state.current_context(self.scope.inside)
        if self.scope.calls is not None and self.state.call not in self.scope.calls:
            return x
        new = self.change(x, context)
        if self.scope.earlier is not None:
            self.scope.earlier.hold(self.state, new)
        if new.shape != x.shape:
            raise ValueError(f"The cure at {self.state.name} changed the shape {tuple(x.shape)} to {tuple(new.shape)}.")
        return new

    def _warn_if_frozen(self) -> None:
        """Warn once if the parameters of the cure were frozen together with the model, as by `get_peft_model`."""
        self.checked = torch.is_grad_enabled()
        parameters = list(self.cure.parameters())
        if self.checked and parameters and not any(p.requires_grad for p in parameters):
            warnings.warn(
                f"The parameters of the cure at {self.state.name} are frozen and will not be trained; PEFT, for one, "
                "freezes everything. Unfreeze them: for p in attachment.parameters(): p.requires_grad_(True).",
                stacklevel=2,
            )

    def change(self, x: Tensor, context: Context) -> Tensor:
        """Apply the cure to the tokens, laid out as sets, and lay them back."""
        layout = resolve_layout(self.scope.layout, x, self.scope.axes)
        if layout == "nodes":
            traced = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
            if traced and context.batch is not None and "batch" in self.scope.takes:
                raise RuntimeError(
                    "A cure that separates the graphs of a batch can only be exported with "
                    "torch.export.export(…, strict=True): the number of graphs is not known before it runs."
                )
            return self._apply(x, edge_index=context.edge_index, batch=context.batch, **self._other_tensors(x))
        sets, others = to_sets(x, layout), self._other_tensors(x)
        others = {name: to_sets(other, layout) for name, other in others.items()}
        if not self.scope.mixes:
            return from_sets(self._apply(sets, **others), x, layout)
        ignores_mask = self.scope.counts_padding or layout == "vectors"
        mask = None if ignores_mask else fit_mask(context.mask, sets)
        skip = context.prefix if self.scope.patches else 0
        others = {name: other[:, skip:] for name, other in others.items()}
        known = {"mask": None if mask is None else mask[:, skip:], "causal": self._is_causal(sets, context)}
        new = self._apply(sets[:, skip:], **known, **others)
        return from_sets(new if skip == 0 else torch.cat([sets[:, :skip], new], 1), x, layout)

    def _is_causal(self, sets: Tensor, context: Context) -> bool:
        causality = self.scope.causality
        return context.causal if causality is None else causality.hides_later(context.causal, sets)

    def _other_tensors(self, x: Tensor) -> dict[str, Tensor]:
        """Return the tensors of other places that the cure takes, which must be laid out as x is."""
        found = {}
        if self.scope.inputs:
            found["inputs"] = self.state.held[self.scope.inputs]
        if self.scope.earlier is not None:
            found[self.scope.earlier_name] = self.scope.earlier.read(self.state)
        for name, other in found.items():
            if other.shape != x.shape:
                raise ValueError(
                    f"{type(self.cure).__name__} at {self.state.name} adds tensors of two places, and their shapes "
                    f"differ: {tuple(x.shape)} here, {tuple(other.shape)} ({name}). Choose other layers."
                )
        return found

    def _apply(self, x: Tensor, *others: Tensor, **context: Any) -> Tensor:
        known = {name: value for name, value in context.items() if value is not None and value is not False}
        missing = [name for name in known if name in ("mask", "causal") and name not in self.scope.takes]
        if missing and self.scope.mixes:
            raise RuntimeError(
                f"{type(self.cure).__name__} at {self.state.name} takes no {missing[0]}, and would read tokens that it "
                f"must not see: {'padding' if missing[0] == 'mask' else 'later ones'}. Give its forward that argument."
            )
        new: Tensor = self.cure(
            x, *others, **{name: value for name, value in known.items() if name in self.scope.takes}
        )
        return new


class StreamWriter(Writer):
    """A cure on the residual stream in front of a module that only reads the stream."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the tokens with the cure, and carry the change in the stream."""
        new = super().__call__(x)
        carried = self.state.carried
        self.state.carried = new - x if carried is None else carried + (new - x)
        return new


class Receiver:
    """A later read of the residual stream in the block, or its end, where the carried change is added."""

    def __init__(self, state: CallState) -> None:
        self.state, self.users = state, 0

    def __call__(self, x: Tensor) -> Tensor:
        """Return the tokens with the change."""
        return x if self.state.carried is None else x + self.state.carried


class Holder:
    """Holds the tensor at a place for a cure further on in the block."""

    def __init__(self, state: CallState, key: str) -> None:
        self.state, self.key = state, key

    def __call__(self, x: Tensor) -> Tensor:
        """Return the same tensor."""
        self.state.held[self.key] = x
        return x


class HeadWriter(Writer):
    """A cure of attention, between its heads and their projection.

    Args:
        cure: takes the context of each head, and the values.
        state: of the block.
        scope: in which calls; whether causal.
        values: where the values are.
    """

    def __init__(self, cure: nn.Module, state: CallState, scope: Scope, values: Values) -> None:
        super().__init__(cure, state, scope)
        self.values = values

    def change(self, x: Tensor, context: Context) -> Tensor:
        """Apply the cure to the heads (b, n, heads·d), side by side as the projection takes them."""
        heads = _split_heads(x, self.values.heads * self.values.repeats)
        known: dict[str, Any] = {"mask": fit_mask(context.mask, x), "causal": self._is_causal(x, context)}
        if self.scope.inputs:
            known["inputs"] = self._get_held(self.scope.inputs)
        if self.scope.earlier is not None:
            known[self.scope.earlier_name] = self._split_values(self.scope.earlier.read(self.state))
        if "second" in self.scope.takes:
            held = self._get_held(SECOND)
            known["second"] = held @ heads if self.scope.maps else held
        new = self._apply(heads, self._split_values(self._get_held(self.values.path)), **known)
        return new.transpose(-2, -3).reshape(x.shape)

    def _get_held(self, key: str) -> Tensor:
        if key not in self.state.held:
            raise RuntimeError(f"{self.values.path} did not run before the projection of its attention.")
        return self.state.held[key]

    def _split_values(self, x: Tensor) -> Tensor:
        """Return the values in the output of their module (b, n, …) as (b, heads, n, d), one for each query head."""
        v = _split_heads(x[..., self.values.first :], self.values.heads)
        return v.repeat_interleave(self.values.repeats, -3) if self.values.repeats > 1 else v


class ValueWriter(Writer):
    """A cure of the values of attention, in the output of the module that computes them.

    Args:
        cure: takes the values of all heads, side by side.
        state: of the block.
        scope: in which calls.
        values: where the values are.
    """

    def __init__(self, cure: nn.Module, state: CallState, scope: Scope, values: Values) -> None:
        super().__init__(cure, state, scope)
        self.values = values

    def change(self, x: Tensor, context: Context) -> Tensor:
        """Apply the cure to the values; queries and keys in front of them stay."""
        begin = self.values.first
        others = {name: other[..., begin:] for name, other in self._other_tensors(x).items()}
        new = self._apply(x[..., begin:], **others)
        return torch.cat([x[..., :begin], new], -1) if begin else new


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """(b, n, heads·d) -> (b, heads, n, d)."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(-2, -3)


class EdgeWriter:
    """Changes the edges among the arguments of a model.

    Args:
        cure: takes the edges and one value per edge, and returns both for the remaining ones.
        names: of the model's arguments.
    """

    def __init__(self, cure: nn.Module, names: tuple[str, ...]) -> None:
        self.cure, self.names = cure, names

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with the remaining edges; unchanged outside of training."""
        if not self.cure.training:
            return args, kwargs
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        data = next((value for value in given.values() if hasattr(value, "edge_subgraph")), None)
        if given.get("num_sampled_edges_per_hop") is not None:
            raise ValueError("DropEdge changes the number of edges: call the model without the numbers per hop.")
        if data is not None and data.edge_index is None:
            raise ValueError("DropEdge needs edge_index (2, E), and the Data object has none.")
        if data is not None:
            remaining = self._sample(data.edge_index, getattr(data, "batch", None))
            changed = {id(data): data.edge_subgraph(remaining)}
        else:
            changed = self._drop_edges(given)
        new = tuple(changed.get(id(value), value) for value in args)
        return new, {name: changed.get(id(value), value) for name, value in kwargs.items()}

    def _drop_edges(self, given: dict[str, Any]) -> dict[int, Any]:
        """Return id -> new value of each argument that holds edges."""
        edges = given.get("edge_index")
        if not isinstance(edges, Tensor) or edges.layout != torch.strided:
            raise ValueError(f"DropEdge needs edge_index as a tensor (2, E), got {type(edges).__name__}.")
        remaining = self._sample(edges, given.get("batch"))
        rows = {
            id(given[name]): given[name][remaining] for name in EDGE_ARGUMENTS if isinstance(given.get(name), Tensor)
        }
        return {id(edges): edges[:, remaining], **rows}

    def _sample(self, edges: Tensor, batch: Tensor | None) -> Tensor:
        """Return the numbers of the edges (2, E) that remain."""
        remaining: Tensor = self.cure(edges, torch.arange(edges.shape[1], device=edges.device), batch=batch)[1]
        return remaining
