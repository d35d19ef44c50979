"""Read dataclasses from JSON, and check every value against the type of its field (with pydantic, in strict mode)."""

import functools
import json
import math
from collections.abc import Mapping
from typing import Any

LARGEST = 2**63  # whole numbers are smaller than this
DEEPEST = 32  # values within values
EXPECTED = {  # kind of pydantic's error -> what was expected
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a finite number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "none_required": "null",
    "dataclass_type": "a JSON object",
    "mapping_type": "a JSON object",
    "dict_type": "a JSON object",
    "tuple_type": "a list",
}


def parse(text: str | bytes) -> Any:
    """Parse JSON. ValueError if it is not valid, or has NaN or infinity, which JSON does not have."""

    def refuse(word: str) -> None:
        raise ValueError(f"it has the number {word}, which JSON does not have")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("it has too many lists within lists") from error


def build(cls: Any, state: Any, where: str = "it") -> Any:
    """Build a dataclass from what `dataclasses.asdict` and JSON made of it. ValueError if a value does not fit.

    Args:
        cls: the dataclass, whose fields are plain values, dataclasses, and tuples and mappings of these.
        state: the parsed JSON.
        where: the name of the state in an error.
    """
    from pydantic import ValidationError

    _check_plain(state, where, DEEPEST)
    try:
        # Only in JSON mode does strict mean: a list is a tuple, and an object is a dataclass.
        return _adapter(cls).validate_json(json.dumps([state]), strict=True)[0]
    except ValidationError as error:
        unknown = [each for each in error.errors() if each["type"] == "unexpected_keyword_argument"]  # likely a typo
        raise ValueError(_sentence((unknown or error.errors())[0], where)) from error


@functools.cache
def _adapter(cls: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    # pydantic takes no configuration for a dataclass itself, but passes that of a tuple on to the dataclasses inside.
    return TypeAdapter(tuple[cls], config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))


def _check_plain(value: Any, where: str, deepest: int) -> None:
    """Raise for numbers that are too large, and for values that are nested too deeply."""
    if isinstance(value, Mapping | list):
        if deepest == 0:
            raise ValueError(f"{where} is nested more than {DEEPEST} levels deep")
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            _check_plain(item, str(key) if isinstance(value, Mapping) else where, deepest - 1)
    elif type(value) is int and abs(value) >= LARGEST:
        raise ValueError(f"{where} must be a whole number below 2**63, got {_shorten(value)}")
    elif type(value) is float and not math.isfinite(value):
        raise ValueError(f"{where} must be a finite number, got {value}")


def _sentence(error: Any, where: str) -> str:
    """Return which value is wrong, what was expected, and what came."""
    path, kind = error["loc"][1:], error["type"]
    if kind == "missing":
        return f"{_path(path[:-1], where)} has no entry {path[-1]!r}"
    if kind == "unexpected_keyword_argument":
        return f"{_path(path[:-1], where)} has the unknown entry {_shorten(path[-1])}"
    if kind == "literal_error":
        expected = f"one of {error['ctx']['expected']}"
    elif kind in EXPECTED:
        expected = EXPECTED[kind]
    else:
        return f"{_path(path, where)}: {error['msg']}"
    return f"{_path(path, where)} must be {expected}, got {_shorten(error['input'])}"


def _path(parts: tuple[Any, ...], where: str) -> str:
    """Return the place of a value.

    >>> _path(("layers", 0, "measures", "mean_cosine"), "it")
    'layers[0].measures.mean_cosine'
    """
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{_shorten(part)[1:-1]}" for part in parts)
    return text.removeprefix(".") or where


def _shorten(value: Any) -> str:
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
