"""What gets a new world ready while its ranks arrive, at a store or at rank 0's door.

Rank 0 makes the memory while others are on their way. At a store its card says where they get it;
at the door they get it at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradsync import _native
from gradsync.backends.translate import forming_error
from gradsync.backends.waits import watch_waits
from gradsync.stores.unix import UnixStore

__all__ = ["STAGING_BYTES", "Invitation", "card_of", "reach"]

STAGING_BYTES = 1 << 20
"""Shared memory per rank through which private tensors pass. Two halves of 512 KiB stay in the
second-level cache; larger ones gained nothing at 25 MB."""


class Invitation:
    """Both a ``Preparation`` and a ``Door`` of the rendezvous."""

    def __init__(self) -> None:
        watch_waits()
        self.session: _native.Session | None = None
        """What this rank got at the door."""
        self.server: _native.StoreServer | None = None
        """What rank 0 has yet to run."""
        self.founder: _native.Founder | None = None
        self.shown = ""
        """The card that rank 0 showed."""
        self._size = 0
        self._link: _native.Link | None = None

    def decline(self) -> None:
        """Let go of everything: there will be no world, which those who believe in one are told.

        Whoever keeps the error keeps this object.
        """
        session, self.session = self.session, None
        self.founder = self.server = self._link = None
        if session is not None:
            session.close(0)

    # -- at a store -------------------------------------------------------------------------------

    def card(self, rank: int, world_size: int) -> str:
        """Return what a rank tells everybody."""
        if rank != 0:
            return ""
        if self.founder is None:
            self.founder = _native.Founder()
            self._size = world_size
        return card_of(self.founder)

    def prepare(self) -> None:
        """Make the memory."""
        if self.founder is not None and self._size:
            self.founder.prepare(self._size, STAGING_BYTES)
            self._size = 0

    def read(self, cards: Sequence[str]) -> None:
        """Remember what rank 0 had to tell."""
        self.shown = cards[0]

    # -- at the door ------------------------------------------------------------------------------

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
        """Let everybody in who comes to rank 0's door; return what each said, or nothing."""
        try:
            said, self.session = _native.receive(
                store.server,
                name,
                secret,
                STAGING_BYTES,
                words,
                world_size,
                slots,
                patience_s,
                limit_s,
            )
        except _native.StatusError as error:
            raise forming_error(error) from None
        if self.session is None:
            return []
        self.server = store.server
        return said

    def knock(self, name: str, moment_s: float) -> bool:
        """Reach the door of rank 0; False when there is none, nor within a moment."""
        try:
            self._link = _native.Link(name, moment_s)
        except _native.StatusError:
            return False
        return True

    def enter(
        self, secret: bytes, rank: int, world_size: int, words: bytes, limit_s: float
    ) -> bytes:
        """Introduce this rank and return what rank 0 tells; nothing when it refuses."""
        assert self._link is not None
        link, self._link = self._link, None
        try:
            self.session = link.join(secret, rank, world_size, limit_s, None, words)
        except _native.StatusError as error:
            if error.args[0] in ("no_space", "system", "interrupted"):
                raise forming_error(error) from None
            return b""  # turned away, or the door was closed
        return link.words


def card_of(founder: _native.Founder) -> str:
    """Return where a founder is, for those who are to come there."""
    return f"{founder.name} {founder.secret.hex()}"


def reach(card: str) -> _native.Link:
    """Return the way to the founder that a card names."""
    return _native.Link(card.split()[0])
