"""The life of a world: rendezvous, backend and group put together, and taken apart."""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from gradsync.backends.backend import Bootstrap
from gradsync.backends.forming import failure_key
from gradsync.backends.invitation import Invitation
from gradsync.backends.registry import BackendConfig, engine_of, invitation_to, open_engine
from gradsync.base.deadline import Deadline, Timeout, limit_of
from gradsync.config import read_seconds, reject_unknown
from gradsync.errors import DistError, UsageError
from gradsync.group.group import ProcessGroup
from gradsync.group.members import Members
from gradsync.group.world import default_group, is_non_member, replace_default_group, resolve
from gradsync.rendezvous.meeting import Meeting, meet
from gradsync.session.debug import get_debug_level, tell, watch_group
from gradsync.session.ending import watch_for_the_end
from gradsync.stores.prefix import PrefixStore
from gradsync.stores.store import Store
from gradsync.stores.torch_store import from_torch

__all__ = [
    "DEFAULT_GROUP_TIMEOUT",
    "_abort_process_group",
    "_set_pg_timeout",
    "abort_process_group",
    "check_device",
    "create_world",
    "default_pg_timeout",
    "destroy_process_group",
    "form_group",
    "init_process_group",
    "report_failure",
]

DEFAULT_GROUP_TIMEOUT = timedelta(minutes=30)
default_pg_timeout = DEFAULT_GROUP_TIMEOUT
"""torch's name of it."""


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
        backend: None, ``"shm"`` or ``"gradsync"`` for shared memory on one host, or a name that was
            registered with ``Backend.register_backend``; also as ``"cpu:shm"``.
        init_method: ``env://``, ``tcp://host:port`` or ``file:///path``.
        timeout: limit for meeting and for every later call (30 minutes); a timedelta or seconds,
            zero for none.
        world_size: number of ranks; beats the environment.
        rank: the caller's rank; beats the environment.
        store: a store of gradsync's or torch's to meet at, instead of ``init_method``.
        group_name: accepted for compatibility and ignored.
        pg_options: handed to a registered backend of the extended kind; nobody else reads it.
        device_id: for torch's sake; gradsync's own backend has no devices to bind.

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
    group = create_world(
        backend,
        init_method,
        timeout,
        world_size,
        rank,
        store,
        pg_options=pg_options,
        device_id=device_id,
    )
    replace_default_group(group)


def create_world(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Timeout | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    *,
    pg_options: Any = None,
    device_id: Any = None,
) -> ProcessGroup:
    """Meet other ranks and return the group of all of them; the default group is not touched.

    A process may be in any number of worlds, each with its own ranks, at the same time. Arguments
    are those of ``init_process_group``. ``split_group`` and ``new_subgroups`` cut sub-groups out,
    and ``destroy_process_group(group)`` (or ``group.close()``) ends it.

    >>> import gradsync
    >>> world = gradsync.create_world(world_size=1)
    >>> world.size(), gradsync.is_initialized()
    (1, False)
    >>> gradsync.destroy_process_group(world)
    """
    config = BackendConfig(backend)
    invitation = invitation_to(engine_of(config))
    check_device(device_id)
    reject_unknown()
    if invitation is None:
        read_seconds("GRADSYNC_LATE_AFTER")  # else that was done with the invitation
    get_debug_level()
    limit_s = limit_of(DEFAULT_GROUP_TIMEOUT if timeout is None else timeout)
    deadline = Deadline(limit_s)
    if store is not None and not isinstance(store, Store):
        store = from_torch(store)
    try:
        meeting = meet(
            init_method,
            rank=rank,
            world_size=world_size,
            store=store,
            timeout=None if math.isinf(limit_s) else limit_s,
            preparation=invitation,
            door=invitation,
        )
        group = _form_world(meeting, deadline, limit_s, config, pg_options, invitation)
        watch_for_the_end(group)
    except BaseException:
        if invitation is not None:
            invitation.decline()
        raise
    return group


