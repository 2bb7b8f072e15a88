"""``Work``: a handle on a call that has been submitted."""

from __future__ import annotations

from typing import Any

from gradsync.base.deadline import Timeout

__all__ = ["DoneWork", "Work"]


class Work:
    """A submitted call: wait for it, or ask how it went.

    The error of a failed call is an exception object, raised by ``wait``.
    """

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Wait until the call is done and return True; raise its error if it failed."""
        raise NotImplementedError

    def is_completed(self) -> bool:
        """Return whether the call is over, well or badly."""
        raise NotImplementedError

    def is_success(self) -> bool:
        """Return whether the call is over and went well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of a failed call."""
        raise NotImplementedError

    def result(self) -> list[Any]:
        """Return the output tensors."""
        raise NotImplementedError


class DoneWork(Work):
    """The handle of a call that was carried out while it was submitted."""

    __slots__ = ("_outputs",)

    def __init__(self, outputs: list[Any]) -> None:
        self._outputs = outputs

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Return True: the call is done."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def exception(self) -> BaseException | None:
        """Return None: a call that fails raises from where it was submitted."""
        return None

    def result(self) -> list[Any]:
        """Return the output tensors."""
        return self._outputs
