"""Further tables of a recipe's results, next to its paper tables."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Details:
    """A table of texts. note: how to read it. words: how many of the first columns are words and not numbers."""

    title: str
    note: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    words: int = 1


def details_json(tables: Sequence[Details]) -> list[dict[str, Any]]:
    """Return tables as plain data for JSON."""
    return [asdict(table) for table in tables]
