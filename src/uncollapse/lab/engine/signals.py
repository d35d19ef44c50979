"""Ctrl-C that waits for a good moment."""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from uncollapse import distributed

SIGNALS = (signal.SIGINT, signal.SIGTERM)  # a cluster sends the second one before it kills
ECHO = 2.0  # seconds in which a second signal is the first one again, which a launcher passes on to all its processes


class Interrupts:
    """Within, the first Ctrl-C or SIGTERM only sets `asked`; the second one acts at once.

    Outside the main thread signals cannot be caught: nothing changes there. tell: hears that it was asked.
    """

    def __init__(self, tell: Callable[[str], None] | None = None) -> None:
        self.asked, self._tell, self._heard_at = False, tell, 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {name: signal.signal(name, self._heard) for name in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked and distributed.launch_size() > 1 and now - self._heard_at < ECHO:
            return
        if self.asked:
            raise KeyboardInterrupt
        self.asked, self._heard_at = True, now
        if self._tell is not None:
            self._tell("stopping after this step; Ctrl-C again stops at once")