def _form_world(
    meeting: Meeting,
    deadline: Deadline,
    limit_s: float,
    config: BackendConfig,
    options: Any,
    invitation: Invitation | None,
) -> ProcessGroup:
    members = Members(
        name="world",
        description="default_pg",
        ranks=tuple(range(meeting.world_size)),
        rank=meeting.rank,
        evidence=meeting.evidence,
        store=meeting.store,
    )
    try:
        return form_group(
            members,
            meeting.store,
            deadline,
            limit_s,
            on_close=meeting.leave,
            config=config,
            options=options,
            invitation=invitation,
        )
    except BaseException:
        meeting.leave()
        raise


def check_device(device_id: Any) -> None:
    """Raise unless no device is asked for: gradsync's groups are not bound to any."""
    if device_id is not None:
        raise UsageError(
            f"device_id binds a group to an accelerator, of which gradsync uses none; leave it out "
            f"(got {device_id!r})"
        )


def form_group(
    members: Members,
    store: Store,
    deadline: Deadline,
    limit_s: float,
    on_close: Callable[[], None] | None = None,
    world: ProcessGroup | None = None,
    config: BackendConfig | None = None,
    options: Any = None,
    invitation: Invitation | None = None,
) -> ProcessGroup:
    """Bring the members of a group together on its backend, shared memory unless told otherwise."""
    config = BackendConfig(None) if config is None else config
    engine = engine_of(config, None if world is None else world.backend)
    start = time.monotonic()
    bootstrap = Bootstrap(
        store=_store_of(store, members.name),
        rank=members.rank,
        evidence=members.evidence,
        timeout_s=deadline.remaining(),
        group=members.name,
        world=None if world is None else world.backend,
        places=members.ranks,
        invitation=invitation,
    )
    try:
        backend = open_engine(engine, bootstrap, options)
    except BaseException as error:
        report_failure(store, members.name, members.rank, error)
        raise
    group = ProcessGroup(backend, members, timeout_s=limit_s, on_close=on_close)
    group.backend_config = str(config)
    group.parent = None if world is None else weakref.ref(world)
    watch_group(group, time.monotonic() - start)
    return group


def _store_of(store: Store, group: str) -> Store:
    return PrefixStore(f"shm/{group}", store)


def report_failure(store: Store, group: str, rank: int, error: BaseException) -> None:
    """Tell those who wait for a rank of a group that is being formed why it will not come."""
    with contextlib.suppress(DistError):  # the store may be what failed
        _store_of(store, group).set(failure_key(rank), f"{type(error).__name__}: {error}")


def destroy_process_group(group: ProcessGroup | int | None = None) -> None:
    """Leave the group (the default one unless given, with all its sub-groups) for good.

    Its memory is given back. The other ranks are not waited for.
    """
    if is_non_member(group):
        return
    leaving = resolve(group)
    _forget(leaving)
    tell(leaving, "destroyed")
    leaving.close()


def abort_process_group(
    group: ProcessGroup | int | None = None, reason: str = "abort_process_group() was called"
) -> None:
    """End a group (the default one unless given, with all its sub-groups) for all of its ranks.

    Whatever the other ranks wait for on it fails with an ``AbortedError`` that has the reason, as
    do their later calls; here it is destroyed.
    """
    if is_non_member(group):
        return
    leaving = resolve(group)
    _forget(leaving)
    tell(leaving, "aborted (%s)", reason)
    for ending in (*leaving.children, leaving):
        ending.abort(reason)
    leaving.close()


_abort_process_group = abort_process_group


def _set_pg_timeout(timeout: Timeout, group: ProcessGroup | None = None) -> None:
    """Set how long the calls of a group may take from now on."""
    resolve(group).set_timeout(timeout)


def _forget(leaving: ProcessGroup) -> None:
    if leaving is default_group():
        replace_default_group(None)
    elif leaving.is_closed():
        raise UsageError(f"{leaving!r} has been destroyed already")
    world = None if leaving.parent is None else leaving.parent()
    if world is not None and leaving in world.children:
        world.children.remove(leaving)
