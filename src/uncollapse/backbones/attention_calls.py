"""Intercept the attention of a model: read its maps tile by tile, or apply its map twice, A(Av).

torch's `scaled_dot_product_attention` never forms the map. Here it is computed from one tile of the map after the
other, each of which can be read before it is forgotten: the model's attention is computed once, and no map is ever
stored.

Attention modules of transformers look their function up by a name in their config. While a cure needs A(Av), a module
has a copy of the config with another name; the config of the model, and what is saved of it, stay as they are.
"""

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from uncollapse.backbones.sites import Site
from uncollapse.pairwise import numerics

TILE = 1 << 19  # entries of a tile: 2 MiB, which stay in the cache
IMPLEMENTATION = "_attn_implementation_internal"  # the public name also changes the configs of other towers
NAME, HOLDER = "uncollapse_twice", "uncollapse_twice"  # of the function for A(Av); of the config's attribute


@dataclass(frozen=True)
class Tile:
    """Rows of attention maps after the softmax, (b', heads, r, n). first: the number of the first map in the batch.

    row: the number of the first row. It may be overwritten.
    """

    maps: Tensor
    first: int = 0
    row: int = 0


@dataclass(frozen=True)
class Tiles:
    """The maps of one call of attention. shape: (b, heads, n, n) of all. each: functions that compute their tiles.

    Tiles do not depend on each other, so several threads can compute and read them.
    """

    shape: torch.Size
    each: Sequence[Callable[[], Tile]]


OnTiles = Callable[[Site, int, Tiles], None]


class TileReader(TorchFunctionMode):
    """Reads the maps of some attention modules, inside `with reader:`.

    Args:
        model: a model with these modules.
        sites: the modules; each calls `scaled_dot_product_attention` for its map, first if it calls it several times.
        receive: called with a site, the number of this call of it since `restart`, and the tiles.
    """

    def __init__(self, model: nn.Module, sites: Iterable[Site], receive: OnTiles) -> None:
        super().__init__()
        self.model, self.sites, self._receive = model, list(dict.fromkeys(sites)), receive
        self._calls: Counter[Site] = Counter()
        self._site: Site | None = None  # of the module that runs and has not called attention yet
        self._hooks = ExitStack()

    def restart(self) -> None:
        """Count calls from 0 again, as a new pass begins."""
        self._calls.clear()

    def __enter__(self) -> "TileReader":
        super().__enter__()  # type: ignore[no-untyped-call]
        self.restart()
        for site in self.sites:
            module = self.model.get_submodule(site.path)
            self._hooks.callback(module.register_forward_pre_hook(lambda *_, site=site: self._open(site)).remove)
            self._hooks.callback(module.register_forward_hook(lambda *_: self._open(None), always_call=True).remove)
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _open(self, site: Site | None) -> None:
        self._site = site

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention or self._site is None:
            return func(*args, **(kwargs or {}))
        site, self._site = self._site, None
        attention = _Attention(*args, **(kwargs or {}))
        if attention.dropout_p or not attention.is_square:
            return func(*args, **(kwargs or {}))
        call = self._calls[site]
        self._calls[site] += 1
        self._receive(site, call, Tiles(attention.shape, attention.tiles()))
        return attention.output if attention.is_complete else func(*args, **(kwargs or {}))  # nobody read its maps


class _Attention:
    """A call of `scaled_dot_product_attention`, with the arguments of that function."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        self.query, self.key, self.value, self.dropout_p = query, key, value, dropout_p
        self.is_square = query.dim() == key.dim() == 4 and query.shape[-2] == key.shape[-2]
        if not self.is_square:
            return
        if enable_gqa:
            self.key, self.value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        self.shape = torch.Size((*query.shape[:-1], key.shape[-2]))
        self.mask = None if attn_mask is None else attn_mask.expand(self.shape)
        self.causal = is_causal
        self.scale = query.shape[-1] ** -0.5 if scale is None else scale
        self.output = query.new_empty(*query.shape[:-1], value.shape[-1])
        self._left: set[tuple[int, int]] = set()  # tiles that were not computed yet, by their first map and row

    def tiles(self) -> list[Callable[[], Tile]]:
        """Return functions that compute the tiles of the maps, and write the output of each."""
        sets, heads, n, _ = self.shape
        step = max(1, TILE // max(1, heads * n * n))
        rows = n if heads * n * n <= TILE else max(1, TILE // (heads * n))
        self._left = {(first, row) for first in range(0, sets, step) for row in range(0, n, rows)}
        return [partial(self._attend, first, row, step, rows) for first, row in sorted(self._left)]

    @property
    def is_complete(self) -> bool:
        """Whether every tile was computed."""
        return not self._left

    def _attend(self, first: int, row: int, step: int, rows: int) -> Tile:
        part, place = slice(first, first + step), (slice(first, first + step), slice(None), slice(row, row + rows))
        query, key, value = (numerics.to_full(x) for x in (self.query[place], self.key[part], self.value[part]))
        with torch.autocast(query.device.type, enabled=False):
            maps = self._softmax(place, query * self.scale @ key.mT)
            self.output[place] = (maps @ value).to(self.output.dtype)
        self._left.discard((first, row))
        return Tile(maps, first, row)

    def _softmax(self, place: tuple[slice, ...], logits: Tensor) -> Tensor:
        """Return the softmax of logits, which are overwritten; 0 in rows that see no key."""
        if self.causal:
            mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril(place[2].start)
        elif self.mask is None:
            return logits.softmax(-1)
        else:
            mask = self.mask[place]
        logits = logits.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else logits.add_(mask)
        blind = logits.amax(-1, keepdim=True) == -torch.inf
        maps = logits.softmax(-1)
        return maps.masked_fill_(blind, 0) if bool(blind.any()) else maps


def attend_twice(module: nn.Module, receive: Callable[[Tensor], Tensor]) -> Any:
    """Return a config for an attention module with which it calls `receive` with A(Av) (b, heads, n, d)."""
    config: Any = copy.copy(module.config)
    setattr(config, HOLDER, Twice(getattr(config, IMPLEMENTATION), receive))
    setattr(config, IMPLEMENTATION, NAME)
    return config


def implementation_of(config: Any) -> tuple[Any, str]:
    """Return the object and the name of its attribute where the name of the model's own attention function is."""
    return (getattr(config, HOLDER), "plain") if hasattr(config, HOLDER) else (config, IMPLEMENTATION)


class Twice:
    """An attention function of transformers that runs another one twice.

    Args:
        plain: name of the other.
        receive: called with A(Av).
    """

    def __init__(self, plain: str, receive: Callable[[Tensor], Tensor]) -> None:
        self.plain, self.receive = plain, receive
        _register()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _register()  # this may be another process

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return Av (b, n, heads, d), and A if the plain function returns it."""
        own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        plain: Any = _functions().get_interface(self.plain, own)
        output, maps = plain(module, query, key, value, *args, **options)
        context, repeats = output.transpose(1, 2), query.shape[1] // value.shape[1]
        # Query heads that share keys have contexts of their own: each of them in turn stands in for the values.
        parts = [plain(module, query, key, context[:, n::repeats], *args, **options)[0] for n in range(repeats)]
        own_heads = [part.transpose(1, 2)[:, n::repeats] for n, part in enumerate(parts)]
        self.receive(torch.stack(own_heads, 2).flatten(1, 2))
        return output, maps


def _attend(module: nn.Module, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Run the function that the config of an attention module holds."""
    twice: Twice = getattr(module.config, HOLDER)
    return twice(module, *args, **options)


def _functions() -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS


def _register() -> None:
    if NAME not in _functions():
        _functions().register(NAME, _attend)
