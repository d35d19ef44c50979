"""Ways to break a file or a JSON value, and what may come of reading it."""

import json
import os
import warnings
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from uncollapse.errors import UsageError

TIMES = int(os.environ.get("UNCOLLAPSE_FUZZ", "0"))  # so many times the usual examples, and others in each run
EXTREMES = [b"\x00" * 8, b"\xff" * 8, b"\xff\xff\xff\x7f", b"\xff" * 7 + b"\x7f", b"999999999999", b"../../", b"\n\n"]

TEXTS = ["", " ", "../../x", "/dev/null/x", "a\x00b", "é\ud800", "x" * 5000, "<script>", "NaN", "\x1b[2J"]
NAMES = st.sampled_from(TEXTS)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, 10**400, -(10**30), 1e308, -0.0, float("nan"), float("inf")]),
    st.integers(),
    st.floats(),
    NAMES,
    st.text(max_size=8),
)
WILD = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3))


def few(examples: int) -> Any:
    """So many examples, always the same; with UNCOLLAPSE_FUZZ=N there are N times as many, and others each time."""
    return settings(
        max_examples=examples * max(1, TIMES),
        derandomize=TIMES == 0,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The content with a few damages, most of them near its beginning, where headers are."""
    found = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        size = len(found)
        at = draw(st.one_of(st.integers(0, min(size, 200)), st.integers(0, size)))
        match draw(st.sampled_from(["cut", "byte", "bit", "extreme", "repeat", "drop", "insert", "swap"])):
            case "cut":
                del found[at:]
            case "byte":
                found[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case "bit" if at < size:
                found[at] ^= 1 << draw(st.integers(0, 7))
            case "extreme":
                piece = draw(st.sampled_from(EXTREMES))
                found[at : at + len(piece)] = piece
            case "repeat":
                found[at:at] = found[at : at + draw(st.integers(1, 64))] * draw(st.integers(1, 9))
            case "drop":
                del found[at : at + draw(st.integers(1, 64))]
            case "insert":
                found[at:at] = draw(st.binary(max_size=16))
            case "swap":
                other = draw(st.integers(0, size))
                found[at : at + 16], found[other : other + 16] = found[other : other + 16], found[at : at + 16]
    return bytes(found)


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """A JSON value with something else in one or two places."""
    for _ in range(draw(st.integers(1, 2))):
        value = _replaced(draw, value)
    return value


def _replaced(draw: st.DrawFn, value: Any) -> Any:
    if isinstance(value, dict | list) and value and draw(st.integers(0, 7)):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = draw(st.sampled_from(keys))
        copy = dict(value) if isinstance(value, dict) else list(value)
        match draw(st.integers(0, 9)):
            case 0:
                copy.pop(key)
            case 1 if isinstance(copy, dict):
                copy[draw(NAMES)] = draw(WILD)
            case _:
                copy[key] = _replaced(draw, value[key])
        return copy
    return draw(WILD)


def as_json(value: Any) -> bytes:
    """JSON in UTF-8, with NaN where there is one, and lone surrogates as escapes."""
    return json.dumps(value).encode()


def answer(read: Callable[..., Any], *arguments: Any, refusals: tuple[type[Exception], ...] = (UsageError,)) -> Any:
    """What a reader gives, or the refusal that it raises: one sentence. Any other error goes on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return read(*arguments)
        except refusals as error:
            found = error
    assert str(found).strip(), f"{type(found).__name__} without words"
    return found
