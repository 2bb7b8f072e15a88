"""Calls that torch's reducer starts in a backward pass: carried out at its end, if not before."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._C import _current_graph_task_id

from gradsync.errors import DistError

__all__ = ["PassEnd", "is_reducer"]

_OUTSIDE = -1


def is_reducer(depth: int) -> bool:
    """Return whether C++ made the call that is ``depth`` Python frames above, in a backward pass.

    Then the frame that led to it is the one that runs autograd's engine; calls of Python code in
    the pass, a hook's say, have that code's frame.
    """
    if _current_graph_task_id() == _OUTSIDE:
        return False
    try:
        caller = sys._getframe(depth + 1)
    except ValueError:  # a thread of the engine's own
        return True
    return caller.f_code.co_name == "_engine_run_backward"


class PassEnd:
    """Waits for the reducer's calls before the reducer does.

    torch's reducer waits for the futures of its buckets in C++, in a callback that it queues after
    the last of them. Such a wait cannot help, while a wait for the call itself carries it out: in
    the thread that would otherwise idle, instead of a worker that has to get a core first.
    """

    def __init__(self) -> None:
        self._task = _OUTSIDE
        self._last: Any = None

    def note(self, work: Any) -> None:
        """Take note of a call that the reducer started just now."""
        self._last = work
        task = _current_graph_task_id()
        if task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._carry_out)

    def _carry_out(self) -> None:
        work, self._last = self._last, None
        self._task = _OUTSIDE
        if work is None:
            return  # the end of a pass inside of this one, a checkpoint's, has waited already
        try:
            work.wait()  # calls are carried out in order: those before it are done, too
        except (DistError, RuntimeError):
            pass  # whoever waits for the call is told
