"""How the ranks of a group come to share memory, or learn why they cannot.

Ranks of a world that met at rank 0's door have it already (``invitation.py``). Otherwise rank 0
founds the group: it makes the memory and waits in a lobby, where each of the others gets it.
Its card says where that is. The ranks of a new world show their cards when they arrive, so nothing
is left to ask the store for; those of a sub-group read it there.

Ranks that do not have one kernel, network and user in common cannot come to one lobby. They find
out by trying who reaches whom, and say so.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from typing import NoReturn

from gradsync import _native
from gradsync.backends.backend import Bootstrap
from gradsync.backends.invitation import STAGING_BYTES, card_of, reach
from gradsync.backends.translate import forming_error, rank_states, stands_at
from gradsync.backends.waits import names, present_site
from gradsync.base.deadline import Deadline
from gradsync.base.host import HostEvidence, is_dead, islands
from gradsync.base.long_wait import LongWait
from gradsync.errors import (
    BackendUnavailable,
    DistError,
    PeerLostError,
    RendezvousError,
    StoreConnectionError,
    StoreTimeout,
)

__all__ = ["failure_key", "share_memory"]

_TO_PART_S = 5.0
_LOOK_S = 0.1
_TO_ANSWER_S = 0.3


def failure_key(rank: int) -> str:
    """Return where a rank says that it failed while its group was being formed."""
    return f"failed/{rank}"


def share_memory(bootstrap: Bootstrap, world: _native.Session | None) -> _native.Session:
    """Form one session of all ranks, sharing what ``world`` has, or say why that cannot be."""
    if bootstrap.invitation is not None and bootstrap.invitation.session is not None:
        return bootstrap.invitation.session  # of ranks that met at the door
    forming = _Forming(bootstrap, world)
    try:
        if not _have_all_in_common(bootstrap.evidence):
            return forming.by_trying()
        return forming.found() if bootstrap.rank == 0 else forming.come()
    except _native.StatusError as error:
        # Without its traceback, whose frames keep the lobby open as long as somebody has the error.
        raise forming.explained(forming.cause_of(error).with_traceback(None)) from None


def _have_all_in_common(evidence: Sequence[HostEvidence]) -> bool:
    """Return whether all ranks are known to reach each other's sockets in the abstract namespace.

    All ranks come to the same answer, since all of them have the same evidence.
    """
    first = evidence[0]
    return bool(first.boot_id and first.net_namespace) and all(
        (e.boot_id, e.net_namespace, e.uid) == (first.boot_id, first.net_namespace, first.uid)
        for e in evidence
    )


class _Forming:
    """One rank's part; looks who is still there while it waits.

    Without that, a rank that dies or fails after rendezvous would keep the others waiting for the
    whole timeout.
    """

    def __init__(self, bootstrap: Bootstrap, world: _native.Session | None) -> None:
        self._bootstrap = bootstrap
        self._world = world
        self._deadline = Deadline(bootstrap.timeout_s)
        self._long_wait = LongWait()

    # -- all in one place -------------------------------------------------------------------------

    def found(self) -> _native.Session:
        """Make the memory and hand it out, as rank 0."""
        invitation = self._bootstrap.invitation
        founder = None if invitation is None else invitation.founder
        made_here = founder is None
        if founder is None:
            founder = _native.Founder()
        # Also when the others saw the card of an arrival that was cut short.
        must_tell = invitation is None or invitation.shown != card_of(founder)
        if must_tell:
            self._bootstrap.store.set("lobby", card_of(founder))
        if made_here:
            founder.prepare(len(self._bootstrap.evidence), STAGING_BYTES, self._world)
        try:
            return self._hand_out(founder)
        finally:  # all have come, or nobody shall any more
            if must_tell:
                with contextlib.suppress(DistError):  # the store may be gone
                    self._bootstrap.store.delete_key("lobby")

    def come(self) -> _native.Session:
        """Get the memory from rank 0."""
        invitation = self._bootstrap.invitation
        card = "" if invitation is None else invitation.shown
        link = None
        if card:
            with contextlib.suppress(_native.StatusError):  # that of an arrival that was cut short
                link = reach(card)
        if link is None:
            card = self._await(["lobby"], [0])[0].decode()
            link = reach(card)
        return self._join(link, card)

    def _join(self, link: _native.Link, card: str) -> _native.Session:
        rank, size = self._bootstrap.rank, len(self._bootstrap.evidence)
        secret = bytes.fromhex(card.split()[1])
        return link.join(secret, rank, size, self._deadline.remaining(), self._world)

    def _hand_out(self, founder: _native.Founder) -> _native.Session:
        evidence = self._bootstrap.evidence
        # A pid means the same process to us only within one pid namespace.
        here = evidence[0].pid_namespace
        pids = [e.pid if here and e.pid_namespace == here else 0 for e in evidence]
        try:
            while missing := founder.gather(pids, self._slice_s()):
                self._look_around(missing)
        except _native.StatusError as error:
            code, message, ranks = error.args
            founder.turn_away(message, ranks, code == "peer_lost")
            self._let_others_look()
            with contextlib.suppress(_native.StatusError):
                founder.gather(pids, 0.0)  # who came meanwhile
            founder.turn_away(message, ranks, code == "peer_lost")
            raise
        return founder.found(self._deadline.remaining(), self._world)

    # -- in several places, perhaps ---------------------------------------------------------------

    def by_trying(self) -> _native.Session:
        """Reach for the lobby of the lowest rank with the same boot id, and compare notes."""
        rank, evidence = self._bootstrap.rank, self._bootstrap.evidence
        founder = _native.Founder()
        cards = self._swap("lobby", card_of(founder))
        leader, link = _reach_lowest(rank, evidence, cards)
        leaders = [int(text) for text in self._swap("leader", str(leader))]
        groups = islands(evidence, dict(enumerate(leaders)))
        if len(groups) > 1:
            # Rank 0 may serve the store: nobody goes before everybody knows.
            limit_s = min(self._bootstrap.timeout_s, _TO_PART_S)
            self._bootstrap.store.barrier("islands", len(evidence), limit_s)
            raise BackendUnavailable(_explain(groups, evidence))
        if link is not None:
            return self._join(link, cards[0])
        founder.prepare(len(evidence), STAGING_BYTES, self._world)
        return self._hand_out(founder)

    def _swap(self, name: str, text: str) -> list[str]:
        """Exchange a text with every rank through the store."""
        ranks = range(len(self._bootstrap.evidence))
        keys = [f"{name}/{rank}" for rank in ranks]
        self._bootstrap.store.set(keys[self._bootstrap.rank], text)
        return [value.decode() for value in self._await(keys, ranks)]

    # -- waiting ----------------------------------------------------------------------------------

    def _slice_s(self) -> float:
        return min(_LOOK_S, max(self._deadline.remaining(), 0.001))

    def _await(self, keys: Sequence[str], ranks: Sequence[int]) -> list[bytes]:
        """Return what each of ``ranks`` has put under its key."""
        store = self._bootstrap.store
        while True:
            try:
                store.wait(keys, self._slice_s())
            except StoreTimeout:
                late = [r for r, key in zip(ranks, keys, strict=True) if not store.check([key])]
                try:
                    self._look_around(late)
                except _native.StatusError:
                    self._let_others_look()
                    raise
            except StoreConnectionError:
                # Its server may have gone because of a rank that had gone before.
                self._find_dead(range(len(self._bootstrap.evidence) - 1, -1, -1))
                raise
            else:
                return store.multi_get(keys)

    def _look_around(self, missing: Sequence[int]) -> None:
        """Raise when there is no point in waiting any longer."""
        self._find_lost(missing)
        if missing and self._deadline.expired():
            within = f"within {self._bootstrap.timeout_s:.3g} s"
            if self._world is None:
                message = f"not every rank was heard of again {within} after it had arrived"
            else:
                message = (
                    f"not every member came {within}; every rank of the world calls new_group, in "
                    f"the same order"
                )
            raise _native.StatusError("timeout", message, missing)
        self._long_wait.look(lambda: self._who_waits_for(missing))

    def _who_waits_for(self, missing: Sequence[int]) -> str:
        places = self._bootstrap.places
        site = present_site()
        return (
            f"rank {places[self._bootstrap.rank]} for {names([places[r] for r in missing])} in "
            f"forming the group {self._bootstrap.group!r}" + (f" (at {site})" if site else "")
        )

    def _find_lost(self, ranks: Sequence[int]) -> None:
        """Raise when one of ``ranks`` will not come: it failed, is dead or has left the world."""
        self._find_failed(ranks)
        self._find_gone(ranks)  # first: it may have said why before it died
        self._find_dead(ranks)

    def _find_failed(self, ranks: Iterable[int]) -> None:
        store = self._bootstrap.store
        for rank in ranks:
            if store.check([failure_key(rank)]):
                why = store.get(failure_key(rank)).decode("utf-8", "replace")
                self._lost(rank, f"failed before the group was formed: {why}")

    def _find_dead(self, ranks: Iterable[int]) -> None:
        evidence = self._bootstrap.evidence
        for rank in ranks:
            if is_dead(evidence[rank], evidence[self._bootstrap.rank]):
                self._lost(rank, "ended before the group was formed")

    def _find_gone(self, ranks: Iterable[int]) -> None:
        """Raise when a rank has left the world: its process may live on, but will not come."""
        if self._world is None:
            return
        states = rank_states(self._world)
        for rank in ranks:
            presence = states[self._bootstrap.places[rank]].presence
            if presence == "failed":
                note = self._world.last_words(self._bootstrap.places[rank])
                self._lost(rank, f"failed before the group was formed: {note}")
            if presence == "left":
                self._lost(rank, "left the world before the group was formed")

    def cause_of(self, error: _native.StatusError) -> _native.StatusError:
        """Return what a lost connection came from, or what a rank said before it ended."""
        code, _, ranks = error.args
        try:
            if code == "connection":
                size = len(self._bootstrap.evidence)
                self._find_lost([rank for rank in range(size) if rank != self._bootstrap.rank])
            elif code == "peer_lost":
                self._find_failed(ranks)
        except _native.StatusError as cause:
            return cause
        except DistError:
            pass  # the store went, too
        return error

    def _lost(self, rank: int, what: str) -> NoReturn:
        raise _native.StatusError("peer_lost", what, [rank])

    def _let_others_look(self) -> None:
        # We may serve the store: let the others find the same before we go.
        time.sleep(3 * _LOOK_S)

    def explained(self, error: _native.StatusError) -> DistError:
        """Return the exception for a group that could not be formed, with the ranks' names."""
        code, detail, ranks = error.args
        # Of a sub-group, too, ranks of the world are what its members know each other by.
        places = [self._bootstrap.places[rank] for rank in ranks]
        evidence = [self._bootstrap.evidence[rank] for rank in ranks]
        who = "; ".join(f"rank {r} ({e.where})" for r, e in zip(places, evidence, strict=True))
        if code == "peer_lost":
            return PeerLostError(f"{who}: {detail}", ranks=ranks)
        if code == "timeout" and ranks:
            about = f"the group could not be formed: {detail} ({who})"
            return RendezvousError(about + self._whereabouts(places))
        return forming_error(error)

    def _whereabouts(self, places: list[int]) -> str:
        """Say where ranks stand that are in the world but did not come to its sub-group."""
        if self._world is None:
            return ""
        return stands_at(zip(places, self._world.ask(places, _TO_ANSWER_S), strict=True))


def _reach_lowest(
    rank: int, evidence: Sequence[HostEvidence], cards: Sequence[str]
) -> tuple[int, _native.Link | None]:
    """Return the lowest rank whose lobby can be reached from here, and the way to it."""
    for other in range(rank):
        if not evidence[rank].boot_id or evidence[other].boot_id != evidence[rank].boot_id:
            continue
        try:
            return other, reach(cards[other])
        except _native.StatusError:
            continue  # the same kernel, but another network namespace: not reachable
    return rank, None


def _explain(groups: list[list[int]], evidence: Sequence[HostEvidence]) -> str:
    parts = "; ".join(
        f"ranks {', '.join(map(str, ranks))} on {evidence[ranks[0]].host} "
        f"(boot {evidence[ranks[0]].boot_id[:8]})"
        for ranks in groups
    )
    return (
        f"the shared-memory backend serves ranks that can map each other's memory, but these "
        f"cannot: {parts}. Start all ranks on one host, in one network namespace."
    )
