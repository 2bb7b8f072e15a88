"""``breakpoint``: one rank in the debugger, the others waiting for it."""

from __future__ import annotations

import pdb
import sys
from collections import Counter
from types import FrameType
from typing import Any

from gradsync.group.world import resolve

__all__ = ["breakpoint"]

_TERMINAL = "/dev/stdin"

_passed: Counter[tuple[str, int]] = Counter()
"""How often each line that has a breakpoint was passed."""


class _Debugger(pdb.Pdb):
    """Reads the terminal that the job was started from; multiprocessing takes it from its ranks."""

    def interaction(self, frame: FrameType | None, traceback: Any) -> None:
        """Talk to the user."""
        usual = sys.stdin
        with open(_TERMINAL) as terminal:
            sys.stdin = terminal
            try:
                super().interaction(frame, traceback)
            finally:
                sys.stdin = usual


def breakpoint(  # noqa: A001  (torch's name)
    rank: int = 0, skip: int = 0, timeout_s: float | None = 3600
) -> None:
    """Stop rank ``rank`` of the world in the debugger; all ranks call this, and the others wait.

    Args:
        rank: the one to look at.
        skip: ignore the first so many calls from this line.
        timeout_s: how long calls of all groups may take from now on, so that nobody gives up
            while you think; None leaves the limits as they are.

    >>> import gradsync
    >>> gradsync.init_process_group()
    >>> for step in range(100):
    ...     gradsync.breakpoint(skip=100)  # with 99, step 99 would stop here
    >>> gradsync.destroy_process_group()
    """
    world = resolve(None)
    world.members.world_rank(rank)  # raises if there is none
    caller = sys._getframe(1)
    line = (caller.f_code.co_filename, caller.f_lineno)
    _passed[line] += 1
    if _passed[line] <= skip:
        return
    if timeout_s is not None:
        for group in (world, *world.children):
            group.set_timeout(timeout_s)
    if world.rank() == rank:
        debugger = _Debugger()
        debugger.message(f"\nrank {rank} of {world.size()}; the others wait until you continue (c)")
        debugger.rcLines.append("up")  # from here to the line that called
        debugger.set_trace()
    world.barrier()
