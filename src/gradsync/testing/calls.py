"""The last calls of a rank, for the report of a test that hangs."""

from __future__ import annotations

import time
from collections import deque

from gradsync.backends.call import Call
from gradsync.base.dtypes import DTYPE_NAMES
from gradsync.group.group import ProcessGroup

__all__ = ["CallLog"]


class CallLog:
    """Keeps the last calls of a group: when each began and how long it took."""

    def __init__(self, group: ProcessGroup, length: int = 20) -> None:
        self._entries: deque[list[str | float]] = deque(maxlen=length)
        self._start = time.monotonic()
        self._count = 0
        group.hooks.add_before(self._before)
        group.hooks.add_after(self._after)

    def _before(self, call: Call) -> None:
        self._count += 1
        what = call.op.name
        if call.op.has_data:
            buffer = call.main_buffer
            what += f"({DTYPE_NAMES[buffer.dtype]}[{buffer.numel}])"
        self._entries.append([f"#{self._count} {what}", time.monotonic(), -1.0])

    def _after(self, call: Call) -> None:
        self._entries[-1][2] = time.monotonic()

    def lines(self) -> list[str]:
        """Return one line for each call, oldest first."""
        lines = []
        for what, begun, done in list(self._entries):
            assert isinstance(begun, float)
            assert isinstance(done, float)
            state = f"took {done - begun:.4f} s" if done >= 0 else "not finished"
            lines.append(f"{begun - self._start:9.4f} s  {what}  {state}")
        return lines
