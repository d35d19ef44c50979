"""Which places and which blocks of a stack are meant."""

from collections.abc import Sequence

from uncollapse.backbones.sites import Site, Stack
from uncollapse.errors import did_you_mean
from uncollapse.registry import Cure

At = str | int | Sequence[str | int]
Layers = int | slice | str | Sequence[int]


def ends(stack: Stack) -> dict[str, Site]:
    """The places behind the blocks."""
    if stack.final is None or stack.final.side == "input" or stack.layout == "nodes":
        return {}
    return {"final.norm.input": Site(stack.final.path, "input"), "final.norm": stack.final}


def places_of(stack: Stack, cure: Cure, at: At | None) -> tuple[str, ...]:
    """The places that are meant, or an error that lists those there are."""
    fixed = {"attention": "attention.context", "edges": "edges"}.get(cure.acts_on)
    if fixed is not None:
        if at not in (None, fixed, [fixed], (fixed,)):
            raise ValueError(f"{cure.name} acts on {cure.acts_on}: its place is {fixed!r}, got at={at!r}.")
        return (fixed,)
    known = (*stack.places(), *ends(stack))
    if at is None:
        return (next(place for place in (cure.place, "conv.output", "block") if place in known),)
    wanted = [at] if isinstance(at, str | int) else at
    if not isinstance(wanted, Sequence | set) or not all(isinstance(one, str | int) for one in wanted):
        raise ValueError(f"at must be the name of a place or a list of them, got {at!r}. {_listed(stack, known)}")
    found = [place for one in wanted for place in _named(stack, one, known)]
    if not found:
        raise ValueError(f"at must name at least one place. {_listed(stack, known)}")
    return tuple(dict.fromkeys(found))


def _named(stack: Stack, place: str | int, known: tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(place, int):
        if place not in stack.numbers:
            raise ValueError(f"{stack.architecture} has no place with the number {place}. {_listed(stack, known)}")
        return (stack.numbers[place],)
    if place == "norms":
        return _norms(stack, known)
    if place not in known:
        hint = did_you_mean(place, known)
        raise ValueError(f"{stack.architecture} has no place {place!r}.{hint} {_listed(stack, known)}")
    return (place,)


def _norms(stack: Stack, known: tuple[str, ...]) -> tuple[str, ...]:
    """The inputs of all norms: in blocks with post-norm they are the sums that the norms stand behind."""
    inner = [place for place in stack.places() if place.endswith(".norm.input")]
    inner = inner or [place for place in stack.places() if place.endswith(".residual")]
    if not inner:
        raise ValueError(f"The norms within the blocks of {stack.architecture} are not known. {_listed(stack, known)}")
    return (*inner, *(place for place in ends(stack) if place.endswith(".input")))


def _listed(stack: Stack, known: tuple[str, ...]) -> str:
    number = {place: number for number, place in stack.numbers.items()}
    names = (f"{place} ({number[place]})" if place in number else place for place in known)
    return f"There are: {', '.join(names)}."


def blocks_of(stack: Stack, layers: Layers | None) -> tuple[int, ...]:
    """Numbers of the blocks that are meant, ascending, or an error that says what can be chosen."""
    count = len(stack.blocks)
    every = range(count)
    if layers is None:
        return tuple(every)
    try:
        if isinstance(layers, str):
            found = _worded(every, layers)
        elif isinstance(layers, slice):
            found = list(every[layers])
        else:
            found = [every[number] for number in ([layers] if isinstance(layers, int) else layers)]
    except (IndexError, ValueError, TypeError) as error:
        raise ValueError(
            f"layers must choose among the {count} blocks by a number from {-count} to {count - 1}, a list of them, a "
            f'slice, "all", "first 4", "last 4" or "4:8", got {layers!r}.'
        ) from error
    if not found:
        raise ValueError(f"layers={layers!r} chooses none of the {count} blocks.")
    return tuple(sorted(set(found)))


def _worded(every: range, layers: str) -> list[int]:
    if layers in ("all", "first", "last"):
        return {"all": list(every), "first": [every[0]], "last": [every[-1]]}[layers]
    if ":" in layers:
        return list(every[slice(*(int(part) if part.strip() else None for part in layers.split(":")))])
    end, number = layers.split()
    if not 0 < int(number) <= len(every) or end not in ("first", "last"):
        raise ValueError(layers)
    return list(every[: int(number)] if end == "first" else every[-int(number) :])
