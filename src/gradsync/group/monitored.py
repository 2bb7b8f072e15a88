"""``monitored_barrier``: a barrier whose errors are told the way torch's are."""

from __future__ import annotations

import warnings
from datetime import timedelta

from gradsync.base.deadline import seconds
from gradsync.errors import CollectiveTimeout
from gradsync.group.collectives import Group, member_group
from gradsync.group.compiling import keep_compiler_out
from gradsync.group.group import ProcessGroup

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
    before = where._get_sequence_number_for_group()
    try:
        where.barrier(timeout)
    except CollectiveTimeout as error:
        # Of an earlier call that broke the group, all that can be told is what it was.
        if not error.ranks or 0 < error.seq <= before:
            raise
        limit_s = error.timeout_s if timeout is None else seconds(timeout)
        raise _told(where, error, limit_s, wait_all_ranks) from error


def _told(
    group: ProcessGroup, error: CollectiveTimeout, limit_s: float, wait_all_ranks: bool
) -> CollectiveTimeout:
    missing = [group.members.world_rank(rank) for rank in error.ranks]
    within = f"within {limit_s * 1000:.0f} ms"
    if group.rank() != 0 and 0 not in error.ranks:
        text = (
            f"not every rank came to monitored_barrier {within}; the error of rank "
            f"{group.members.world_rank(0)} names those that are missing"
        )
    elif len(missing) == 1 or not wait_all_ranks:
        missing = missing[:1]
        text = f"rank {missing[0]} did not come to monitored_barrier {within}"
    else:
        text = f"ranks {', '.join(map(str, missing))} did not come to monitored_barrier {within}"
    return CollectiveTimeout(
        f"{text} (told by rank {group.members.world_rank(group.rank())})",
        group=error.group,
        op="monitored_barrier",
        seq=error.seq,
        rank=error.rank,
        ranks=error.ranks if len(missing) == len(error.ranks) else error.ranks[:1],
        timeout_s=limit_s,
    )


keep_compiler_out(globals())
