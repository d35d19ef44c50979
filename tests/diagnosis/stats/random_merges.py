"""Merge statistics in a random order."""

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st


def merge_in_some_order(parts: Sequence[Any], draw: Callable[..., Any]) -> Any:
    """Merge random pairs until one is left: a random tree."""
    waiting = list(parts)
    while len(waiting) > 1:
        left = waiting.pop(draw(st.integers(0, len(waiting) - 1)))
        right = waiting.pop(draw(st.integers(0, len(waiting) - 1)))
        waiting.append(left.merge(right))
    return waiting[0]
