"""Text from files on a terminal: what would move its cursor or clear it is shown, not done."""

from typing import Any


def printable(value: Any) -> Any:
    """Text whose control characters are written out; also in all lists and objects of JSON.

    >>> printable("a\\x1b[2Jb"), printable(["é\\n"])
    ('a\\\\x1b[2Jb', ['é\\n'])
    """
    if isinstance(value, str):
        return "".join(letter if _is_harmless(letter) else ascii(letter)[1:-1] for letter in value)
    if isinstance(value, list):
        return [printable(item) for item in value]
    if isinstance(value, dict):
        return {printable(key): printable(item) for key, item in value.items()}
    return value


def _is_harmless(letter: str) -> bool:
    return letter in "\n\t\u00a0\u202f" or letter.isprintable()
