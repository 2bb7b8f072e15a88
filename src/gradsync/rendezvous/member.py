"""What a rank writes into its slot when it arrives, and what others write there to end a round.

Fields of text with tabs between them, never pickle: whoever can write to the store must not be able
to run code in a rank. (JSON would take a tenth of the time that ranks of one host need to meet.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from gradsync.base.host import HostEvidence
from gradsync.errors import RendezvousError

__all__ = ["Member", "Party", "Record", "Tombstone", "decode", "join_ranks"]


class Member(NamedTuple):
    """A rank as it introduced itself.

    ``attempt`` tells one arrival of a process from its next one; ``card`` is what it has to tell
    everybody beforehand.
    """

    rank: int
    world_size: int
    local_rank: int
    evidence: HostEvidence
    attempt: str = ""
    card: str = ""

    @property
    def where(self) -> str:
        """The process, for people."""
        return self.evidence.where

    def same_process(self, other: Member) -> bool:
        """Return whether both were written by one process."""
        return self.evidence == other.evidence

    def encode(self) -> bytes:
        """Return the record as it is stored."""
        where = _text_of(self.evidence)
        return (
            f"{self.rank}\t{self.world_size}\t{self.local_rank}\t{where}\t{self.attempt}\t{self.card}"
        ).encode()


@lru_cache(maxsize=1)  # a process has one
def _text_of(evidence: HostEvidence) -> str:
    return "\t".join(map(str, evidence))


class Tombstone(NamedTuple):
    """Fills the slot of a missing rank, so that a round ends for everyone in the same way.

    Those who wait raise ``reason`` when ``failed``, and otherwise meet again in the next round.
    """

    reason: str
    failed: bool

    def encode(self) -> bytes:
        """Return the record as it is stored."""
        return f"{_OVER}\t{int(self.failed)}\t{self.reason}".encode()


Record = Member | Tombstone


_OVER = "over"


def decode(value: bytes) -> Record:
    """Read a slot; anything but a record is somebody else's data."""
    try:
        first, *rest = value.decode().split("\t")
        if first == _OVER:
            return Tombstone("\t".join(rest[1:]), bool(int(rest[0])))
        size, local_rank, boot_id, host, *numbers, attempt, card = rest
        pid, started, uid, net, pids = map(int, numbers)
        evidence = HostEvidence(boot_id, host, pid, started, uid, net, pids)
        return Member(int(first), int(size), int(local_rank), evidence, attempt, card)
    except (ValueError, IndexError) as error:
        raise RendezvousError(
            f"found {value[:60]!r} where a rank's introduction should be; does another program, or "
            "another version of gradsync, use the same store?"
        ) from error


class Party(NamedTuple):
    """Who is to meet, as far as that is known before."""

    name: str = "the world"
    called: tuple[int, ...] = ()
    """What the ranks are called in messages; their own numbers unless given."""
    evidence: Sequence[HostEvidence] = ()
    """Where each of them was when it was last heard of."""

    def rank(self, rank: int) -> int:
        """Return what a rank is called."""
        return self.called[rank] if self.called else rank

    def member(self, member: Member) -> str:
        """Return what a member is called, with its process."""
        return f"{self.rank(member.rank)} ({member.where})"

    def names(self, members: Iterable[Member], limit: int = 16) -> str:
        """Return what members are called, cut short for big worlds."""
        names = [self.member(member) for member in members]
        more = f" and {len(names) - limit} more" if len(names) > limit else ""
        return (", ".join(names[:limit]) or "nobody") + more

    def ranks(self, ranks: Iterable[int]) -> str:
        """Return what ranks are called."""
        return join_ranks(map(self.rank, ranks))


def join_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as text with runs drawn together.

    >>> join_ranks([1, 3, 4, 5])
    '1, 3-5'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
