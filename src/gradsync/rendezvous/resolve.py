"""A ``Spec`` turned into an open store.

On one host that is a Unix socket in the abstract namespace, whatever the URL says: a port that is
not opened cannot be taken by another job, nor reached by another user.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from datetime import timedelta
from weakref import ref

from gradsync.base.deadline import Deadline
from gradsync.base.host import start_time
from gradsync.errors import StoreConnectionError
from gradsync.rendezvous.place import (
    AgentPlace,
    Alone,
    FilePlace,
    TcpPlace,
    UnixPlace,
    is_loopback,
)
from gradsync.rendezvous.spec import Spec
from gradsync.stores.file import FileStore
from gradsync.stores.hash import HashStore
from gradsync.stores.prefix import PrefixStore
from gradsync.stores.store import Store
from gradsync.stores.tcp import TCPStore
from gradsync.stores.unix import UnixStore

__all__ = [
    "is_own_host",
    "keep_served",
    "open_store",
    "parent_identity",
    "reach_later",
    "reserve",
    "serves",
    "settle",
]

# A store takes a finite time; this is "no limit" for one.
_NO_LIMIT_S = 10 * 365 * 86400.0

# The Unix sockets that this process serves: rank 0 may meet again while the group before is still
# being put away, and other ranks are still reading from its store.
_served: dict[str, ref[UnixStore]] = {}


def parent_identity() -> str:
    """Return a name of the parent process that no later process gets: pid and start time."""
    parent = os.getppid()
    return f"{parent}:{start_time(parent)}"


def settle(spec: Spec) -> Spec:
    """Return the spec with a Unix socket in place of an address that means this host only."""
    place = spec.place
    if not isinstance(place, TcpPlace):
        return spec
    one_host = spec.local_world_size == spec.world_size
    if not is_loopback(place.host) and not (one_host and is_own_host(place.host)):
        return spec
    here = UnixPlace.for_port(place.port)
    # Not _replace(), which took 10 us with cold caches, on the way to every world.
    return Spec(
        spec.rank, spec.world_size, here, spec.local_rank, spec.local_world_size, spec.token
    )


def serves(spec: Spec) -> bool:
    """Return whether this rank serves the store of a settled spec."""
    if isinstance(spec.place, UnixPlace):
        return spec.rank == 0 and not spec.place.launched
    return spec.rank == 0 and isinstance(spec.place, TcpPlace)


def open_store(spec: Spec, deadline: Deadline) -> Store:
    """Open, and on rank 0 serve, the store of a settled spec."""
    limit_s = _limit(deadline)
    place = spec.place
    if isinstance(place, UnixPlace):
        return _unix_store(place, serves(spec), limit_s, spec.token)
    if isinstance(place, TcpPlace):
        return TCPStore(
            place.host,
            place.port,
            spec.world_size,
            serves(spec),
            limit_s,
            wait_for_workers=False,
            multi_tenant=True,
            token=spec.token,
        )
    if isinstance(place, AgentPlace):
        return _agent_store(place, limit_s)
    if isinstance(place, FilePlace):
        store = FileStore(place.path, spec.world_size)
        store.set_timeout(limit_s)
        return store
    assert isinstance(place, Alone)
    return HashStore()


def _limit(deadline: Deadline) -> float:
    # A store takes zero for "no limit".
    return max(0.001, min(deadline.remaining(), _NO_LIMIT_S))


def reach_later(place: UnixPlace, deadline: Deadline, token: str) -> UnixStore:
    """Return the store of a place, which connects when it is first used."""
    return UnixStore.later(_unix_name(place), timeout=_limit(deadline), token=token)


def reserve(place: UnixPlace, deadline: Deadline, token: str) -> UnixStore | None:
    """Take the name of a store to serve; None when it is taken, perhaps by this very process."""
    name = _unix_name(place)
    if _find_served(name) is not None:
        return None
    try:
        return UnixStore.later(name, timeout=_limit(deadline), token=token, is_master=True)
    except StoreConnectionError:
        return None


def keep_served(store: UnixStore) -> None:
    """Let rank 0 find the store again that it serves now."""
    for key, served in list(_served.items()):  # other threads may serve stores, too
        if served() is None:
            _served.pop(key, None)
    _served[_served_key(store.name)] = ref(store)


def _find_served(name: str) -> UnixStore | None:
    served = _served.get(_served_key(name))
    return None if served is None else served()


def _served_key(name: str) -> str:
    return f"{os.getpid()}/{name}"  # not what a parent served before it forked


def _unix_name(place: UnixPlace) -> str:
    # The user's id keeps two users apart who both picked port 29500.
    return place.name if place.launched else f"{os.getuid()}-{place.name}"


def _unix_store(place: UnixPlace, serving: bool, limit_s: float, token: str) -> UnixStore:
    name = _unix_name(place)
    if not serving:
        return UnixStore(name, timeout=limit_s, token=token)
    store = _find_served(name)
    if store is None:
        try:
            store = UnixStore(name, is_master=True, timeout=limit_s, token=token)
        except StoreConnectionError as error:
            raise StoreConnectionError(f"{error}{_holder(name)}") from None
        keep_served(store)
    return store


def _holder(name: str) -> str:
    """Return who serves a Unix socket, as the end of a sentence."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.connect(f"\0gradsync/{name}")
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return f", held by pid {struct.unpack('3i', credentials)[0]}"
    return ""


def _agent_store(place: AgentPlace, limit_s: float) -> Store:
    # Under torchrun only, where torch is a given; everything else here lives without it.
    from torch import distributed as c10d

    from gradsync.stores.torch_store import from_torch

    client = c10d.TCPStore(  # type: ignore[attr-defined]
        place.host,
        place.port,
        is_master=False,
        timeout=timedelta(seconds=limit_s),
        wait_for_workers=False,
    )
    return PrefixStore(place.prefix, from_torch(client))


def is_own_host(host: str) -> bool:
    """Return whether ``host`` is a name or an address of this machine.

    Only an address of one's own can be bound, so no list of interfaces is needed, and names are
    compared by what they mean.
    """
    try:
        infos = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return host == socket.gethostname()
    for family, kind, protocol, _, address in infos:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False
