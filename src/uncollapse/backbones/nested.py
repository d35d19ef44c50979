"""Find, read and replace a tensor in what modules take and return: tuples, lists, mappings and dataclasses."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

FIRST = ("last_hidden_state", "hidden_states")  # fields that hold tokens, whatever stands before them


def find_tensor(value: Any, fits: Callable[[Tensor], bool]) -> tuple[Any, ...] | None:
    """Return the keys of the first fitting tensor in nested tuples, lists, mappings and dataclasses; None if none fits.

    A tensor named `last_hidden_state` or `hidden_states` comes before others. Objects such as caches are not searched.
    ValueError for sequences of several lengths in one packed or nested tensor.
    """
    if isinstance(value, PackedSequence) or (isinstance(value, Tensor) and value.is_nested):
        raise ValueError(
            f"Expected tokens (batch, n, features), got a {type(value).__name__} of sequences of several lengths, "
            "whose rows must not be taken for one sequence. Run the model on padded batches with a mask, or on one "
            "sequence at a time, and use a module that takes these."
        )
    if isinstance(value, Tensor):
        return () if fits(value) else None
    for key, item in _items(value):
        found = find_tensor(item, fits)
        if found is not None:
            return (key, *found)
    return None


def _items(value: Any) -> list[tuple[Any, Any]]:
    """Return the keys and values of a container; none of other objects."""
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    named = dict(value) if isinstance(value, Mapping) else _fields(value)
    first = [name for name in FIRST if isinstance(named.get(name), Tensor)]
    return [(name, named[name]) for name in dict.fromkeys((*first, *named))]


def _fields(value: Any) -> dict[str, Any]:
    if not is_dataclass(value) or isinstance(value, type):
        return {}
    return {field.name: getattr(value, field.name, None) for field in fields(value)}


def _has_keys(value: Any) -> bool:
    return isinstance(value, tuple | list | Mapping)


def get_nested(value: Any, keys: tuple[Any, ...]) -> Any:
    """Return the value at these keys; those of a dataclass are its fields."""
    for key in keys:
        value = value[key] if _has_keys(value) else getattr(value, key)
    return value


def set_nested(value: Any, keys: tuple[Any, ...], new: Any) -> Any:
    """Return a copy of nested tuples, lists, mappings and dataclasses with a new value at these keys."""
    if not keys:
        return new
    inner = set_nested(get_nested(value, keys[:1]), keys[1:], new)
    if isinstance(value, tuple | list):
        items = [inner if number == keys[0] else item for number, item in enumerate(value)]
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    copied: Any = copy.copy(value)
    if isinstance(value, Mapping):
        copied[keys[0]] = inner
    else:
        object.__setattr__(copied, keys[0], inner)  # also of a frozen dataclass
    return copied


def describe(value: Any) -> str:
    """Return what a module took or returned, in a few words: its class, its fields and the shapes of its tensors."""
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    kind = type(value).__name__
    if isinstance(value, tuple | list):
        return f"a {kind} of {len(value)}: {', '.join(map(describe, value[:8]))}" if value else f"an empty {kind}"
    named = dict(value) if isinstance(value, Mapping) else _fields(value) or getattr(value, "__dict__", {})
    parts = [
        f"{name} ({describe(part) if isinstance(part, Tensor) else type(part).__name__})"
        for name, part in named.items()
    ]
    return f"a {kind} with {', '.join(parts[:12])}" if parts else f"a {kind}"
