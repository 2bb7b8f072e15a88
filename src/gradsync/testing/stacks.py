"""Stacks of tests, without what stands between a process and the test that it runs."""

from __future__ import annotations

import traceback
from types import FrameType

__all__ = ["stack_of_test"]

_MACHINERY = (
    "_pytest/python.py",
    "gradsync/testing/worker.py",
    "gradsync/testing/case_rank.py",
    "gradsync/testing/cases.py",
    "gradsync/testing/threads.py",
    "gradsync/testing/thread_item.py",
)


def stack_of_test(frame: FrameType) -> list[str]:
    """Return a stack without the machinery that called the test."""
    frames = traceback.extract_stack(frame)
    callers = [at for at, f in enumerate(frames) if f.filename.endswith(_MACHINERY)]
    return traceback.format_list(frames[callers[-1] + 1 :] if callers else frames)
