"""Registries: a name -> a function or class with its facts. An unknown name is an error that lists the choices.

Contract tests, `diagnose` and the command line read the facts; there is no other list of names.
"""

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from uncollapse.errors import did_you_mean

F = TypeVar("F", bound=Callable[..., Any])
E = TypeVar("E")

Need = Literal["tokens", "pairs", "attention", "edges", "labels", "views", "patches"]
ActsOn = Literal["tokens", "values", "attention", "edges"]
FIXED_PLACES: Mapping[str, tuple[str, ...]] = {
    "values": ("attention.values",),
    "attention": ("attention.context",),
    "edges": ("edges",),
}
SUPPLIED = ("dim", "dim_in", "heads", "depth", "blocks")  # arguments of a cure's module that `attach` fills in


@dataclass(frozen=True)
class Metric:
    """A metric: a pure function on tensors.

    needs: what it takes, in the order of its arguments: `tokens` (..., n, d), `pairs` (a second x of the same shape),
    `attention` (..., heads, n, n), `edges` (2, E), `labels` (n,), `views` (n, q, d), `patches` (b, n, d).
    better: the direction away from collapse, None if there is none. bounds: smallest and largest possible value.
    """

    name: str
    function: Callable[..., Any]
    needs: tuple[Need, ...]
    better: Literal["higher", "lower"] | None
    bounds: tuple[float | None, float | None]
    paper: str


@dataclass(frozen=True)
class Cure:
    """A layer to put into a model: the pure function, the module around it, and what it acts on.

    cost: of one pass over n tokens or nodes with d features. use: the models that it is for.
    attached: arguments of the module that differ from its defaults when it is attached to an existing model.
    place: its default places, as far as a model has them, see `uncollapse.places`. elsewhere: alternatives for a model
    that has none of them. mixes: whether the cure itself lets tokens depend on each other; if not, it needs no mask,
    and prefix tokens and padding are treated like all others. pre_norm: whether only blocks with pre-norm can have it.
    """

    name: str
    function: Callable[..., Any]
    layer: type
    acts_on: ActsOn
    paper: str
    cost: str = ""
    use: str = ""
    attached: Mapping[str, Any] = field(default_factory=dict)
    place: tuple[str, ...] = ("attention.residual",)
    elsewhere: tuple[str, ...] = ("conv.output", "block")
    mixes: bool = True
    pre_norm: bool = False

    def default_places(self) -> str:
        """Return where `attach` puts this cure by default."""
        own, others = FIXED_PLACES.get(self.acts_on, self.place), self.elsewhere if self.acts_on == "tokens" else ()
        return ", ".join(own) + (f"; else {' or '.join(others)}" if others else "")

    def takes(self, name: str) -> bool:
        """Return whether the forward pass of the module takes an argument of this name."""
        return name in inspect.signature(self.layer.forward).parameters  # type: ignore[attr-defined]

    @property
    def takes_earlier(self) -> bool:
        """Return whether the module takes a tensor of an earlier block."""
        return self.takes("first") or self.takes("previous")

    def options(self) -> tuple[str, ...]:
        """Return the options of `attach` for this cure, with their defaults."""
        given = {name: p.default for name, p in inspect.signature(self.layer).parameters.items()} | dict(self.attached)
        own = ((name, value) for name, value in given.items() if name not in SUPPLIED)
        return tuple(name if value is inspect.Parameter.empty else f"{name}={value!r}" for name, value in own)


@dataclass(frozen=True)
class Loss:
    """A loss to add to training: a function of tensors that returns a scalar."""

    name: str
    function: Callable[..., Any]
    needs: tuple[str, ...]
    paper: str


@dataclass(frozen=True)
class Lazy(Generic[E]):
    """An entry that is loaded when it is first used."""

    load: Callable[[], E]


class Registry(Mapping[str, E]):
    """Entries by name, in the order in which they were added.

    kind: what error messages call an entry. package: where entries are registered; it is imported on first use.
    """

    def __init__(self, kind: str, package: str | None = None) -> None:
        self._kind, self._package = kind, package
        self._entries: dict[str, E | Lazy[E]] = {}

    def add(self, name: str, entry: E | Lazy[E]) -> None:
        """Add an entry under a new name."""
        if name in self._entries:
            raise ValueError(f"A {self._kind} named {name!r} is registered already. Choose another name.")
        self._entries[name] = entry

    def __getitem__(self, name: str) -> E:
        entries = self._loaded_entries()
        if name not in entries:
            hint = did_you_mean(name, entries)
            raise KeyError(f"No {self._kind} is named {name!r}.{hint} There are: {', '.join(entries)}.")
        entry = entries[name]
        if isinstance(entry, Lazy):
            entry = entries[name] = entry.load()
        return entry

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded_entries())

    def __len__(self) -> int:
        return len(self._loaded_entries())

    def _loaded_entries(self) -> dict[str, E | Lazy[E]]:
        if self._package is not None and self._package not in sys.modules:
            importlib.import_module(self._package)
        return self._entries


METRICS: Registry[Metric] = Registry("metric", "uncollapse.metrics")
CURES: Registry[Cure] = Registry("cure", "uncollapse.cures")
LOSSES: Registry[Loss] = Registry("loss", "uncollapse.losses")
RENDERERS: Registry[Callable[..., Any]] = Registry("renderer", "uncollapse.report")  # how a diagnosis is shown


def discover(package: str, path: Iterable[str]) -> None:
    """Import every module of a package, so that a file dropped into its folder is registered like the others."""
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")


def metric(
    *,
    needs: tuple[Need, ...] = ("tokens",),
    better: Literal["higher", "lower"] | None,
    bounds: tuple[float | None, float | None] = (None, None),
    paper: str,
) -> Callable[[F], F]:
    """Register the decorated function as a metric under its own name."""

    def register(function: F) -> F:
        METRICS.add(function.__name__, Metric(function.__name__, function, needs, better, bounds, paper))
        return function

    return register


def cure(function: Callable[..., Any], *, acts_on: ActsOn, paper: str, **facts: Any) -> Callable[[type[E]], type[E]]:
    """Register the decorated module as the layer around `function`, under the function's name; facts: see `Cure`."""

    def register(layer: type[E]) -> type[E]:
        CURES.add(function.__name__, Cure(function.__name__, function, layer, acts_on, paper, **facts))
        return layer

    return register


def loss(*, needs: tuple[str, ...], paper: str) -> Callable[[F], F]:
    """Register the decorated function as a loss under its own name."""

    def register(function: F) -> F:
        LOSSES.add(function.__name__, Loss(function.__name__, function, needs, paper))
        return function

    return register
