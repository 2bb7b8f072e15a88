"""The default group: the package's only mutable global."""

from __future__ import annotations

from gradsync.errors import UsageError
from gradsync.group.group import ProcessGroup

__all__ = ["default_group", "replace_default_group", "resolve"]

_default: ProcessGroup | None = None


def default_group() -> ProcessGroup | None:
    """Return the default group, None before ``init_process_group``."""
    return _default


def replace_default_group(group: ProcessGroup | None) -> None:
    """Make ``group`` the default one."""
    global _default
    _default = group


def resolve(group: ProcessGroup | None) -> ProcessGroup:
    """Return ``group``, or the default group when it is None."""
    if group is not None:
        return group
    if _default is None:
        raise UsageError(
            "the default process group is not initialised; call gradsync.init_process_group() first"
        )
    return _default
