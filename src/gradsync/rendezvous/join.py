"""Arrival: every rank claims its slot of a round and waits for the others, or all learn why not.

A slot is written once, by compare-and-set: by its rank, or by whoever gives up on that rank (a
``Tombstone``). The contents of the slots are the verdict, so all ranks come to the same one.

Steps of a rank, and round trips when everybody comes::

    claim slot (generation, rank)      1
    read all slots, waiting for them   1
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple, NoReturn, Protocol

from gradsync.base.deadline import Deadline
from gradsync.base.host import host_evidence, is_dead
from gradsync.base.long_wait import LongWait
from gradsync.errors import (
    DistError,
    DistStoreError,
    PeerLostError,
    RendezvousError,
    StoreConnectionError,
)
from gradsync.rendezvous.member import Member, Party, Record, Tombstone, decode
from gradsync.stores.store import Store
from gradsync.stores.unix import UnixStore

__all__ = ["Joined", "Preparation", "join", "leave", "slot"]

_ROOT = "gradsync/rendezvous"
# While a rank waits, it looks around in growing steps: often enough to report a disagreement soon,
# seldom enough that a thousand waiting ranks do not keep the store busy.
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.5, 5.0
_ACKNOWLEDGE_S = 1.0
_TO_SAY_GOODBYE_S = 1.0


class Joined(NamedTuple):
    """The outcome of a round: its number on this store, and everyone in rank order."""

    generation: int
    members: Sequence[Member]
    one_host: bool = False
    """Whether all are known to be on this host."""


class Preparation(Protocol):
    """What a rank does for the time after meeting while it meets the others."""

    def card(self, rank: int, world_size: int) -> str:
        """Return what this rank has to tell everybody."""

    def prepare(self) -> None:
        """Use the time while others may still be on their way; may be called more than once."""

    def read(self, cards: Sequence[str]) -> None:
        """Take in what every rank had to tell, in rank order."""


_WORLD = Party()


def join(
    store: Store,
    rank: int,
    world_size: int,
    deadline: Deadline,
    *,
    local_rank: int = -1,
    serves: bool = False,
    preparation: Preparation | None = None,
    party: Party = _WORLD,
) -> Joined:
    """Meet the other ranks at ``store``; ``RendezvousError`` says who came and who is missing.

    May be called any number of times on a living store: each time is a new generation. ``serves``
    is set by the rank that serves the store, which must not take it away before everybody has read
    a bad verdict. Who of a ``party`` is known to have ended is not waited for.
    """
    card = "" if preparation is None else preparation.card(rank, world_size)
    evidence = host_evidence(anew=True)
    me = Member(rank, world_size, local_rank, evidence, secrets.token_hex(4), card)
    return _Arrival(store, me, deadline, serves, preparation, party).run()


def leave(store: Store, joined: Joined, rank: int) -> None:
    """Say that ``rank`` has left, so that another process may take its number; never raises."""
    try:
        if isinstance(store, UnixStore):
            store.connect(_TO_SAY_GOODBYE_S)  # who serves it may be stopped
        store.set(f"{slot(joined.generation, rank)}/left", b"1")
    except (DistStoreError, TimeoutError):
        pass  # the store went first: nobody is left to tell


def slot(generation: int, rank: int) -> str:
    """Return the key under which a rank's record is."""
    return f"{slots(generation)}{rank}"


def slots(generation: int) -> str:
    """Return what the keys of all ranks' records begin with; their ranks follow."""
    return f"{_ROOT}/{generation}/"


