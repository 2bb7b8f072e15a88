"""What a rank says while a call takes long, and what it answers when it is asked where it stands.

Both are told by the native core, from inside its waits: nothing here runs while calls go well.
"""

from __future__ import annotations

import contextlib
import linecache
import logging
import os
import sys
import threading
from collections.abc import Sequence
from functools import lru_cache
from types import FrameType, ModuleType

from gradsync import _native
from gradsync.backends.ops import describe
from gradsync.config import read, read_seconds

__all__ = [
    "OUR_FOLDER",
    "answer",
    "names",
    "places_to_tell",
    "present_site",
    "short_path",
    "stack_of",
    "standing",
    "watch_waits",
]

_log = logging.getLogger("gradsync")

OUR_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""Frames of files in there are gradsync's, not the user's."""

_DEEPEST = 8
"""Frames of a stack that are told, the innermost ones."""


def watch_waits() -> None:
    """Make the core tell of long waits, and know which files are not the user's."""
    # Found without importing it: this layer does not know torch.
    _watch(read("GRADSYNC_LATE_AFTER"), sys.modules.get("torch"))


@lru_cache(maxsize=1)  # every new world says the same again; the text is only looked at for that
def _watch(_: str, torch: ModuleType | None) -> None:
    late_after_s = read_seconds("GRADSYNC_LATE_AFTER")
    others = getattr(torch, "__path__", ())
    # Nor is the end of a "with" block: the line that is told is the block's.
    ours = (OUR_FOLDER, contextlib.__file__)
    _native.set_own_folders([*ours, *(folder + os.sep for folder in others)])
    _native.tell_of_long_waits(late_after_s, tell_late)


def tell_late(
    group: str,
    places: Sequence[int],
    rank: int,
    size: int,
    sequence: int,
    what: int,
    count: int,
    missing: Sequence[int],
    waited_s: float,
    site: str,
    message: str,
) -> None:
    """Say, once in a wait, who waits for whom; ``message`` is a send or a receive, if it is one."""
    waiting = [rank] if message else [r for r in range(size) if r not in missing]
    call = f"call #{sequence} {describe(what, count)}" if sequence else "forming the group"
    _log.warning(
        "gradsync: %s of group %r wait%s since %.0f s in %s%s",
        names(waiting, places),
        group or "?",
        "s" if len(waiting) == 1 else "",
        waited_s,
        message or f"{call} for {names(missing, places)}",
        f" ({names([rank], places)} at {short_path(site)})" if site else "",
    )


def names(ranks: Sequence[int], places: Sequence[int] = ()) -> str:
    """Return ranks in words, with their ``places`` in the world if those are others.

    >>> names([1]), names([0, 2]), names([1], [0, 7])
    ('rank 1', 'ranks 0, 2', 'rank 1 (7 in the world)')
    """
    each = [f"{r} ({places[r]} in the world)" if places else str(r) for r in ranks]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(each)


def places_to_tell(places: Sequence[int]) -> list[int]:
    """Return the ranks in the world of a group's ranks, nothing if they are the same.

    >>> places_to_tell((0, 1)), places_to_tell((0, 2))
    ([], [0, 2])
    """
    return [] if list(places) == list(range(len(places))) else list(places)


# -- where the program stands ---------------------------------------------------------------------


def short_path(path: str) -> str:
    """Return a path as one would type it here."""
    with contextlib.suppress(OSError):
        here = os.getcwd() + os.sep
        if path.startswith(here):
            return path[len(here) :]
    return path


def present_site() -> str:
    """Return the caller's line: the innermost that is neither gradsync's nor torch's."""
    return short_path(_native.present_site())


def stack_of(frame: FrameType | None) -> list[str]:
    """Return the innermost lines of a stack, the innermost last.

    Without those inside of a call of gradsync, which would take the place of the caller's.
    """
    lines: list[str] = []
    outside = frame
    while outside is not None and outside.f_code.co_filename.startswith(OUR_FOLDER):
        outside = outside.f_back
    frame = outside or frame
    while frame is not None and len(lines) < _DEEPEST:
        code = frame.f_code
        source = linecache.getline(code.co_filename, frame.f_lineno).strip()
        lines.append(
            f"{short_path(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
            + (f": {source}" if source else "")
        )
        frame = frame.f_back
    return lines[::-1]


def standing() -> str:
    """Return where this process's Python stands: its main thread, and the others in a line each."""
    frames = sys._current_frames()
    main = threading.main_thread()
    lines = stack_of(frames.get(main.ident or 0))
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if thread is main or frame is None:
            continue
        lines.append(f"(thread {thread.name!r} at {stack_of(frame)[-1]})")
    return "\n".join(lines)


def answer() -> str:
    """Return the same for a peer, whatever state the process is in."""
    try:
        text = standing()
    except Exception as error:
        text = f"unknown ({type(error).__name__}: {error})"
    return text.encode("utf-8", "backslashreplace").decode()
