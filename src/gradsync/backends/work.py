"""``Work``: a handle on a call that has been submitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradsync.base.deadline import Timeout
from gradsync.errors import UsageError

__all__ = ["DoneWork", "Work"]


class Work:
    """A submitted call: wait for it, or ask how it went.

    The error of a failed call is an exception object, raised by ``wait``.
    """

    __slots__ = ()

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Wait until the call is done and return True; raise its error if it failed.

        When the time given is over a ``CollectiveTimeout`` is raised, but the call goes on and may
        be waited for again.
        """
        raise NotImplementedError

    def is_completed(self) -> bool:
        """Return whether the call is over, well or badly."""
        raise NotImplementedError

    def is_success(self) -> bool:
        """Return whether the call is over and went well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of a failed call, None while it is in flight and when it went well."""
        raise NotImplementedError

    def on_done(self, callback: Callable[[], object]) -> None:
        """Run ``callback()`` when the call is over, in the thread that finds out, or now."""
        raise NotImplementedError

    def result(self) -> list[Any]:
        """Return the output tensors."""
        raise NotImplementedError

    def get_future(self) -> Any:
        """Return a ``torch.futures.Future`` of the output tensors."""
        raise NotImplementedError

    def source_rank(self) -> int:
        """Return which rank of the group a message came from; only receives know."""
        raise UsageError("only the work of a receive has a source rank")

    def _source_rank(self) -> int:
        return self.source_rank()

    def synchronize(self) -> None:
        """Do nothing: on a CPU, a call that is over is over."""


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

    def on_done(self, callback: Callable[[], object]) -> None:
        """Run ``callback()`` now."""
        callback()

    def result(self) -> list[Any]:
        """Return the output tensors."""
        return self._outputs
