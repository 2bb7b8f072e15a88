"""Calls that a backward pass starts: carried out at its end, if nobody has yet."""

from __future__ import annotations

import torch
from torch._C import _current_graph_task_id

from gradsync.backends.work import Work
from gradsync.errors import DistError

__all__ = ["PassEnd"]

_OUTSIDE = -1


class PassEnd:
    """Waits for the calls of a backward pass before those who only wait for their futures do.

    torch's DDP waits for the futures of its buckets in C++, in a callback that it queues after the
    last of them. Such a wait cannot help, while a wait for the call itself carries it out: in the
    thread that would otherwise idle, instead of a worker that has to get a core first.
    """

    def __init__(self) -> None:
        self._task = _OUTSIDE
        self._last: Work | None = None

    def note(self, work: Work) -> None:
        """Take note of a call that was started just now."""
        task = _current_graph_task_id()
        if task == _OUTSIDE:
            return
        self._last = work
        if task != self._task:
            self._task = task
            # Typed as a bare object in torch's stubs.
            torch.autograd.Variable._execution_engine.queue_callback(self._carry_out)

    def _carry_out(self) -> None:
        work, self._last = self._last, None
        self._task = _OUTSIDE
        if work is None:
            return
        try:
            work.wait()  # calls are carried out in order: those before it are done, too
        except DistError:
            pass  # whoever waits for the call is told
