"""``LongWait``: the one line that a wait in Python says when it takes long."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from gradsync.config import read_seconds

__all__ = ["LongWait"]

_log = logging.getLogger("gradsync")


class LongWait:
    """A wait that began now, and tells of itself once after ``GRADSYNC_LATE_AFTER`` seconds.

    >>> now = 0.0
    >>> wait = LongWait(clock=lambda: now)
    >>> wait.look(lambda: "for rank 1")  # too early to say anything
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._tell_after_s = read_seconds("GRADSYNC_LATE_AFTER")

    def look(self, what: Callable[[], str]) -> None:
        """Say who waits, and for what, if it is time to and was not said yet."""
        waited_s = self._clock() - self._start
        if self._tell_after_s and waited_s >= self._tell_after_s:
            self._tell_after_s = 0.0
            _log.warning("gradsync: waiting since %.0f s: %s", waited_s, what())
