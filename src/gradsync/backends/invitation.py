"""What gets a new world ready while its ranks arrive, at a store or at rank 0's door.

Rank 0 makes the memory while others are on their way. At a store its card says where they get it;
at the door they get it at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradsync import _native
from gradsync.backends.translate import forming_error

__all__ = ["STAGING_BYTES", "Invitation", "card_of", "reach"]

STAGING_BYTES = 1 << 20
"""Shared memory per rank through which private tensors pass. Two halves of 512 KiB stay in the
second-level cache; larger ones gained nothing at 25 MB."""


class Invitation:
    """Both a ``Preparation`` and a ``Door`` of the rendezvous."""

    def __init__(self) -> None:
        self.session: _native.Session | None = None
        """What this rank got at the door."""
        self.founder: _native.Founder | None = None
        self.shown = ""
        """The card that rank 0 showed."""
        self._size = 0
        self._door: _native.Founder | None = None
        self._link: _native.Link | None = None

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

    def open(self, name: str, secret: bytes, world_size: int) -> bool:
        """Open the door of rank 0, and make the memory; False when somebody holds that name."""
        try:
            self._door = _native.Founder(name, secret)
        except _native.StatusError:
            return False
        self._door.prepare(world_size, STAGING_BYTES)
        return True

    def gather(self, limit_s: float) -> dict[int, bytes] | None:
        """Return what each of the others says, or None when they do not come as they should."""
        assert self._door is not None
        try:
            missing = self._door.gather([], limit_s)
            self._door.check_guests()
        except _native.StatusError:
            return None
        return None if missing else self._door.words

    def welcome(self, words: bytes, limit_s: float) -> None:
        """Let everybody in."""
        assert self._door is not None
        try:
            self.session = self._door.found(limit_s, None, words)
        except _native.StatusError as error:
            raise forming_error(error) from None
        finally:
            self._door = None

    def refuse(self) -> None:
        """Send everybody who came to the store."""
        if self._door is not None:
            self._door.turn_away("the ranks meet at the store", [], False)
        self._door = None

    def close(self) -> None:
        """Leave the door without a word; whoever waits there looks for another."""
        self._door = None

    def knock(self, name: str) -> bool:
        """Reach the door of rank 0; False when there is none."""
        try:
            self._link = _native.Link(name)
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
