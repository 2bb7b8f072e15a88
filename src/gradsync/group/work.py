"""``GroupWork``: the handle that users get, with outputs, a future, and results brought home."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from gradsync.backends.call import Buffer, Call
from gradsync.backends.work import Work
from gradsync.base.deadline import Timeout
from gradsync.group.buffers import copy_back
from gradsync.group.compiling import keep_compiler_out
from gradsync.group.future import Outcome

__all__ = ["Copies", "GroupWork", "Prepared", "bring_home"]

Copies = Sequence[tuple[torch.Tensor, Buffer]]
"""Outputs that may have gaps, each with the memory that the call writes to."""


class Prepared:
    """A call that has been checked, what it fills, and where results have to be brought home."""

    __slots__ = ("call", "copies", "outputs")

    def __init__(self, call: Call, outputs: list[torch.Tensor], copies: Copies = ()) -> None:
        self.call = call
        self.outputs = outputs
        self.copies = copies


def bring_home(copies: Copies) -> None:
    """Copy results into tensors with gaps."""
    for tensor, buffer in copies:
        copy_back(tensor, buffer)


class GroupWork(Work):
    """A call in flight. Its outputs hold the result once ``wait`` has returned."""

    __slots__ = ("_copies", "_lock", "_outputs", "_work")

    def __init__(self, work: Work, outputs: list[torch.Tensor], copies: Copies) -> None:
        self._work = work
        self._outputs = outputs
        self._copies = [(tensor, buffer) for tensor, buffer in copies if buffer.owner is not tensor]
        self._lock = threading.Lock()
        if self._copies:
            work.on_done(self._deliver_if_well)  # also when nobody keeps this handle

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Wait until the call is done and return True; raise its error if it failed."""
        self._work.wait(timeout)
        self._deliver()
        return True

    def is_completed(self) -> bool:
        """Return whether the call is over, well or badly."""
        if not self._work.is_completed():
            return False
        if self._copies and self._work.exception() is None:
            self._deliver()
        return True

    def is_to_fill(self) -> bool:
        """Return whether there are tensors with gaps that do not hold the result yet."""
        return bool(self._copies)

    def exception(self) -> BaseException | None:
        """Return the error of a failed call, None while it is in flight and when it went well."""
        return self._work.exception()

    def on_done(self, callback: Callable[[], object]) -> None:
        """Run ``callback()`` when the call is over, in the thread that carried it out, or now.

        Tensors with gaps hold the result by then. "Now" may be while the thread that carried the
        call out is still on its way to fill them.
        """
        if not self._copies:
            self._work.on_done(callback)
            return

        def filled() -> None:
            self._deliver_if_well()
            callback()

        self._work.on_done(filled)

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors."""
        return self._outputs

    def source_rank(self) -> int:
        """Return which rank of the group a message came from; only receives know."""
        return self._work.source_rank()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the output tensors, or of the error.

        >>> import torch, gradsync
        >>> gradsync.init_process_group()
        >>> work = gradsync.all_reduce(torch.ones(2), async_op=True)
        >>> work.get_future().then(lambda done: done.value()[0] * 10).wait()
        tensor([10., 10.])
        >>> gradsync.destroy_process_group()
        """
        future = Outcome(self.wait)

        def resolve() -> None:
            error = self._work.exception()
            if error is not None:
                future.fail(error)
                return
            self._deliver()
            future.set_result(self._outputs)

        self._work.on_done(resolve)
        return future

    def _deliver_if_well(self) -> None:
        if self._work.exception() is None:
            self._deliver()

    def _deliver(self) -> None:
        if not self._copies:
            return
        # Whoever comes second must not go on before the first has finished.
        with self._lock:
            bring_home(self._copies)
            self._copies = []


keep_compiler_out(vars(GroupWork))
