"""Measure the blocks of a model by hooks while it runs; the hooks are removed afterwards."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor, nn

from uncollapse import distributed
from uncollapse.backbones import nonfinite
from uncollapse.backbones.attention_calls import TileReader, Tiles
from uncollapse.backbones.read_hooks import SiteReader
from uncollapse.backbones.select import Selection
from uncollapse.backbones.sites import OUTPUT, Context, MisfitError, Site, Stack, sets_with_mask
from uncollapse.diagnosis.layer_stats import LayerStats, Samples, StatsConfig
from uncollapse.diagnosis.result import Layer
from uncollapse.errors import NotFiniteError
from uncollapse.pairwise import numerics
from uncollapse.pairwise.threads import run_side_by_side

# "unpaired" is a second view whose first one was only padding: there is nothing to compare it with.
View = Literal["first", "first of two", "second", "unpaired"]
Key = tuple[str, str, int]  # name of the layer, place, call
HELD = 1 << 27  # bytes of samples whose measures may be put off


class Capture:
    """Statistics of the layers of a stack, filled by hooks while the model runs once inside `with capture:`.

    Args:
        model: a model with this stack.
        stack: its blocks.
        selection: which of its layers to measure.
        places: which places of each block, of `stack.places()`.
        config: how to measure them.
    """

    def __init__(
        self, model: nn.Module, stack: Stack, selection: Selection, places: tuple[str, ...], config: StatsConfig
    ) -> None:
        self.model, self.stack, self.config = model, stack, config
        self.view: View = "first"
        self.only_padding = False  # the last pass had no real tokens
        self.passes = 0  # how often the stack ran in one pass of the model, at most
        self.stats: dict[Key, LayerStats] = {}
        self._paths: dict[Key, str] = {}
        self._waiting: dict[tuple[Key, str], list[Callable[[], None]]] = {}  # halves of updates that were put off
        self._held = 0  # bytes of their samples
        blocks = [stack.blocks[number] for number in selection.blocks]
        self._wanted = _wanted_sites(stack, selection, places)
        self._calls = {(block.places[place], block.call) for block in stack.blocks for place in places}
        with_maps = [block for block in blocks if block.attention and config.attention]
        tiled = all(block.fused for block in with_maps)
        self._attention = {((b.fused if tiled else b.attention), b.call): b.name for b in with_maps}
        self._tiles = TileReader(model, [b.fused for b in with_maps if tiled and b.fused], self._see_tiles)
        read = [*self._wanted] if tiled else [*self._wanted, *self._attention]
        self._watch = SiteReader(model, stack, (site for site, _ in read if site), self._see, self._tiles.restart)
        self._opened = ExitStack()

    def __enter__(self) -> "Capture":
        self.only_padding = False
        with ExitStack() as opened:  # if a later step fails, earlier ones are undone
            if self._tiles.sites:
                opened.enter_context(self._tiles)
            elif self._attention and self.stack.expose_attention is not None:
                opened.enter_context(self.stack.expose_attention(self.model))
            opened.enter_context(self._watch)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.passes = max(self.passes, self._watch.passes)
        self._opened.close()
        if kind is None:
            self._catch_up()
        if self.view == "second" and self.only_padding:
            for stats in self.stats.values():
                stats.forget_first_view()
        self._waiting.clear()

    def layers(self) -> tuple[Layer, ...]:
        """Return what was measured, place by place, in the order of the stack; `modules` in the order they ran."""
        places = sorted(dict.fromkeys(place for _, place, _ in self.stats), key=lambda place: place != OUTPUT)
        keys = self._as_they_ran() if self.stack.family == "named" else sorted(self.stats, key=self._order)
        shown = [key for place in places for key in keys if key[1] == place]
        return tuple(run_side_by_side(partial(self._layer, key) for key in shown))

    def _as_they_ran(self) -> list[Key]:
        """Return the layers in the order in which they ran; what enters a block that is not the first is no "embed"."""
        keys = list(self.stats)
        return [key for key in keys if key[0] != "embed" or key is keys[0]]

    def _order(self, key: Key) -> int:
        """Return the position of a layer in its stack."""
        names = ["embed", *(block.name for block in self.stack.blocks), "final"]
        return names.index(key[0])

    def gather(self) -> None:
        """Merge what all processes measured into the first one; all must call this."""
        own = distributed.merge_on_rank_zero(_Measured(self.stats, self._paths))
        self.stats, self._paths = own.stats, own.paths

    def sequences(self) -> int:
        """Return how many sequences (images, graphs) were seen."""
        return max((stats.sets for stats in self.stats.values()), default=0)

    @property
    def context(self) -> Context:
        """The mask and other context of the last batch."""
        return self._watch.context

    @property
    def graphs(self) -> Tensor | None:
        """The graph of each node, for models that do not take it themselves."""
        return self._watch.graphs

    @graphs.setter
    def graphs(self, batch: Tensor | None) -> None:
        self._watch.graphs = batch

    def _layer(self, key: Key) -> Layer:
        name, place, call = key
        label = name if call == 0 else f"{name} (call {call + 1})"
        try:
            return self.stats[key].layer(label, place, self._paths[key])
        except NotFiniteError as error:
            where = f"At {label} ({self._paths[key] or 'the model'})"
            raise NotFiniteError(f"{where} numbers are too large to be measured: {error}") from error

    def _see(self, site: Site, call: int, x: Tensor) -> None:
        if self.context.mask is not None and not bool(self.context.mask.any()):
            self.only_padding = True
            return
        if self.view == "unpaired":
            return
        if site.what == "attention":
            name = self._attention.get((site, call))
            if name is not None and self.view != "second":
                with self._at((name, OUTPUT, 0), site, x) as stats:
                    stats.update_attention(x, self.context)
            return
        for key in self._keys(site, call):
            with self._at(key, site, x) as stats:
                self._update(key, stats, site, x)

    def _see_tiles(self, site: Site, call: int, tiles: Tiles) -> None:
        name, mask = self._attention.get((site, call)), self.context.mask
        if name is not None and self.view in ("first", "first of two") and (mask is None or bool(mask.any())):
            with self._at((name, OUTPUT, 0), site) as stats:
                stats.update_attention_tiles(tiles, self.context)

    def _keys(self, site: Site, call: int) -> Iterator[Key]:
        """Yield the layers that a site is, at this call of it."""
        if (site, call) in self._wanted:
            yield from ((name, place, 0) for name, place in self._wanted[site, call])
        elif (site, 0) in self._wanted and (site, call) not in self._calls:  # a layer that the model runs again
            yield from ((name, place, call) for name, place in self._wanted[site, 0] if name != "embed")

    @contextmanager
    def _at(self, key: Key, site: Site, x: Tensor | None = None) -> Iterator[LayerStats]:
        """Return the statistics of a layer; say in errors where it is. x: what is measured, to count what is wrong."""
        if key not in self.stats:
            self.stats[key] = LayerStats(self.config)
        if site.what == "tokens":
            self._paths[key] = site.path
        try:
            yield self.stats[key]
        except ValueError as error:
            place = "" if key[1] == OUTPUT else f"{key[1]}, "
            where = f"At {key[0]} ({place}{site.side} of {site.path or 'the model'})"
            if isinstance(error, NotFiniteError):
                counts = "" if x is None else self._not_finite(site, x)
                raise NotFiniteError(f"{where}: {counts or error}") from error
            kind = MisfitError if isinstance(error, MisfitError) else ValueError
            raise kind(f"{where}: {error}") from error

    def _put_off(self, key: Key, site: Site, samples: Samples) -> None:
        """Finish the update of a layer later, side by side with other layers, unless memory is short."""

        def finish(half: Callable[[LayerStats, Samples], None]) -> None:
            with self._at(key, site) as stats:
                half(stats, samples)

        for half in (LayerStats.add_rows, LayerStats.add_sets):
            self._waiting.setdefault((key, half.__name__), []).append(partial(finish, half))
        self._held += samples.size
        if self._held > HELD or samples.rows.device.type != "cpu":
            self._catch_up()

    def _catch_up(self) -> None:
        """Finish the updates that were put off; several of one layer in their order."""
        groups, self._waiting, self._held = list(self._waiting.values()), {}, 0
        run_side_by_side(partial(_run_all, group) for group in groups)

    def _not_finite(self, site: Site, x: Tensor) -> str:
        """Return how many numbers are not finite, without those of padding; "" if none, as when only squares are."""
        if site.what == "tokens":
            layout = self.stack.layout_at(site, x)
            x = numerics.prepare(*sets_with_mask(x, layout, self.context, prefix=self.config.prefix))
        nan, infinite, entries = nonfinite.count_nonfinite(x)
        return nonfinite.describe_counts(nan, infinite, entries) if nan or infinite else ""

    def _update(self, key: Key, stats: LayerStats, site: Site, x: Tensor) -> None:
        context, layout = self.context, self.stack.layout_at(site, x)
        sets, mask = sets_with_mask(x, layout, context, prefix=self.config.prefix)
        vectors = x.dim() == 2 and layout != "nodes"
        views = sets.transpose(0, 1) if vectors else sets  # a vector is a sample of its own
        if self.view == "second":
            stats.pair(views, mask)
            return
        samples = stats.begin_update(sets, mask, context, means=not vectors)
        if layout == "nodes" and context.edge_index is not None:
            stats.update_graph(x, context.edge_index)
        if self.view == "first of two":
            stats.pool(views, mask)
        self._put_off(key, site, samples)


def _run_all(work: list[Callable[[], None]]) -> None:
    for run in work:
        run()


@dataclass(frozen=True)
class _Measured:
    """What one process measured."""

    stats: dict[Key, LayerStats]
    paths: dict[Key, str]

    def merge(self, other: "_Measured") -> "_Measured":
        """Return what both measured, the layers of this one first."""
        shared = self.stats.keys() & other.stats.keys()
        joined = {key: self.stats[key].merge(other.stats[key]) for key in shared}
        return _Measured({**self.stats, **other.stats, **joined}, {**self.paths, **other.paths})


def _wanted_sites(
    stack: Stack, selection: Selection, places: tuple[str, ...]
) -> dict[tuple[Site, int], list[tuple[str, str]]]:
    """Return (site, call) -> the layers that it is, as (name, place); one site may be two layers."""
    wanted: dict[tuple[Site, int], list[tuple[str, str]]] = {}
    for name, site, chosen in (("embed", stack.embed, selection.embed), ("final", stack.final, selection.final)):
        if site is not None and chosen:
            wanted.setdefault((site, 0), []).append((name, OUTPUT))
    for block in (stack.blocks[number] for number in selection.blocks):
        for place in places:
            wanted.setdefault((block.places[place], block.call), []).append((block.name, place))
    return wanted
