"""A clock that jumps: tests of deadlines take no time."""

from __future__ import annotations

import threading

from gradsync.errors import UsageError

__all__ = ["VirtualClock"]


class VirtualClock:
    """Time that passes only when all its sleepers sleep, and then at once.

    Call it to read it, as ``Deadline(10.0, clock=clock)`` does. ``participants`` is the number of
    threads that take part: when that many are asleep, time jumps to the first one's end.

    >>> clock = VirtualClock()
    >>> clock.sleep(3600.0)
    >>> clock()
    3600.0
    """

    def __init__(self, participants: int = 1) -> None:
        if participants < 1:
            raise UsageError(f"a clock needs at least one participant, got {participants}")
        self._participants = participants
        self._now = 0.0
        self._ends: list[float] = []
        self._changed = threading.Condition()

    def __call__(self) -> float:
        """Return the seconds that have passed."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass, waking whoever's sleep ends."""
        if seconds < 0:
            raise UsageError(f"time does not run backwards: {seconds}")
        with self._changed:
            self._now += seconds
            self._changed.notify_all()

    def sleep(self, seconds: float) -> None:
        """Sleep for ``seconds`` of this clock."""
        with self._changed:
            end = self._now + seconds
            self._ends.append(end)
            try:
                while self._now < end:
                    if len(self._ends) >= self._participants:
                        self._now = max(self._now, min(self._ends))
                        self._changed.notify_all()
                    else:
                        self._changed.wait()
            finally:
                self._ends.remove(end)

    def leave(self) -> None:
        """Take a participant out: it will not sleep any more, and nobody waits for it."""
        with self._changed:
            self._participants = max(1, self._participants - 1)
            self._changed.notify_all()
