"""Values of config fields by their annotation: int, float, bool, str, Literal, tuples of these, and unions with None.

Pydantic checks values in its strict mode. Text from the command line ("16", "0.5", "true", "none", "2,4,8") is first
turned into the value that it stands for.
"""

import json
from collections.abc import Sequence
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

if TYPE_CHECKING:  # imported where a value is checked: the help of the command line needs no checks
    from pydantic import TypeAdapter

TRUE, FALSE, NONE = ("true", "yes", "on", "1"), ("false", "no", "off", "0"), ("none", "null")
TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "none"}
PLURALS = {int: "whole numbers", float: "numbers", bool: "true or false", str: "words"}
LARGEST = 2**63  # torch has no larger integers


def parse(
    value: Any,
    annotation: Any,
    choices: tuple[Any, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """Return a value in the annotated type, from text or from what JSON or YAML gave; ValueError if it does not fit.

    >>> parse("16", int), parse("none", float | None), parse("2,4", tuple[int, ...]), parse("1", float)
    (16, None, (2, 4), 1.0)
    """
    try:
        return _adapter(union_members(annotation), choices, minimum, maximum).validate_python(value)
    except (ValueError, OverflowError, RecursionError) as error:  # pydantic's ValidationError is a ValueError
        raise ValueError(f"{quote(value)} is not {describe_type(annotation, choices)}") from error


def describe_type(annotation: Any, choices: Sequence[Any] | None = None) -> str:
    """Return what a field accepts, in words.

    >>> describe_type(float | None), describe_type(tuple[int, ...]), describe_type(str, ("none", "layer"))
    ('a number or none', 'whole numbers separated by commas', 'one of none, layer')
    """
    return " or ".join(_describe_member(member, choices) for member in union_members(annotation))


def as_text(value: Any) -> str:
    """Return a value as it is written on the command line; `parse` reads it back.

    >>> as_text(None), as_text(True), as_text((2, 4)), as_text(5e-4), as_text(("a,b",))
    ('none', 'true', '2,4', '0.0005', '["a,b"]')
    """
    if isinstance(value, tuple):
        text = ",".join(map(as_text, value))
        reads_back = not text.startswith("[") and _split(text) == [as_text(element) for element in value]
        return text if reads_back else json.dumps(value)
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def quote(value: Any, length: int = 200) -> str:
    """Return a rejected value for an error message: quoted, and cut to a number of characters.

    >>> quote(True), quote("x" * 300, 10)
    ("'true'", "'xxxxxxxx…")
    """
    try:
        text = repr(as_text(value))
    except (ValueError, RecursionError):  # Python does not print numbers of thousands of digits
        return "a value that is too long to print"
    return text if len(text) <= length else f"{text[: length - 1]}…"


def to_json(value: Any, annotation: Any) -> Any:
    """Return a value for JSON, the same however it was given: a float that was given as 1 becomes 1.0."""
    if isinstance(value, tuple):
        tuple_type = union_members(annotation)[0]
        return [to_json(element, _element_type(tuple_type, index)) for index, element in enumerate(value)]
    is_int = isinstance(value, int) and not isinstance(value, bool)
    members = union_members(annotation)
    return float(value) if is_int and float in members and int not in members else value


def union_members(annotation: Any) -> tuple[Any, ...]:
    """Return the types of a union; None is the last, as in words."""
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return tuple(sorted(members, key=lambda member: member is NoneType))


def _element_type(tuple_type: Any, index: int) -> Any:
    types = get_args(tuple_type)
    return types[0] if types[-1] is Ellipsis else types[index]


def _describe_member(member: Any, choices: Sequence[Any] | None) -> str:
    if get_origin(member) is tuple:
        types = get_args(member)
        elements = f"some of {', '.join(map(as_text, choices))}" if choices else PLURALS[types[0]]
        return f"{'' if types[-1] is Ellipsis else f'{len(types)} '}{elements} separated by commas"
    allowed = get_args(member) if get_origin(member) is Literal else choices
    if allowed and member is not NoneType:
        return f"one of {', '.join(map(as_text, allowed))}"
    return TYPE_NAMES[member]


@cache
def _adapter(
    members: tuple[Any, ...], choices: tuple[Any, ...] | None, minimum: float | None, maximum: float | None
) -> "TypeAdapter[Any]":
    """Return the pydantic adapter of a field; the first member of a union that accepts a value is taken."""
    from pydantic import BeforeValidator, Field, TypeAdapter

    types = [_member_type(member, choices, minimum, maximum) for member in members if member is not NoneType]
    union: Any = Annotated[Union[tuple(types)], Field(union_mode="left_to_right")] if len(types) > 1 else types[0]  # noqa: UP007
    if NoneType in members:
        union = Annotated[union | None, BeforeValidator(_none_from_text)]
    return TypeAdapter(union)


def _member_type(member: Any, choices: tuple[Any, ...] | None, minimum: float | None, maximum: float | None) -> Any:
    """Return the pydantic type of a member of a union. Bounds and choices of a tuple are those of its elements."""
    from pydantic import AfterValidator, BeforeValidator, Field

    if get_origin(member) is tuple:
        types = get_args(member)
        elements = [t if t is Ellipsis else _member_type(t, choices, minimum, maximum) for t in types]
        return Annotated[tuple[tuple(elements)], BeforeValidator(_sequence_from_text)]  # type: ignore[misc]
    checks = [] if choices is None else [AfterValidator(lambda value: _check_choice(value, choices))]
    if get_origin(member) is Literal:
        return Annotated[member, BeforeValidator(lambda value: _literal_from_text(value, get_args(member))), *checks]
    match member:
        case _ if member is int:
            facts = [Field(strict=True, gt=-LARGEST, lt=LARGEST), Field(ge=minimum, le=maximum)]
            return Annotated[int, *facts, BeforeValidator(_int_from_text), *checks]
        case _ if member is float:
            facts = [Field(strict=True, allow_inf_nan=False), Field(ge=minimum, le=maximum)]
            return Annotated[float, *facts, BeforeValidator(_float_from_text), *checks]
        case _ if member is bool:
            return Annotated[bool, Field(strict=True), BeforeValidator(_bool_from_text), *checks]
        case _ if member is str:
            return Annotated[str, Field(strict=True), *checks]
    raise TypeError(f"A config field cannot be annotated as {member}.")


def _split(text: str) -> list[Any]:
    if text.startswith("["):
        return list(json.loads(text))
    return [part.strip() for part in text.split(",")] if text.strip() else []


def _none_from_text(value: Any) -> Any:
    return None if isinstance(value, str) and value.lower() in NONE else value


def _int_from_text(value: Any) -> Any:
    return int(value) if isinstance(value, str) else value


def _float_from_text(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value


def _bool_from_text(value: Any) -> Any:
    words = value.lower() if isinstance(value, str) else None
    return words in TRUE if words in (*TRUE, *FALSE) else value


def _literal_from_text(value: Any, allowed: tuple[Any, ...]) -> Any:
    return next((choice for choice in allowed if isinstance(value, str) and as_text(choice) == value), value)


def _sequence_from_text(value: Any) -> Any:
    elements = _split(value) if isinstance(value, str) else value
    if not isinstance(elements, list | tuple):
        raise ValueError("expected a list")
    return elements


def _check_choice(value: Any, choices: tuple[Any, ...]) -> Any:
    if value not in choices:
        raise ValueError("not one of the choices")
    return value
