"""The end of a rank's process: it tells its peers, so that they need not find out."""

from __future__ import annotations

import atexit
import sys
import traceback
from types import TracebackType
from typing import Any
from weakref import WeakSet

from gradsync.backends.pending import end_callbacks
from gradsync.backends.waits import OUR_FOLDER, short_path
from gradsync.group.group import ProcessGroup
from gradsync.group.world import default_group, replace_default_group

__all__ = ["watch_for_the_end"]


def watch_for_the_end(group: ProcessGroup | None = None) -> None:
    """Make this process say goodbye when it ends, with the traceback of what ended it.

    It leaves the default group, and ``group`` if that is another one.

    Once in a process: hooks that others put on top of ours call us, and must not be called by us.
    """
    if group is not None:
        _other_groups.add(group)
    if not _previous_hooks:
        _previous_hooks.append(sys.excepthook)
        sys.excepthook = _say_what_went_wrong
        atexit.register(_say_goodbye)


_previous_hooks: list[Any] = []
_other_groups: WeakSet[ProcessGroup] = WeakSet()


def _groups() -> list[ProcessGroup]:
    default = default_group()
    return list({*_other_groups, *([] if default is None else [default])})


def _say_what_went_wrong(
    kind: type[BaseException], error: BaseException, where: TracebackType | None
) -> None:
    if where is None:
        # No frame was left because of it: C++ code shows an error of its own, a warning that counts
        # as one say, and the program goes on.
        _previous_hooks[0](kind, error, where)
        return
    try:
        note = "".join(traceback.format_exception(kind, error, where)).rstrip()
        for group in _groups():
            group.leave(note)
    finally:
        if not _said_in_short(kind, where):
            _previous_hooks[0](kind, error, where)


def _said_in_short(kind: type[BaseException], where: TracebackType | None) -> bool:
    """Say in one line that Ctrl-C ended this rank, when rank 0 shows its whole traceback anyway."""
    plain = _previous_hooks[0] is sys.__excepthook__
    if not plain or kind is not KeyboardInterrupt or not any(g.rank() for g in _groups()):
        return False
    frames = [f for f in traceback.extract_tb(where) if not f.filename.startswith(OUR_FOLDER)]
    at = f" at {short_path(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    sys.stderr.write(f"KeyboardInterrupt{at}\n")
    return True


def _say_goodbye() -> None:
    for group in _groups():
        group.close()
    replace_default_group(None)
    end_callbacks()
