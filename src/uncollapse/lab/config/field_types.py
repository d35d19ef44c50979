"""Values of a field by its type: int, float, bool, str, Literal, tuples of them, and any of these or None."""

import json
import math
from collections.abc import Callable, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

YES, NO, NOTHING = ("true", "yes", "on", "1"), ("false", "no", "off", "0"), ("none", "null")
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "none"}
LARGEST = 2**63  # of a whole number: torch has no larger ones
SEVERAL = {int: "whole numbers", float: "numbers", bool: "true or false", str: "words"}


def parse(value: Any, kind: Any, choices: Sequence[Any] | None = None) -> Any:
    """The value in this type, from text or from what JSON or YAML made of it; a ValueError if it cannot be.

    >>> parsed("16", int), parsed("none", float | None), parsed("2,4", tuple[int, ...]), parsed("1", float)
    (16, None, (2, 4), 1.0)
    """
    kinds = union_members(kind)
    if NoneType in kinds and (value is None or (isinstance(value, str) and value.lower() in NOTHING)):
        return None
    for member in kinds[:-1] if kinds[-1] is NoneType else kinds:
        try:
            found = _READERS.get(get_origin(member) or member, _refuse)(value, member)
        except (ValueError, OverflowError, RecursionError):
            continue
        several = found if isinstance(found, tuple) else (found,)
        if choices is None or all(one in choices for one in several):
            return found
    raise ValueError(f"{quote(value)} is not {describe_type(kind, choices)}")


def describe_type(kind: Any, choices: Sequence[Any] | None = None) -> str:
    """What is allowed, in words.

    >>> expected(float | None), expected(tuple[int, ...]), expected(str, ("none", "layer"))
    ('a number or none', 'whole numbers with commas between', 'one of none, layer')
    """
    return " or ".join(_words(member, choices) for member in union_members(kind))


def as_text(value: Any) -> str:
    """How a value is written on the command line; `parsed` reads it back.

    >>> as_text(None), as_text(True), as_text((2, 4)), as_text(5e-4), as_text(("a,b",))
    ('none', 'true', '2,4', '0.0005', '["a,b"]')
    """
    if isinstance(value, tuple):
        text = ",".join(map(as_text, value))
        plain_text = not text.startswith("[") and _split(text) == [as_text(one) for one in value]
        return text if plain_text else json.dumps(value)
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def quote(value: Any, most: int = 200) -> str:
    """A value that is not allowed, for an error: in quotes, and not longer than so many letters.

    >>> told(True), told("x" * 300, 10)
    ("'true'", "'xxxxxxxx…")
    """
    try:
        text = repr(as_text(value))
    except (ValueError, RecursionError):  # Python writes no numbers of thousands of digits
        return "something endless"
    return text if len(text) <= most else f"{text[: most - 1]}…"


def to_json(value: Any, kind: Any) -> Any:
    """The value for JSON, written the same however it was given: a float that was given as 1 is 1.0."""
    if isinstance(value, tuple):
        return [to_json(one, _element(union_members(kind)[0], at)) for at, one in enumerate(value)]
    whole = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if whole and float in (kinds := union_members(kind)) and int not in kinds else value


def union_members(kind: Any) -> tuple[Any, ...]:
    """The types that a union has; None is the last, as it is in words."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return tuple(sorted(kinds, key=lambda member: member is NoneType))


def _element(kind: Any, at: int) -> Any:
    """The type of an element of a tuple."""
    kinds = get_args(kind)
    return kinds[0] if kinds[-1] is Ellipsis else kinds[at]


def _words(kind: Any, choices: Sequence[Any] | None) -> str:
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        several = f"some of {', '.join(map(as_text, choices))}" if choices else SEVERAL[kinds[0]]
        return f"{'' if kinds[-1] is Ellipsis else f'{len(kinds)} '}{several} with commas between"
    allowed = get_args(kind) if get_origin(kind) is Literal else choices
    if allowed and kind is not NoneType:
        return f"one of {', '.join(map(as_text, allowed))}"
    return WORDS[kind]


def _split(text: str) -> list[Any]:
    if text.startswith("["):
        return list(json.loads(text))
    return [part.strip() for part in text.split(",")] if text.strip() else []


def _int(value: Any, _: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(value)
    number = int(value)
    if abs(number) >= LARGEST:
        raise ValueError(number)
    return number


def _float(value: Any, _: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str) or not math.isfinite(float(value)):
        raise ValueError(value)
    return float(value)


def _bool(value: Any, _: Any) -> bool:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.lower() not in YES + NO:
        raise ValueError(value)
    return value.lower() in YES


def _str(value: Any, _: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return value


def _literal(value: Any, kind: Any) -> Any:
    for choice in get_args(kind):
        if (type(choice) is type(value) and choice == value) or (isinstance(value, str) and as_text(choice) == value):
            return choice
    raise ValueError(value)


def _tuple(value: Any, kind: Any) -> tuple[Any, ...]:
    parts = _split(value) if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise ValueError(value)
    if get_args(kind)[-1] is not Ellipsis and len(parts) != len(get_args(kind)):
        raise ValueError(value)
    return tuple(parse(part, _element(kind, at)) for at, part in enumerate(parts))


def _refuse(value: Any, kind: Any) -> Any:
    raise TypeError(f"A field of a configuration cannot be {kind}.")


_READERS: dict[Any, Callable[[Any, Any], Any]] = {
    int: _int, float: _float, bool: _bool, str: _str, Literal: _literal, tuple: _tuple
}  # fmt: skip
