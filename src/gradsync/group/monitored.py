"""``monitored_barrier`` as a function on the default group."""

from __future__ import annotations

import warnings
from datetime import timedelta

from gradsync.group.collectives import Group, member_group
from gradsync.group.compiling import keep_compiler_out

__all__ = ["monitored_barrier"]


def monitored_barrier(
    group: Group = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Wait until every rank of the group has come here, and say who has not.

    The error of rank 0 names the first rank that is missing, or all of them with
    ``wait_all_ranks``; those of the others point at rank 0. Its cause tells everything that is
    known. Every collective of gradsync watches its ranks like this: this one is for programs that
    expect torch's words.

    Args:
        group: the default one unless given.
        timeout: a timedelta; the group's own unless given. A float is taken as seconds, with a
            warning.
        wait_all_ranks: name all ranks that are missing.
    """
    where = member_group("monitored_barrier", group)
    if where is None:
        return
    if isinstance(timeout, float):
        warnings.warn(
            f"monitored_barrier takes a timedelta; the float {timeout} is taken as seconds",
            stacklevel=2,
        )
    elif timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"monitored_barrier takes a timedelta as timeout, got {timeout!r}")
    where.monitored_barrier(timeout, wait_all_ranks)


keep_compiler_out(globals())
