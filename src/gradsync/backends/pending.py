"""``PendingWork``: a call that waits in the native queue or is being carried out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Protocol

from gradsync import _native
from gradsync.backends.call import Call
from gradsync.backends.work import Work
from gradsync.base.deadline import Timeout, seconds
from gradsync.errors import CollectiveTimeout, DistError

__all__ = ["MOMENT_S", "Handle", "PendingWork", "end_callbacks"]

Failure = Callable[[_native.StatusError, Call], DistError]

MOMENT_S = 5.0
"""For what is in flight when a group or the process ends: enough for ranks that do it at the same
time, and no long wait for one that never comes."""


def end_callbacks() -> None:
    """Run no more of them in the core's threads, and give those that run a moment to end.

    At the end of the process. Groups that were dropped while a call was in flight are known to
    nobody but the thread that carries it out.
    """
    _native.keep_threads_out(MOMENT_S)


class Handle(Protocol):
    """A request of the native core."""

    def done(self) -> bool:
        """Return whether it is over."""

    def wait(self, timeout_s: float) -> bool:
        """Wait, without limit when negative; False when the time is over first."""

    def on_done(self, callback: Callable[[], object]) -> None:
        """Run ``callback`` when it is over."""


class PendingWork(Work):
    """The handle of a call that is carried out by another thread, or by whoever waits for it."""

    __slots__ = ("_call", "_error", "_failure", "_handle")

    def __init__(self, handle: Handle, call: Call, failure: Failure) -> None:
        self._handle = handle
        self._call = call
        self._failure = failure
        self._error: DistError | None = None

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Wait until the call is done and return True; raise its error if it failed."""
        limit_s = -1.0 if timeout is None else seconds(timeout) or -1.0  # zero is no limit
        if self._error is None:
            try:
                done = self._handle.wait(limit_s)
            except _native.StatusError as error:
                self._error = self._failure(error, self._call)
            else:
                if done:
                    return True
                raise CollectiveTimeout(
                    f"{self._call.op.name} was not over after {limit_s:g} s; it goes on, and may "
                    f"be waited for again",
                    op=self._call.op.name,
                    timeout_s=limit_s,
                )
        # A copy: one object raised in two places would show both their tracebacks.
        raise copy.copy(self._error) from None

    def is_completed(self) -> bool:
        """Return whether the call is over, well or badly."""
        return self._handle.done()

    def exception(self) -> BaseException | None:
        """Return the error of a failed call, None while it is in flight and when it went well."""
        if self._error is None and self._handle.done():
            try:
                self._handle.wait(0)
            except _native.StatusError as error:
                self._error = self._failure(error, self._call)
        return self._error

    def on_done(self, callback: Callable[[], object]) -> None:
        """Run ``callback()`` when the call is over, in the thread that carried it out, or now."""
        self._handle.on_done(callback)
