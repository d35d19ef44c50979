"""Ctrl-C that waits for a good moment."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)  # a cluster sends the second one before it kills


class Interrupts:
    """Within, the first Ctrl-C or SIGTERM only sets `asked`; the second one acts at once.

    Outside the main thread signals cannot be caught: nothing changes there. tell: hears that it was asked.
    """

    def __init__(self, tell: Callable[[str], None] | None = None) -> None:
        self.asked, self._tell = False, tell
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {name: signal.signal(name, self._heard) for name in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if self._tell is not None:
            self._tell("stopping after this step; Ctrl-C again stops at once")
