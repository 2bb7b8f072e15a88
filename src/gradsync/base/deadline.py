"""Deadlines: one object made at the edge from what the user passed, handed to every wait inside."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta

from gradsync.errors import UsageError

__all__ = ["Deadline", "Timeout", "limit_of", "seconds"]

Timeout = timedelta | float | int
"""What users may pass as a timeout: a ``timedelta`` or a number of seconds."""


def seconds(timeout: Timeout) -> float:
    """Convert a user's timeout to seconds.

    >>> seconds(timedelta(milliseconds=1500))
    1.5
    """
    if isinstance(timeout, timedelta):
        value = timeout.total_seconds()
    elif isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        value = float(timeout)
    else:
        raise TypeError(
            f"timeout must be a datetime.timedelta or a number of seconds, got {timeout!r}"
        )
    if math.isnan(value) or value < 0:
        raise UsageError(f"timeout must not be negative, got {timeout!r}")
    return value


def limit_of(timeout: Timeout) -> float:
    """Convert a user's timeout for calls or meetings to seconds; zero stands for no limit.

    The same holds for stores, and for the waits of torch's handles.

    >>> limit_of(2), limit_of(timedelta(0))
    (2.0, inf)
    """
    return seconds(timeout) or math.inf


class Deadline:
    """A point in time on a monotonic clock; infinitely far for ``Deadline(None)``.

    >>> Deadline(10.0, clock=lambda: 5.0).remaining()
    10.0
    """

    __slots__ = ("_at", "_clock", "timeout_s")

    def __init__(
        self, timeout: Timeout | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self.timeout_s = math.inf if timeout is None else seconds(timeout)
        self._at = clock() + self.timeout_s

    def remaining(self) -> float:
        """Return the seconds left, never below zero."""
        return max(0.0, self._at - self._clock())

    def expired(self) -> bool:
        """Return whether the point has passed."""
        return self._clock() >= self._at
