"""``meet``: the one call that turns an init method into a store, a rank, and everyone's names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from gradsync.base.deadline import Deadline, Timeout
from gradsync.base.host import HostEvidence
from gradsync.base.later import Later
from gradsync.config import environment
from gradsync.errors import DistNetworkError, DistStoreError, RendezvousError, UsageError
from gradsync.rendezvous.door import Door, meet_at_door
from gradsync.rendezvous.join import Joined, Preparation, join, leave
from gradsync.rendezvous.member import Member, Party
from gradsync.rendezvous.place import UnixPlace
from gradsync.rendezvous.resolve import open_store, parent_identity, serves, settle
from gradsync.rendezvous.spec import Spec, parse
from gradsync.stores.prefix import PrefixStore
from gradsync.stores.store import DEFAULT_TIMEOUT, Store

__all__ = ["Meeting", "meet", "register_rendezvous_handler", "rendezvous"]

Triple = tuple[Store, int, int]
Handler = Callable[..., Iterator[Triple]]

_BUILT_IN = ("env", "tcp", "file")
_handlers: dict[str, Handler] = {}

# How long to wait before a client tries a store again that went away under it.
_RETRY_S, _KNOCK_AGAIN_S = 0.05, 0.005
_HANDOVER_S = 2.0


class Meeting(NamedTuple):
    """The ranks of a job, met.

    ``store`` is a name space of this meeting's own: keys of an earlier group in the same processes
    are not in it. ``members`` holds everyone in rank order.
    """

    store: Store
    rank: int
    world_size: int
    members: Sequence[Member]
    generation: int
    local_rank: int
    local_world_size: int
    root: Store
    """The store that ``store`` is a part of."""

    @property
    def evidence(self) -> Sequence[HostEvidence]:
        """Where everyone runs, in rank order."""
        return Later(self.world_size, lambda: tuple(member.evidence for member in self.members))

    def leave(self) -> None:
        """Give this rank's number back, so that another process may take it; never raises."""
        leave(self.root, Joined(self.generation, self.members), self.rank)


def meet(
    init_method: str | None = None,
    *,
    rank: int = -1,
    world_size: int = -1,
    store: Store | None = None,
    timeout: Timeout | None = DEFAULT_TIMEOUT,
    env: Mapping[str, str] | None = None,
    preparation: Preparation | None = None,
    door: Door | None = None,
    party: Party | None = None,
) -> Meeting:
    """Meet the other ranks of the job and return when all of them are there.

    With nothing given and nothing set this is a world of one. ``timeout`` of None waits for ever.
    What ``preparation`` does takes part in arriving; ranks of one host may meet at a ``door``. What
    is known of them before, at a store, is said with ``party``.

    Raises:
        UsageError: arguments or environment are incomplete or contradict each other.
        RendezvousError: not everyone came, or two came as the same rank; says who.

    >>> meet(world_size=1).members[0].rank
    0
    """
    deadline = Deadline(timeout)
    env = environment() if env is None else env
    if store is not None:
        if init_method is not None:
            raise UsageError("pass either store or init_method, not both")
        if world_size < 1 or rank < 0:
            raise UsageError(f"a store needs rank and world_size, got {rank=} and {world_size=}")
        who = Party() if party is None else party
        joined = join(store, rank, world_size, deadline, preparation=preparation, party=who)
        return _meeting(store, joined, rank, world_size, -1)
    if init_method is not None and _scheme(init_method) in _handlers:
        # As torch hands it over; the longest that a timedelta can say stands for no limit.
        limit = timedelta(seconds=min(deadline.timeout_s, 1e9))
        found, rank, world_size = next(rendezvous(init_method, rank, world_size, timeout=limit))
        return meet(
            store=found,
            rank=rank,
            world_size=world_size,
            timeout=deadline.remaining(),
            preparation=preparation,
        )
    spec = settle(parse(init_method, rank, world_size, env, parent_identity))
    opened, joined = _open_and_join(spec, deadline, timeout, preparation, door)
    return _meeting(opened, joined, spec.rank, spec.world_size, spec.local_rank)


