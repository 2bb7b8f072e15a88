"""monitored_barrier: a barrier whose error names all who did not come, in the words torch uses."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from gradsync.errors import CollectiveTimeout, DistError, PeerLostError
from gradsync.group.group import ProcessGroup
from gradsync.torch_backend.failures import torch_error

__all__ = ["monitored_barrier", "offer_monitored_barrier"]

_SHORTEST = timedelta(milliseconds=1)


def monitored_barrier(group: ProcessGroup, timeout: timedelta, wait_all_ranks: bool) -> None:
    """Wait until every rank of the group has come here, and say who has not."""
    try:
        # Zero is no limit to gradsync; here it is no patience.
        group.barrier(timeout=max(timeout, _SHORTEST))
    except (CollectiveTimeout, PeerLostError) as error:
        raise dist.DistBackendError(_complaint(group, error, timeout, wait_all_ranks)) from error
    except DistError as error:
        raise torch_error(error) from error


def _complaint(
    group: ProcessGroup,
    error: CollectiveTimeout | PeerLostError,
    timeout: timedelta,
    wait_all_ranks: bool,
) -> str:
    milliseconds = round(timeout.total_seconds() * 1000)
    missing = [group.members.world_rank(rank) for rank in error.ranks]
    if not missing or not milliseconds:
        head = f"Rank {group.rank()} timed out in monitoredBarrier after {milliseconds} ms"
    elif len(missing) == 1 or not wait_all_ranks:
        head = f"Rank {missing[0]} failed to pass monitoredBarrier in {milliseconds} ms"
    else:
        names = ", ".join(map(str, missing))
        head = f"Ranks {names} failed to pass monitoredBarrier in {milliseconds} ms"
    return f"{head}. {error}"


def offer_monitored_barrier() -> None:
    """Let ``torch.distributed.monitored_barrier`` take groups of ours.

    torch's function refuses every backend but Gloo by its name, before it asks the group.
    """
    known = c10d.monitored_barrier
    if hasattr(known, "takes_gradsync"):
        return

    @functools.wraps(known)
    def takes_ours_too(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        ours = getattr(c10d._get_default_group() if group is None else group, "group", None)
        if not isinstance(ours, ProcessGroup):
            known(group, timeout, wait_all_ranks)
            return
        if timeout is None:
            timeout = c10d.default_pg_timeout
        elif not isinstance(timeout, timedelta):
            timeout = timedelta(seconds=timeout)
        monitored_barrier(ours, timeout, wait_all_ranks)

    takes_ours_too.takes_gradsync = True  # type: ignore[attr-defined]
    for module in (c10d, dist):
        setattr(module, "monitored_barrier", takes_ours_too)  # noqa: B010  (no stub lists it)
