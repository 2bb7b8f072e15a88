"""Debug levels, and the log of what groups do.

gradsync's checks are always on: a level only says how much is told. OFF is silent, INFO tells when
groups come and go, DETAIL tells of every call with the line that asked for it. Lines go to the
logger ``gradsync``; with nothing set up there, to stderr.
"""

from __future__ import annotations

import enum
import logging

from gradsync.backends.call import Call
from gradsync.backends.waits import present_site
from gradsync.base.dtypes import DTYPE_NAMES
from gradsync.config import environment
from gradsync.errors import UsageError
from gradsync.group.group import ProcessGroup

__all__ = [
    "DebugLevel",
    "get_debug_level",
    "set_debug_level",
    "set_debug_level_from_env",
    "tell",
    "watch_group",
]

_log = logging.getLogger("gradsync")


class DebugLevel(enum.IntEnum):
    """How much gradsync tells of what it does."""

    OFF = 0
    INFO = 1
    DETAIL = 2


# One for the process, like the logger; None until it is set or asked for.
_level: DebugLevel | None = None


def get_debug_level() -> DebugLevel:
    """Return the level: the one that was set, or that of the environment."""
    if _level is None:
        set_debug_level_from_env()
    assert _level is not None
    return _level


def set_debug_level(level: DebugLevel) -> None:
    """Set the level for groups that are made from now on."""
    global _level
    if not isinstance(level, DebugLevel):
        raise TypeError(f"a debug level is a gradsync.DebugLevel, got {level!r}")
    _level = level
    if level is DebugLevel.OFF:
        return
    _log.setLevel(logging.INFO if level is DebugLevel.INFO else logging.DEBUG)
    if not _log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        _log.addHandler(handler)


def set_debug_level_from_env() -> None:
    """Set the level that ``GRADSYNC_DEBUG`` names, else ``TORCH_DISTRIBUTED_DEBUG``, else OFF."""
    level = DebugLevel.OFF
    for name in ("TORCH_DISTRIBUTED_DEBUG", "GRADSYNC_DEBUG"):
        text = environment().get(name, "")
        if text and text.upper() not in DebugLevel.__members__:
            raise UsageError(f"{name} must be OFF, INFO or DETAIL, got {text!r}")
        level = DebugLevel[text.upper()] if text else level
    set_debug_level(level)


def tell(group: ProcessGroup, text: str, *values: object) -> None:
    """Say something of a group's life, at INFO and above."""
    if get_debug_level() >= DebugLevel.INFO:
        _log.info(f"gradsync: %s of %s: {text}", f"rank {group.rank()}", _name(group), *values)


def watch_group(group: ProcessGroup, took_s: float) -> None:
    """Tell that a group was formed and, at DETAIL, of each of its calls."""
    level = get_debug_level()
    if level is DebugLevel.OFF:
        return
    where = list(group.members.ranks)
    tell(group, "formed on %s in %.0f ms, world ranks %s", group.name(), took_s * 1000, where)
    if level is DebugLevel.DETAIL:
        rank, name = group.rank(), _name(group)
        group.hooks.add_before(lambda call: _tell_call(rank, name, call))


def _tell_call(rank: int, group: str, call: Call) -> None:
    if not _log.isEnabledFor(logging.DEBUG):
        return
    parts = []
    if call.op.has_data:
        buffer = call.main_buffer
        parts.append(f"{DTYPE_NAMES[buffer.dtype]}[{buffer.numel}]")
    if call.op.has_reduce:
        parts.append(str(getattr(call.reduce, "name", call.reduce)))
    if call.op.has_root:
        parts.append(f"root={call.root}")
    about = ", ".join(parts)
    site = present_site()
    _log.debug("gradsync: rank %d of %s: %s(%s) at %s", rank, group, call.op.name, about, site)


def _name(group: ProcessGroup) -> str:
    return f"group {group.group_name!r}"
