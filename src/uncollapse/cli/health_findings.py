"""What was found at one point of the examination."""

from dataclasses import dataclass
from typing import Literal

State = Literal["good", "missing", "bad"]


@dataclass(frozen=True)
class Finding:
    """A point that was looked at.

    Args:
        group: the heading that it belongs to.
        name: what was looked at.
        state: good, missing (nothing is wrong, something optional is not there) or bad.
        words: what was found.
        remedy: what to do, if there is something to be done.
    """

    group: str
    name: str
    state: State
    words: str
    remedy: str = ""