class _Arrival:
    def __init__(
        self,
        store: Store,
        me: Member,
        deadline: Deadline,
        serves: bool,
        preparation: Preparation | None,
        party: Party,
    ) -> None:
        self._store = store
        self._me = me
        self._deadline = deadline
        self._serves = serves
        self._preparation = preparation
        self._party = party
        self._long_wait = LongWait()
        self._past = ""
        """Why an earlier round on this store came to nothing, for the message of this one."""
        self._left_generation = 0
        """A complete round that we took for history, and who of its others was alive then."""
        self._left_behind: list[Member] = []
        self._dead: list[Member] = []

    def run(self) -> Joined:
        try:
            return self._run()
        except StoreConnectionError as error:
            if not self._left_behind:
                raise
            # Whoever served the store took the round for good, and has given up on it since.
            raise self._left_alone(str(error)) from error

    def _run(self) -> Joined:
        generation = 0
        while True:
            record = self._me.encode()
            found = self._store.compare_set(slot(generation, self._me.rank), b"", record)
            if found == record or self._is_mine(generation, decode(found)):
                if self._preparation is not None:
                    self._preparation.prepare()
                members = self._wait(generation)
                if members is not None:
                    self._leave_hint(generation)
                    if self._preparation is not None:
                        self._preparation.read([member.card for member in members])
                    return Joined(generation, members)
            generation = self._next(generation)

    # -- finding the round ------------------------------------------------------------------------

    def _is_mine(self, generation: int, held: Record) -> bool:
        """Return True to wait in this round, False to try the next one; raise for a duplicate."""
        if isinstance(held, Tombstone):
            self._past = held.reason
            return False
        records = self._look(generation, held.world_size)
        ended = any(isinstance(record, Tombstone) for record in records.values())
        complete = ended or len(records) == held.world_size
        if held.same_process(self._me):
            return not complete  # an arrival of ours that an error cut short, or one long ago
        if complete and self._is_over(generation, held, records):
            return False
        if is_dead(held.evidence, self._me.evidence):
            reason = f"rank {self._party.member(held)} ended before everyone had come"
            self._fill(generation, held.world_size, Tombstone(reason, failed=False))
            self._past = reason
            return False
        message = (
            f"rank {self._party.rank(held.rank)} is already taken by {held.where}, and "
            f"{self._me.where} claims it too. Does another job use the same address, or did two "
            "processes get the same rank? If the first process is gone, let the new one meet at "
            "another address."
        )
        self._fill(generation, held.world_size, Tombstone(message, failed=True))
        raise RendezvousError(message)

    def _is_over(self, generation: int, held: Member, records: dict[int, Record]) -> bool:
        """Return whether a complete round is history for the rank that finds its slot taken."""
        for record in records.values():
            if isinstance(record, Tombstone):
                self._past = record.reason
                return True
            if record.same_process(self._me):
                return True  # we were in it ourselves, under another rank
        if is_dead(held.evidence, self._me.evidence):
            return True
        return self._store.check([f"{slot(generation, held.rank)}/left"])

    def _next(self, generation: int) -> int:
        """Return the next round to try; on a store with a long history, near the last one."""
        if generation:
            return generation + 1
        return max(1, self._store.add(f"{_ROOT}/generation", 0))

    def _leave_hint(self, generation: int) -> None:
        if generation and self._me.rank == 0:
            self._store.set(f"{_ROOT}/generation", str(generation))

    # -- waiting ----------------------------------------------------------------------------------

    def _wait(self, generation: int) -> tuple[Member, ...] | None:
        """Return the members once all are there, None when the round moves on."""
        keys = [slot(generation, rank) for rank in range(self._me.world_size)]
        look_s = _FIRST_LOOK_S
        while True:
            try:
                # Zero would mean "for ever" to a store.
                limit_s = max(min(look_s, self._deadline.remaining()), 0.001)
                values = self._store.get_within(keys, limit_s)
            except TimeoutError:
                look_s = min(2 * look_s, _LONGEST_LOOK_S)
                self._look_around(generation)
                if self._deadline.expired():
                    self._give_up(generation)
                continue
            return self._verdict(generation, [decode(value) for value in values])

    def _look(self, generation: int, world_size: int) -> dict[int, Record]:
        """Return the slots that are filled right now."""
        keys = [slot(generation, rank) for rank in range(world_size)]
        if self._store.check(keys):
            present = list(range(world_size))
        else:
            present = [rank for rank, key in enumerate(keys) if self._store.check([key])]
        values = self._store.multi_get([keys[rank] for rank in present])
        return {rank: decode(value) for rank, value in zip(present, values, strict=True)}

    def _look_around(self, generation: int) -> None:
        """End the round early when it can no longer succeed."""
        self._follow_those_who_gave_up(generation)
        records = self._look(generation, self._me.world_size)
        members = [record for record in records.values() if isinstance(record, Member)]
        reason = self._why_history(members)
        if reason:
            self._fill(generation, self._me.world_size, Tombstone(reason, failed=False))
            return
        self._refuse_disagreement(generation, members)
        reason = self._who_will_not_come(records)
        if reason:
            self._fill(generation, self._me.world_size, Tombstone(reason, failed=True))
            return
        if self._me.rank == min(member.rank for member in members):  # one line for all who wait
            self._long_wait.look(lambda: self._who_is_missing(records, members))

    def _missing(self, records: dict[int, Record]) -> list[int]:
        return [rank for rank in range(self._me.world_size) if rank not in records]

    def _who_will_not_come(self, records: dict[int, Record]) -> str:
        """Return who has ended before it came, where that is known, else ""."""
        for rank in self._missing(records) if self._party.evidence else ():
            last = self._party.evidence[rank]
            if is_dead(last, self._me.evidence):
                return f"rank {self._party.rank(rank)} ({last.where}) ended before it came"
        return ""

    def _who_is_missing(self, records: dict[int, Record], came: list[Member]) -> str:
        return (
            f"{len(came)} of {self._me.world_size} ranks have come to form {self._party.name}. "
            f"Came: {self._party.names(came)}. Missing: {self._party.ranks(self._missing(records))}"
        )

    def _give_up(self, generation: int) -> None:
        records = self._look(generation, self._me.world_size)
        came = [record for record in records.values() if isinstance(record, Member)]
        past = f" An earlier attempt at the same address failed: {self._past}" if self._past else ""
        message = (
            f"only {len(came)} of {self._me.world_size} ranks came within "
            f"{self._deadline.timeout_s:.1f} s. Came: {self._party.names(came)}. Missing: "
            f"{self._party.ranks(self._missing(records))}. Look at the output of the missing "
            f"ranks: they may have failed before they got here, or look for another address.{past}"
        )
        self._fill(generation, self._me.world_size, Tombstone(message, failed=True))

    # -- the verdict ------------------------------------------------------------------------------

    def _verdict(self, generation: int, records: list[Record]) -> tuple[Member, ...] | None:
        members: list[Member] = []
        for record in records:
            if isinstance(record, Member):
                members.append(record)
            elif record.failed:
                self._fail(generation, record.reason)
            else:
                self._past = record.reason
        if len(members) < len(records):
            return None
        reason = self._why_history(members)
        if reason:
            self._past = reason
            others = [m for m in members if m.attempt != self._me.attempt]
            self._left_generation = generation
            self._dead = [m for m in others if is_dead(m.evidence, self._me.evidence)]
            self._left_behind = [m for m in others if m not in self._dead]
            return None
        self._refuse_disagreement(generation, members)
        return tuple(members)

    def _follow_those_who_gave_up(self, generation: int) -> None:
        """Raise when others have begun to form the group that we took for history, and failed.

        A rank that dies right after it came is dead to those who look now and was alive to those
        who looked before. These go on, find out and raise: nobody will come to our next round.
        """
        for member in self._left_behind:
            if self._store.check([f"{slot(self._left_generation, member.rank)}/left"]):
                self._fill(generation, self._me.world_size, Tombstone(self._past, failed=False))
                sign = f"rank {self._party.rank(member.rank)} has given up, too"
                raise self._left_alone(sign)

    def _left_alone(self, sign: str) -> DistError:
        """Return the error for a round that we left and others took for good until they failed."""
        message = f"{self._mine()}{self._past} ({sign})"
        lost = [member.rank for member in self._dead]
        return PeerLostError(message, ranks=lost) if lost else RendezvousError(message)

    def _mine(self) -> str:
        return f"rank {self._party.rank(self._me.rank)} could not form the group: "

    def _why_history(self, members: list[Member]) -> str:
        """Return why this round can no longer be ours though nobody failed it, else ""."""
        for member in members:
            # A file that an earlier run left behind holds the introductions of dead processes.
            if not member.same_process(self._me) and is_dead(member.evidence, self._me.evidence):
                return f"rank {self._party.member(member)} ended before everyone had come"
        for size in {member.world_size for member in members}:
            # A smaller world formed here before; the new one has more ranks than that had slots.
            if size < self._me.world_size and size == sum(m.world_size == size for m in members):
                return f"{size} ranks formed a world of their own"
        return ""

    def _refuse_disagreement(self, generation: int, members: list[Member]) -> None:
        sizes = sorted({member.world_size for member in members})
        if len(sizes) < 2:
            return
        claims = "; ".join(
            f"{size} say {self._party.names(m for m in members if m.world_size == size)}"
            for size in sizes
        )
        message = (
            f"the ranks disagree on the world size: {claims}. Start all of them with the same "
            "WORLD_SIZE, or let the jobs meet at different addresses."
        )
        self._fill(generation, sizes[-1], Tombstone(message, failed=True))
        self._fail(generation, message)

    def _fill(self, generation: int, world_size: int, tombstone: Tombstone) -> None:
        """Write the tombstone into every empty slot, which wakes everyone who waits."""
        value = tombstone.encode()
        for rank in range(world_size):
            self._store.compare_set(slot(generation, rank), b"", value)

    def _fail(self, generation: int, reason: str) -> NoReturn:
        acknowledged = f"{_ROOT}/{generation}/failed"
        try:
            if self._serves:
                records = self._look(generation, self._me.world_size)
                came = {rank for rank, record in records.items() if isinstance(record, Member)}
                others = sorted(came - {self._me.rank})
                self._store.wait([f"{acknowledged}/{rank}" for rank in others], _ACKNOWLEDGE_S)
            else:
                self._store.set(f"{acknowledged}/{self._me.rank}", b"1")
        except (DistStoreError, TimeoutError):
            pass  # the reason below says more than a store that is going away
        raise RendezvousError(f"{self._mine()}{reason}")
