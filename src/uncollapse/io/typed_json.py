"""Dataclasses from what JSON has of them: every value is compared with the type of its field."""

import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any

LARGEST = 2**63  # of a whole number
DEEPEST = 16  # values within values, where a field takes any
UNIONS = (typing.Union, UnionType)
WORDS = {str: "text", int: "a whole number", float: "a finite number", bool: "true or false", NoneType: "null"}


def parse(text: str | bytes) -> Any:
    """What a text in JSON says. ValueError if it is none, or has NaN or infinity, which JSON does not know."""

    def refuse(word: str) -> None:
        raise ValueError(f"it has the number {word}, which JSON does not know")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("it has lists within lists without end") from error


def build(cls: Any, state: Any, where: str = "it") -> Any:
    """A dataclass from what `dataclasses.asdict` and JSON made of it; ValueError if a value does not fit its field.

    Args:
        cls: the dataclass, whose fields are plain values, dataclasses, and tuples and mappings of these.
        state: what JSON has.
        where: what to call it in an error.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"{where} is an object of JSON, got {_told(state)}")
    kinds, fields = typing.get_type_hints(cls), {field.name: field for field in dataclasses.fields(cls)}
    unknown = next((name for name in state if name not in fields), None)
    if unknown is not None:
        raise ValueError(f"{where} has the unknown entry {_told(unknown)}")
    for name, field in fields.items():
        if name not in state and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where} has no entry {name!r}")
    return cls(**{name: _value(kinds[name], value, name) for name, value in state.items()})


def _value(kind: Any, value: Any, where: str) -> Any:
    """A value of a field of this type."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return build(kind, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_value(inner[0], item, where) for item in value)
    if origin in (Mapping, dict) and isinstance(value, Mapping):
        return {key: _value(inner[1], item, f"{where}[{_told(key)}]") for key, item in value.items()}
    if kind is Any and _is_plain(value, DEEPEST):
        return value
    if origin in UNIONS and value is not None and len(inner) == 2:  # something or None
        return _value(inner[0], value, where)
    if not any(_fits(one, value) for one in (inner if origin in UNIONS else (kind,))):
        raise ValueError(f"{where} is {_words(kind)}, got {_told(value)}")
    return value


def _fits(kind: Any, value: Any) -> bool:
    if typing.get_origin(kind) is typing.Literal:
        return value in typing.get_args(kind)
    if type(value) is int and kind in (int, float):
        return abs(value) < LARGEST
    return kind in WORDS and type(value) is kind and (kind is not float or math.isfinite(value))


def _is_plain(value: Any, deepest: int) -> bool:
    if isinstance(value, Mapping | list):
        items = value.values() if isinstance(value, Mapping) else value
        return deepest > 0 and all(_is_plain(item, deepest - 1) for item in items)
    return True


def _words(kind: Any) -> str:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin in UNIONS:
        return " or ".join(map(_words, inner))
    plain = f"a value at most {DEEPEST} deep" if kind is Any else "an object of JSON"
    return "a list" if origin is tuple else WORDS.get(kind, plain)


def _told(value: Any) -> str:
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
