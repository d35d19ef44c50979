"""The one grammar of `layers`, `at` and `tokens`, which choose places in a stack of blocks.

`diagnose`, `attach`, `tokens`, `places` and `Monitor` all read these arguments here:

- `layers`, which blocks: `select_layers(stack, layers) -> Selection`
- `at`, where in a block: `select_places(stack, at) -> names of places`
- `tokens`, which tokens of a sequence: `check_tokens(tokens)`

`modules`, `part` and `layout` choose the stack itself: see `uncollapse.backbones.find`.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from uncollapse.backbones.sites import OUTPUT, Site, Stack
from uncollapse.errors import did_you_mean

At = str | int | Sequence[str | int]
Layers = int | str | slice | Sequence[int | str]
TokenChoice = Literal["patches", "all"]

EMBED, FINAL = "embed", "final"  # the layers that are not blocks


@dataclass(frozen=True)
class Selection:
    """Selected layers of a stack.

    blocks: their numbers, ascending. embed: also what enters block 0. final: also what leaves the last norm.
    """

    blocks: tuple[int, ...] = ()
    embed: bool = False
    final: bool = False


def select_layers(stack: Stack, layers: Layers | None, *, ends: bool = True) -> Selection:
    """Return the layers of a stack that `layers` selects.

    Args:
        stack: of `uncollapse.backbones.find`.
        layers: a number of a block, negative from the end; "first", "last", "first 4", "last 4", "4:8"; a slice;
            "block 3" or another name of a block; "embed" for what enters block 0; "final" for what leaves the last
            norm; a list of any of these; "all" or None for every layer.
        ends: whether "embed" and "final" can be selected. Where they cannot, asking for one is an error, and None
            selects all blocks.

    Raises:
        ValueError: if a layer does not exist or nothing is selected. The message lists what there is.

    >>> from torch import nn
    >>> from uncollapse import backbones
    >>> stack = backbones.find(nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 4))
    >>> select_layers(stack, ["embed", "last 2"])
    Selection(blocks=(2, 3), embed=True, final=False)
    >>> select_layers(stack, None, ends=False).blocks
    (0, 1, 2, 3)
    """
    layers = "all" if layers is None else layers
    entries = [layers] if isinstance(layers, str | int | slice) else layers
    if not isinstance(entries, Iterable):
        raise ValueError(_unknown_layer(stack, layers, ends))
    names: set[Any] = {name for entry in entries for name in _select_entry(stack, entry, ends)}
    if not names:
        raise ValueError(
            f"layers={layers!r} selects none of the {len(stack.blocks)} blocks. {_list_layers(stack, ends)}"
        )
    return Selection(tuple(sorted(names - {EMBED, FINAL})), EMBED in names, FINAL in names)


def _select_entry(stack: Stack, entry: Any, ends: bool) -> Iterable[int | str]:
    if isinstance(entry, str) and entry in (EMBED, FINAL):
        if not ends:
            raise ValueError(
                f"layers={entry!r} is not a block; only blocks can be selected here. {_list_layers(stack, ends)}"
            )
        if entry not in _end_sites(stack):
            raise ValueError(_unknown_layer(stack, entry, ends))
        return (entry,)
    every = range(len(stack.blocks))
    if isinstance(entry, str) and entry == "all":
        return (*every, *(_end_sites(stack) if ends else ()))
    try:
        if isinstance(entry, str):
            return _read_words(stack, entry)
        return every[entry] if isinstance(entry, slice) else (every[entry],)
    except (IndexError, ValueError, TypeError) as error:
        raise ValueError(_unknown_layer(stack, entry, ends)) from error


def _read_words(stack: Stack, words: str) -> Sequence[int]:
    every = range(len(stack.blocks))
    if words in ("first", "last"):
        return every[:1] if words == "first" else every[-1:]
    names = [block.name for block in stack.blocks]
    if words in names:
        return (names.index(words),)
    if ":" in words:
        return every[slice(*(int(part) if part.strip() else None for part in words.split(":")))]
    end, number = words.split()
    if not 0 < int(number) <= len(every) or end not in ("first", "last"):
        raise ValueError(words)
    return every[: int(number)] if end == "first" else every[-int(number) :]


def _end_sites(stack: Stack) -> dict[str, Site]:
    return {name: site for name, site in ((EMBED, stack.embed), (FINAL, stack.final)) if site is not None}


def _unknown_layer(stack: Stack, layer: Any, ends: bool) -> str:
    names = (*(block.name for block in stack.blocks), "first", "last", "all", *(_end_sites(stack) if ends else ()))
    hint = did_you_mean(layer, names) if isinstance(layer, str) else ""
    if isinstance(layer, str) and re.fullmatch(r"(first|last) \d+", layer):
        count = len(stack.blocks)
        hint = f" It has {count} block{'' if count == 1 else 's'}."
    return f"{stack.architecture} has no layer {layer!r}.{hint} {_list_layers(stack, ends)}"


def _list_layers(stack: Stack, ends: bool) -> str:
    count = len(stack.blocks)
    few = min(4, count)  # examples that this stack has
    part = "4:8" if count >= 8 else f"{count // 2}:{count}"
    others = "".join(f', "{name}"' for name in (_end_sites(stack) if ends else ()))
    return (
        f"layers can be: numbers of blocks from {-count} to {count - 1}, a list or a slice of them, "
        f'"all", "first", "last", "first {few}", "last {few}", "{part}"{others}.'
    )


def select_places(stack: Stack, at: At | None, *, ends: bool = False) -> tuple[str, ...]:
    """Return the names of the places in a block that `at` selects, in the order asked for.

    Args:
        stack: of `uncollapse.backbones.find`.
        at: the name of a place, a number of the ContraNorm paper, or "norms" for the input of every norm; or a list of
            these. None is "block", the residual stream after a block.
        ends: whether the places of the last norm, which stands after all blocks, can be selected too.

    Raises:
        ValueError: if a place does not exist or nothing is selected. The message lists what there is.

    >>> from torch import nn
    >>> from uncollapse import backbones
    >>> stack = backbones.find(nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 4))
    >>> select_places(stack, ["block", "norms"])
    ('block', 'attention.residual', 'mlp.residual')
    """
    known = (*stack.places(), *(final_places(stack) if ends else ()))
    if at is None:
        return (OUTPUT,)
    entries = [at] if isinstance(at, str | int) else at
    if not isinstance(entries, Sequence | set) or not all(isinstance(entry, str | int) for entry in entries):
        raise ValueError(f"at must be the name of a place or a list of names, got {at!r}. {_list_places(stack, known)}")
    found = [place for entry in entries for place in _read_place(stack, entry, known)]
    if not found:
        raise ValueError(f"at must name at least one place. {_list_places(stack, known)}")
    return tuple(dict.fromkeys(found))


def final_places(stack: Stack) -> dict[str, Site]:
    """Return the places after the blocks, by name: the input and the output of the last norm."""
    if stack.final is None or stack.final.side == "input" or stack.layout == "nodes":
        return {}
    return {"final.norm.input": Site(stack.final.path, "input"), "final.norm": stack.final}


def _read_place(stack: Stack, place: str | int, known: tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(place, int):
        if place not in stack.numbers:
            raise ValueError(f"{stack.architecture} has no place with the number {place}. {_list_places(stack, known)}")
        return (stack.numbers[place],)
    if place == "norms":
        return _norm_inputs(stack, known)
    if place not in known:
        hint = did_you_mean(place, known)
        raise ValueError(f"{stack.architecture} has no place {place!r}.{hint} {_list_places(stack, known)}")
    return (place,)


def _norm_inputs(stack: Stack, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the inputs of all norms. In blocks with post-norm these are the sums that the norms follow."""
    inner = [place for place in stack.places() if place.endswith(".norm.input")]
    inner = inner or [place for place in stack.places() if place.endswith(".residual")]
    if not inner:
        raise ValueError(
            f"The norms within the blocks of {stack.architecture} are not known. {_list_places(stack, known)}"
        )
    return (*inner, *(place for place in final_places(stack) if place in known and place.endswith(".input")))


def _list_places(stack: Stack, known: tuple[str, ...]) -> str:
    number = {place: number for number, place in stack.numbers.items()}
    names = (f"{place} ({number[place]})" if place in number else place for place in known)
    return f"There are: {', '.join(names)}."


def check_tokens(tokens: str) -> None:
    """Raise ValueError unless `tokens` is "patches" or "all".

    "patches" leaves out CLS, distillation and register tokens, where a model has them. It is the default everywhere.
    """
    if tokens not in get_args(TokenChoice):
        raise ValueError(f'tokens must be "patches" or "all", got {tokens!r}.')
