"""The life of the default group: rendezvous, backend and group put together, and taken apart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from gradsync.backends.backend import Bootstrap
from gradsync.backends.shm import ShmBackend, failure_key
from gradsync.base.deadline import Deadline, Timeout, seconds
from gradsync.config import environment, read_seconds, reject_unknown
from gradsync.errors import BackendUnavailable, DistError, UsageError
from gradsync.group.group import ProcessGroup
from gradsync.group.members import Members
from gradsync.group.world import default_group, is_non_member, replace_default_group, resolve
from gradsync.rendezvous.meeting import Meeting, meet
from gradsync.session.ending import watch_for_the_end
from gradsync.stores.prefix import PrefixStore
from gradsync.stores.store import Store
from gradsync.stores.torch_store import from_torch

__all__ = [
    "DEFAULT_GROUP_TIMEOUT",
    "default_pg_timeout",
    "destroy_process_group",
    "form_group",
    "init_process_group",
]

DEFAULT_GROUP_TIMEOUT = timedelta(minutes=30)
default_pg_timeout = DEFAULT_GROUP_TIMEOUT
"""torch's name of it."""

_NAMES_OF_SHM = (None, "shm", "gradsync")


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Timeout | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: Any = None,
) -> None:
    """Meet the other ranks and form the default group.

    With no arguments the environment decides: the variables that ``gradsync run``, torchrun, mpirun
    or Slurm set. With none of those set this is a world of one.

    Args:
        backend: None, ``"shm"`` or ``"gradsync"``: shared memory on one host.
        init_method: ``env://``, ``tcp://host:port`` or ``file:///path``.
        timeout: limit for meeting and for every later call (30 minutes); a timedelta or seconds.
        world_size: number of ranks; beats the environment.
        rank: the caller's rank; beats the environment.
        store: a store of gradsync's or torch's to meet at, instead of ``init_method``.
        group_name: accepted for compatibility and ignored.
        pg_options: accepted for compatibility and ignored.
        device_id: accepted for compatibility and ignored: groups are not bound to a device.

    >>> import gradsync
    >>> gradsync.init_process_group()
    >>> gradsync.get_rank(), gradsync.get_world_size()
    (0, 1)
    >>> gradsync.destroy_process_group()
    """
    if default_group() is not None:
        raise UsageError(
            "the default process group is initialised already; "
            "call gradsync.destroy_process_group() before initialising it again"
        )
    name = backend.lower() if isinstance(backend, str) else backend
    if name not in _NAMES_OF_SHM:
        raise BackendUnavailable(
            f"backend {backend!r} is not available; use 'shm' (or None) for ranks on one host"
        )
    reject_unknown(environment())
    read_seconds("GRADSYNC_LATE_AFTER")
    limit_s = seconds(DEFAULT_GROUP_TIMEOUT if timeout is None else timeout)
    deadline = Deadline(limit_s)
    if store is not None and not isinstance(store, Store):
        store = from_torch(store)
    meeting = meet(init_method, rank=rank, world_size=world_size, store=store, timeout=limit_s)
    try:
        group = _form_world(meeting, deadline, limit_s)
    except BaseException:
        meeting.leave()
        raise
    replace_default_group(group)
    watch_for_the_end()


def _form_world(meeting: Meeting, deadline: Deadline, limit_s: float) -> ProcessGroup:
    members = Members(
        name="world",
        description="default_pg",
        ranks=tuple(range(meeting.world_size)),
        rank=meeting.rank,
        evidence=tuple(member.evidence for member in meeting.members),
        store=meeting.store,
    )
    return form_group(members, meeting.store, deadline, limit_s, on_close=meeting.leave)


def form_group(
    members: Members,
    store: Store,
    deadline: Deadline,
    limit_s: float,
    on_close: Callable[[], None] | None = None,
    world: ProcessGroup | None = None,
) -> ProcessGroup:
    """Bring the members of a group together in shared memory."""
    own = PrefixStore(f"shm/{members.name}", store)
    bootstrap = Bootstrap(
        store=own,
        rank=members.rank,
        evidence=members.evidence,
        timeout_s=deadline.remaining(),
        group=members.name,
        world=None if world is None else world.backend,
        places=members.ranks,
    )
    try:
        backend = ShmBackend.open(bootstrap)
    except BaseException as error:
        with contextlib.suppress(DistError):  # the store may be what failed
            own.set(failure_key(members.rank), f"{type(error).__name__}: {error}")
        raise
    return ProcessGroup(backend, members, timeout_s=limit_s, on_close=on_close)


def destroy_process_group(group: ProcessGroup | int | None = None) -> None:
    """Leave the group (the default one unless given, with all its sub-groups) for good.

    Its memory is given back. The other ranks are not waited for.
    """
    if is_non_member(group):
        return
    leaving = resolve(group)
    world = default_group()
    if leaving is world:
        replace_default_group(None)
    elif world is not None:
        if leaving not in world.children:
            raise UsageError(f"{leaving!r} has been destroyed already")
        world.children.remove(leaving)
    leaving.close()
