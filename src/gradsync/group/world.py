"""The default group: the package's only mutable global, with a second one for each thread.

A thread that is a rank of its own has its own default group; every other thread sees the process's.
"""

from __future__ import annotations

import threading
from typing import Protocol

from gradsync.backends.lane import CLOSED_LANE, Lane
from gradsync.errors import UsageError
from gradsync.group.group import ProcessGroup
from gradsync.group.work import GroupWork

__all__ = [
    "NON_GROUP_MEMBER",
    "default_group",
    "is_non_member",
    "replace_default_group",
    "replace_thread_group",
    "resolve",
    "shortcut",
]

NON_GROUP_MEMBER = -100
"""What a rank gets in place of a group that it is not in."""


class Shortcut(Protocol):
    """What a function that is called without a group needs to know of the default one."""

    _lane: Lane
    _to_fill: set[GroupWork]


class _Nothing:
    def __init__(self) -> None:
        self._lane = CLOSED_LANE
        self._to_fill: set[GroupWork] = set()


_default: ProcessGroup | None = None
_threads_are_ranks = False  # saves the look at the thread's own group where there never was one
_of_thread = threading.local()

shortcut: Shortcut = _Nothing()
"""The default group, if that is the same one for all threads and its ranks are the world's.

Reading it saves functions two calls and a translation of ranks, together half a microsecond."""


def default_group() -> ProcessGroup | None:
    """Return the calling thread's default group, None before ``init_process_group``."""
    if not _threads_are_ranks:
        return _default
    own: ProcessGroup | None = getattr(_of_thread, "group", None)
    return _default if own is None else own


def replace_default_group(group: ProcessGroup | None) -> None:
    """Make ``group`` the default one; in a thread that is a rank, that thread's."""
    global _default
    if _threads_are_ranks and getattr(_of_thread, "group", None) is not None:
        _of_thread.group = group
    else:
        _default = group
        _find_shortcut()


def replace_thread_group(group: ProcessGroup | None) -> None:
    """Make ``group`` the default one of the calling thread alone; None ends that."""
    global _threads_are_ranks
    _threads_are_ranks = True
    _of_thread.group = group
    _find_shortcut()


def _find_shortcut() -> None:
    global shortcut
    group = None if _threads_are_ranks else _default
    if group is None or group.members.ranks != tuple(range(group.size())):
        shortcut = _Nothing()
    else:
        shortcut = group


def is_non_member(group: ProcessGroup | int | None) -> bool:
    """Return whether ``group`` stands for one that the caller is not in."""
    return group.__class__ is int and group == NON_GROUP_MEMBER


def resolve(group: ProcessGroup | int | None) -> ProcessGroup:
    """Return ``group``, or the default group when it is None."""
    if group is not None:
        if isinstance(group, ProcessGroup):
            return group
        raise UsageError(
            "this rank is not in the group"
            if is_non_member(group)
            else f"a group is a ProcessGroup, got {type(group).__name__}: {group!r}"
        )
    found = default_group()
    if found is None:
        raise UsageError(
            "the default process group is not initialised; call gradsync.init_process_group() first"
        )
    return found
