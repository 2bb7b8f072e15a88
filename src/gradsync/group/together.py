"""``Together``: one handle for several calls, and what is left to do when they are over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch

from gradsync.backends.work import Work
from gradsync.base.deadline import Deadline, Timeout, limit_of
from gradsync.group.compiling import keep_compiler_out
from gradsync.group.future import Outcome

__all__ = ["Step", "Together"]

_LEAST_S = 1e-6
"""To wait with a time of zero would be to wait without a limit."""

Step = tuple[Work, Callable[[], object] | None]
"""A call in flight, and what brings its results home."""


class Together(Work):
    """Calls that were started together. Their outputs hold the results once ``wait`` is over."""

    __slots__ = ("_left", "_lock", "_outputs", "_works")

    def __init__(self, steps: list[Step], outputs: list[torch.Tensor]) -> None:
        self._works = [work for work, _ in steps]
        self._left = [bring_home for _, bring_home in steps if bring_home is not None]
        self._outputs = outputs
        self._lock = threading.Lock()

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Wait until all calls are done and return True; raise the first error."""
        deadline = None if timeout is None else Deadline(limit_of(timeout))
        for work in self._works:
            work.wait(None if deadline is None else max(deadline.remaining(), _LEAST_S))
        self._deliver()
        return True

    def is_completed(self) -> bool:
        """Return whether all calls are over, well or badly."""
        if not all(work.is_completed() for work in self._works):
            return False
        if self.exception() is None:
            self._deliver()
        return True

    def exception(self) -> BaseException | None:
        """Return the first error, None while none is known."""
        return next((e for e in (work.exception() for work in self._works) if e is not None), None)

    def on_done(self, callback: Callable[[], object]) -> None:
        """Run ``callback()`` when all calls are over, in the thread that ended the last, or now."""
        waiting = len(self._works)
        lock = threading.Lock()

        def one_less() -> None:
            nonlocal waiting
            with lock:
                waiting -= 1
                over = waiting == 0
            if over:
                callback()

        if not self._works:
            callback()
        for work in self._works:
            work.on_done(one_less)

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the output tensors, or of the first error."""
        future = Outcome(self.wait)
        self.on_done(partial(self._resolve, future))
        return future

    def _resolve(self, future: Outcome) -> None:
        error = self.exception()
        if error is not None:
            future.fail(error)
            return
        self._deliver()
        future.set_result(self._outputs)

    def _deliver(self) -> None:
        # Whoever comes second must not go on before the first has finished.
        with self._lock:
            for bring_home in self._left:
                bring_home()
            self._left = []


keep_compiler_out(vars(Together))
