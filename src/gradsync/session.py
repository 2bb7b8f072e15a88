"""The composition root: rendezvous, backend and group put together, and taken apart at the end.

The only module that knows all of them.
"""

from __future__ import annotations

import atexit
import sys
import traceback
from datetime import timedelta
from types import TracebackType
from typing import Any

from gradsync.backends.backend import Bootstrap
from gradsync.backends.shm import ShmBackend
from gradsync.base.deadline import Deadline, Timeout, seconds
from gradsync.config import environment, reject_unknown
from gradsync.errors import BackendUnavailable, UsageError
from gradsync.group.group import ProcessGroup
from gradsync.group.world import default_group, replace_default_group, resolve
from gradsync.rendezvous.meeting import Meeting, meet
from gradsync.stores.prefix import PrefixStore
from gradsync.stores.store import Store
from gradsync.stores.torch_store import from_torch

__all__ = [
    "destroy_process_group",
    "get_backend",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_available",
    "is_initialized",
]

DEFAULT_GROUP_TIMEOUT = timedelta(minutes=30)

_NAMES_OF_SHM = (None, "shm", "gradsync")


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Timeout | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
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
    limit_s = seconds(DEFAULT_GROUP_TIMEOUT if timeout is None else timeout)
    deadline = Deadline(limit_s)
    if store is not None and not isinstance(store, Store):
        store = from_torch(store)
    meeting = meet(init_method, rank=rank, world_size=world_size, store=store, timeout=limit_s)
    try:
        group = _form_group(meeting, deadline, limit_s)
    except BaseException:
        meeting.leave()
        raise
    replace_default_group(group)
    _watch_for_the_end()


def _form_group(meeting: Meeting, deadline: Deadline, limit_s: float) -> ProcessGroup:
    bootstrap = Bootstrap(
        store=PrefixStore("shm", meeting.store),
        rank=meeting.rank,
        evidence=[member.evidence for member in meeting.members],
        timeout_s=deadline.remaining(),
    )
    shm = ShmBackend.open(bootstrap)
    return ProcessGroup(
        shm, meeting.rank, meeting.world_size, timeout_s=limit_s, on_close=meeting.leave
    )


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Leave the group (the default one unless given) and give its memory back.

    The other ranks are not waited for.
    """
    leaving = resolve(group)
    leaving.close()
    if leaving is default_group():
        replace_default_group(None)


def is_available() -> bool:
    """Return True: gradsync works wherever it can be imported."""
    return True


def is_initialized() -> bool:
    """Return whether the default group exists."""
    return default_group() is not None


def get_rank(group: ProcessGroup | None = None) -> int:
    """Return the caller's rank in the group (the default one unless given)."""
    return resolve(group).rank()


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Return the number of ranks in the group (the default one unless given)."""
    return resolve(group).size()


def get_backend(group: ProcessGroup | None = None) -> str:
    """Return the name of the group's backend."""
    return resolve(group).name()


# -- the end of the process -----------------------------------------------------------------------


def _watch_for_the_end() -> None:
    """Make a rank that ends tell its peers, so that they need not find out."""
    if sys.excepthook is not _say_what_went_wrong:
        _previous_hooks.append(sys.excepthook)
        sys.excepthook = _say_what_went_wrong
        atexit.register(_say_goodbye)


_previous_hooks: list[Any] = []


def _say_what_went_wrong(
    kind: type[BaseException], error: BaseException, where: TracebackType | None
) -> None:
    group = default_group()
    if group is not None:
        group.leave("".join(traceback.format_exception(kind, error, where)).rstrip())
    _previous_hooks[-1](kind, error, where)


def _say_goodbye() -> None:
    group = default_group()
    if group is not None:
        group.close()
        replace_default_group(None)