def _open_and_join(
    spec: Spec,
    deadline: Deadline,
    timeout: Timeout | None,
    preparation: Preparation | None,
    door: Door | None,
) -> tuple[Store, Joined]:
    serving = serves(spec)
    while True:
        met = (None, None) if door is None else meet_at_door(spec, deadline, door)
        store, joined = met[0] or _open(spec, deadline), met[1]
        try:
            joined = joined or join(
                store,
                spec.rank,
                spec.world_size,
                deadline,
                local_rank=spec.local_rank,
                serves=serving,
                preparation=preparation,
            )
        except DistNetworkError as error:
            # A rank that meets for the second time may find the first store while rank 0 is still
            # putting it away. The next one is served under the same name.
            if serving or deadline.expired():
                raise RendezvousError(
                    f"rank {spec.rank} of {spec.world_size} lost the store at {spec.place} while "
                    f"it waited for the others: {error}"
                ) from error
            time.sleep(_RETRY_S if door is None else _KNOCK_AGAIN_S)
        else:
            # So far it held what was left of the deadline.
            store.set_timeout(0.0 if timeout is None else timeout)
            return store, joined


def _open(spec: Spec, deadline: Deadline) -> Store:
    serving = serves(spec)
    # A name in use may be the one that another process is just giving back; a job that keeps it
    # must be reported soon.
    patience = Deadline(min(_HANDOVER_S, deadline.remaining()))
    while True:
        try:
            return open_store(spec, deadline)
        except (DistStoreError, DistNetworkError, TimeoutError) as error:
            if serving and "EADDRINUSE" in str(error) and not patience.expired():
                time.sleep(_RETRY_S)
                continue
            reason = f"could not {'serve' if serving else 'reach'} the store at {spec.place}: "
            hint = "" if serving else ". Rank 0 serves it: does it run, and at the same address?"
            if isinstance(spec.place, UnixPlace) and spec.place.launched:
                hint = ". The launcher serves it: has it ended?"
            raise RendezvousError(
                f"rank {spec.rank} of {spec.world_size} {reason}{error}{hint}"
            ) from error


def _meeting(store: Store, joined: Joined, rank: int, world_size: int, local_rank: int) -> Meeting:
    here: Sequence[int] = range(world_size)
    if not joined.one_host:
        me = joined.members[rank].evidence
        here = [
            member.rank
            for member in joined.members
            if member.rank == rank or (me.boot_id and member.evidence.boot_id == me.boot_id)
        ]
    return Meeting(
        PrefixStore(f"gradsync/group/{joined.generation}", store),
        rank,
        world_size,
        joined.members,
        joined.generation,
        here.index(rank) if local_rank < 0 else local_rank,
        len(here),
        store,
    )


def register_rendezvous_handler(scheme: str, handler: Handler) -> None:
    """Let ``init_method="scheme://…"`` find its store through a function of one's own.

    ``handler`` is called with the URL (rank and world size in its query when they were passed
    as arguments) and ``timeout``, a timedelta, and yields ``(store, rank, world_size)``.

    >>> register_rendezvous_handler("demo", lambda url, **kw: iter([(None, 0, 1)]))
    >>> next(rendezvous("demo://"))
    (None, 0, 1)
    """
    if scheme in _BUILT_IN or scheme in _handlers:
        raise UsageError(f"a rendezvous handler for {scheme}:// is already registered")
    _handlers[scheme] = handler


def rendezvous(url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Iterator[Triple]:
    """Yield one ``(store, rank, world_size)`` for ``url``; asking for a second one is an error.

    Nobody is waited for: a store is opened, as torch's function of this name does.
    """
    if not isinstance(url, str):
        raise UsageError(f"the URL must be a string, got {url!r}")
    handler = _handlers.get(_scheme(url))
    if handler is None:
        # Parsed here and not in the generator, so that a mistake is reported by this call.
        spec = settle(parse(url, rank, world_size, environment(), parent_identity))
        return _yield_once(spec, kwargs.get("timeout", DEFAULT_TIMEOUT))
    given = {"rank": rank, "world_size": world_size}
    query = urlencode({name: value for name, value in given.items() if value != -1})
    if query:
        url += ("&" if urlsplit(url).query else "?") + query
    return handler(url, **kwargs)


def _yield_once(spec: Spec, timeout: Timeout | None) -> Iterator[Triple]:
    yield _open(spec, Deadline(timeout)), spec.rank, spec.world_size
    raise UsageError("this rendezvous has been used; ask for a new one to meet again")


def _scheme(url: str) -> str:
    return urlsplit(url).scheme if isinstance(url, str) else ""
