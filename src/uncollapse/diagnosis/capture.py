"""Hooks that measure every block of a model while it runs, and leave nothing behind."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from uncollapse import distributed
from uncollapse.backbones import nonfinite
from uncollapse.backbones.read_hooks import SiteReader
from uncollapse.backbones.sites import OUTPUT, Context, Site, Stack, sets_with_mask
from uncollapse.diagnosis.layer_stats import LayerStats, StatsConfig
from uncollapse.diagnosis.result import Layer
from uncollapse.errors import NotFiniteError, did_you_mean
from uncollapse.pairwise import numerics

View = Literal["first", "first of two", "second"]
Key = tuple[str, str, int]  # name of the layer, place, call


class Capture:
    """Gauges at the sites of a stack, filled by hooks while the model runs, once, inside `with capture:`.

    Args:
        model: the model that has the stack.
        stack: its blocks.
        places: which places of each block, of `stack.places()`.
        plan: how they are measured.
    """

    def __init__(self, model: nn.Module, stack: Stack, places: tuple[str, ...], plan: StatsConfig) -> None:
        self.model, self.stack, self.plan = model, stack, plan
        self.view: View = "first"
        self.gauges: dict[Key, LayerStats] = {}
        self._paths: dict[Key, str] = {}
        self._wanted = _wanted_sites(stack, places)
        self._attention = {(b.attention, b.call): b.name for b in stack.blocks if b.attention and plan.attention}
        self._watch = SiteReader(model, stack, (site for site, _ in [*self._wanted, *self._attention]), self._see)
        self._opened = ExitStack()

    def __enter__(self) -> "Capture":
        with ExitStack() as opened:  # what was entered comes out again if a later step fails
            if self._attention and self.stack.expose_attention is not None:
                opened.enter_context(self.stack.expose_attention(self.model))
            opened.enter_context(self._watch)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def layers(self) -> tuple[Layer, ...]:
        """What was measured so far, in the order of the stack (named layers: as they ran), place by place."""
        places = sorted(dict.fromkeys(place for _, place, _ in self.gauges), key=lambda place: place != OUTPUT)
        keys = list(self.gauges) if self.stack.family == "named" else sorted(self.gauges, key=self._order)
        return tuple(self._layer(key) for place in places for key in keys if key[1] == place)

    def _order(self, key: Key) -> int:
        """The place of a layer in its stack."""
        names = ["embed", *(block.name for block in self.stack.blocks), "final"]
        return names.index(key[0])

    def gather(self) -> None:
        """Join what all processes measured, in the first one; all must call this."""
        own = distributed.merge_on_rank_zero(_Measured(self.gauges, self._paths))
        self.gauges, self._paths = own.gauges, own.paths

    def sequences(self) -> int:
        """How many sequences (images, graphs) were seen."""
        return max((gauge.sets for gauge in self.gauges.values()), default=0)

    @property
    def context(self) -> Context:
        """What goes with the tokens of the last batch."""
        return self._watch.context

    @property
    def graphs(self) -> Tensor | None:
        """The graph of each node, where the model itself does not take that."""
        return self._watch.graphs

    @graphs.setter
    def graphs(self, batch: Tensor | None) -> None:
        self._watch.graphs = batch

    def _layer(self, key: Key) -> Layer:
        name, place, call = key
        label = name if call == 0 else f"{name} (call {call + 1})"
        return self.gauges[key].layer(label, place, self._paths[key])

    def _see(self, site: Site, call: int, x: Tensor) -> None:
        if site.what == "attention":
            name = self._attention.get((site, call))
            if name is not None and self.view != "second":
                self._measure((name, OUTPUT, 0), site, x, lambda gauge: gauge.update_attention(x, self.context))
            return
        for key in self._keys(site, call):
            self._measure(key, site, x, lambda gauge: self._update(gauge, x))

    def _keys(self, site: Site, call: int) -> Iterator[Key]:
        """The layers that a site is, at this call of it."""
        if (site, call) in self._wanted:
            yield from ((name, place, 0) for name, place in self._wanted[site, call])
        elif (site, 0) in self._wanted:  # a layer that the model runs again
            yield from ((name, place, call) for name, place in self._wanted[site, 0] if name != "embed")

    def _measure(self, key: Key, site: Site, x: Tensor, update: Any) -> None:
        if key not in self.gauges:
            self.gauges[key] = LayerStats(self.plan)
        if site.what == "tokens":
            self._paths[key] = site.path
        try:
            update(self.gauges[key])
        except ValueError as error:
            place = "" if key[1] == OUTPUT else f"{key[1]}, "
            where = f"At {key[0]} ({place}{site.side} of {site.path or 'the model'})"
            if isinstance(error, NotFiniteError):
                raise NotFiniteError(f"{where}: {self._not_finite(site, x)}") from error
            raise ValueError(f"{where}: {error}") from error

    def _not_finite(self, site: Site, x: Tensor) -> str:
        """How many numbers are not finite, those of padding left out."""
        if site.what == "tokens":
            x = numerics.prepared(*sets_with_mask(x, self.stack.layout, self.context, prefix=self.plan.prefix))
        return nonfinite.describe_counts(*nonfinite.count_nonfinite(x))

    def _update(self, gauge: LayerStats, x: Tensor) -> None:
        context, layout = self.context, self.stack.layout
        sets, mask = sets_with_mask(x, layout, context, prefix=self.plan.prefix)
        vectors = x.dim() == 2 and layout != "nodes"
        views = sets.transpose(0, 1) if vectors else sets  # a vector is a sample of its own
        if self.view == "second":
            gauge.pair(views, mask)
            return
        gauge.update(sets, mask, context)
        if not vectors:
            gauge.update_means(sets, mask)
        if layout == "nodes" and context.edge_index is not None:
            gauge.update_graph(x, context.edge_index)
        if self.view == "first of two":
            gauge.pool(views, mask)


@dataclass(frozen=True)
class _Measured:
    """What a process measured."""

    gauges: dict[Key, LayerStats]
    paths: dict[Key, str]

    def merge(self, other: "_Measured") -> "_Measured":
        """Both, the layers of this one first."""
        shared = self.gauges.keys() & other.gauges.keys()
        joined = {key: self.gauges[key].merge(other.gauges[key]) for key in shared}
        return _Measured({**self.gauges, **other.gauges, **joined}, {**self.paths, **other.paths})


def _wanted_sites(stack: Stack, places: tuple[str, ...]) -> dict[tuple[Site, int], list[tuple[str, str]]]:
    """(site, call) -> the layers that it is, as (name, place); a site may be two of them."""
    unknown = [place for place in places if place not in stack.places()]
    if unknown:
        known = stack.places()
        hint = did_you_mean(unknown[0], known)
        raise ValueError(f"No place {unknown[0]!r} in {stack.architecture}.{hint} There are: {', '.join(known)}.")
    wanted: dict[tuple[Site, int], list[tuple[str, str]]] = {}
    ends = [("embed", stack.embed, 0), ("final", stack.final, 0)]
    blocks = [(block.name, block.places[place], block.call, place) for block in stack.blocks for place in places]
    for name, site, call in ends:
        if site is not None and OUTPUT in places:
            wanted.setdefault((site, call), []).append((name, OUTPUT))
    for name, site, call, place in blocks:
        wanted.setdefault((site, call), []).append((name, place))
    return wanted
