"""The short way to a world on one host: every rank comes to rank 0's door and leaves with memory.

One round trip in place of five. Rank 0 takes the store's name and opens a door beside it; each of
the others knocks, says who it is and waits. When all have come, each gets what the backend has for
it and everyone's introduction, and rank 0 lets others connect to the store, where all slots of the
first round are filled as if the ranks had met there. Nobody needs it until it is used.

Only what goes well is done here. When somebody does not come in time, leaves again or does not fit
in, the door is closed, and all meet at the store, which knows how to tell what is wrong
(``join.py``). A store that can be reached means that there is no door any more: it is not served
before.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from gradsync.base.deadline import Deadline
from gradsync.base.host import host_evidence
from gradsync.base.later import Later
from gradsync.errors import DistNetworkError, DistStoreError, RendezvousError
from gradsync.rendezvous.join import Joined, slots
from gradsync.rendezvous.member import Member, decode
from gradsync.rendezvous.place import UnixPlace
from gradsync.rendezvous.resolve import keep_served, reach_later, reserve
from gradsync.rendezvous.spec import Spec
from gradsync.stores.unix import UnixStore

__all__ = ["Door", "meet_at_door"]

# How long rank 0 waits at the door: longer than ranks that start together are apart. After that all
# meet at the store, where everybody sees who is missing.
_OPEN_S = 1.0
# Ranks that start together are some tenths of a millisecond apart, and one that sleeps is not woken
# up as fast as that.
_MOMENT_S = 0.0005
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 0.02
_SEPARATOR = b"\n"  # not within a record
_attempts = itertools.count(1)


class Door(Protocol):
    """What a backend does at the door."""

    def receive(
        self,
        store: UnixStore,
        name: str,
        secret: bytes,
        words: bytes,
        world_size: int,
        slots: str,
        patience_s: float,
        limit_s: float,
    ) -> list[bytes]:
        """Let everybody in who comes to the door of rank 0, which says ``words`` of itself.

        Returns what each said; nothing when somebody does not come as they should, and all are to
        meet at the store. In either case others may connect to it then; when all have come, what
        each said is there, under ``slots`` followed by its rank.
        """

    def knock(self, name: str, moment_s: float) -> bool:
        """Reach the door of rank 0; False when there is none, nor within a moment."""

    def enter(
        self, secret: bytes, rank: int, world_size: int, words: bytes, limit_s: float
    ) -> bytes:
        """Introduce this rank and return what rank 0 tells; nothing when it refuses."""


def meet_at_door(
    spec: Spec, deadline: Deadline, door: Door
) -> tuple[UnixStore | None, Joined | None]:
    """Meet the ranks of a settled spec.

    Without an outcome they are to meet at the store: the one returned, or one yet to be opened.
    """
    place = spec.place
    if not isinstance(place, UnixPlace) or place.launched:
        return None, None
    if spec.rank != 0:
        return _come(reach_later(place, deadline, spec.token), spec, deadline, door)
    store = reserve(place, deadline, spec.token)
    if store is None:
        return None, None
    try:
        joined = _open(store, spec, deadline, door)
    except BaseException as error:
        # Whoever keeps the error keeps this frame: the name must be free for the next attempt.
        store.give_up()
        if isinstance(error, (DistStoreError, DistNetworkError)):
            raise RendezvousError(
                f"rank 0 of {spec.world_size} could not serve the store at {place}: {error}"
            ) from error
        raise
    keep_served(store)
    return store, joined


def _open(store: UnixStore, spec: Spec, deadline: Deadline, door: Door) -> Joined | None:
    """Wait for the others; the store, whose name is taken, is served from then on."""
    said = door.receive(
        store,
        _name(store),
        _secret(spec.token),
        _introduction(spec),
        spec.world_size,
        slots(0),
        min(_OPEN_S, deadline.remaining() / 4),
        deadline.remaining(),
    )
    return _joined(said) if said else None


def _come(
    store: UnixStore, spec: Spec, deadline: Deadline, door: Door
) -> tuple[UnixStore | None, Joined | None]:
    """Knock until rank 0 is there, or serves the store.

    A store may be that of the world before, which is about to go: then rank 0 will come to a door.
    """
    me = _introduction(spec)
    name, began = _name(store), time.monotonic()
    moment_s = _MOMENT_S
    while not deadline.expired():
        if door.knock(name, moment_s):
            limit_s = deadline.remaining()
            words = door.enter(_secret(spec.token), spec.rank, spec.world_size, me, limit_s)
            if words:
                instance, *records = words.split(_SEPARATOR)
                store.instance = bytes.fromhex(instance.decode())
                return store, _joined(records)
            if deadline.expired():
                raise RendezvousError(
                    f"rank {spec.rank} of {spec.world_size} has been waiting for rank 0 at "
                    f"{spec.place} for {deadline.timeout_s:.1f} s: its process is there and does "
                    f"not answer. Look whether it is stopped"
                )
        if _connects(store, spec):
            return store, None
        moment_s = 0.0
        waited_s = time.monotonic() - began
        time.sleep(min(max(waited_s / 4, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))
    return None, None


def _name(store: UnixStore) -> str:
    return f"gradsync/{store.name}/door"


@lru_cache(maxsize=1)
def _secret(token: str) -> bytes:
    """Return what shows that a rank knows the job's token."""
    return hashlib.blake2b(token.encode(), digest_size=16, person=b"gradsync door").digest()


def _introduction(spec: Spec) -> bytes:
    attempt = f"door-{next(_attempts)}"
    me = Member(spec.rank, spec.world_size, spec.local_rank, host_evidence(), attempt)
    return me.encode()


def _joined(words: Sequence[bytes]) -> Joined:
    # Read when somebody is to be named. All have one kernel: they came to one Unix socket.
    return Joined(0, Later(len(words), lambda: _members(words)), one_host=True)


def _members(words: Sequence[bytes]) -> tuple[Member, ...]:
    return tuple(record for record in map(decode, words) if isinstance(record, Member))


def _connects(store: UnixStore, spec: Spec) -> bool:
    """Return whether the store is served, and we are connected to it."""
    try:
        return store.connect(if_served=True)
    except (DistStoreError, DistNetworkError, TimeoutError) as error:
        raise RendezvousError(
            f"rank {spec.rank} of {spec.world_size} could not reach the store at {spec.place}: "
            f"{error}"
        ) from error
