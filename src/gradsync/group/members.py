"""Who is in a group: names, ranks in the world and in the group, and where each runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gradsync.base.host import HostEvidence
from gradsync.errors import UsageError
from gradsync.stores.store import Store

__all__ = ["Members"]


class Members(NamedTuple):
    """The members of one group, as one of them sees it."""

    name: str
    description: str
    ranks: tuple[int, ...]
    """World ranks in the order of their ranks in the group."""
    rank: int
    """The caller's rank in the group."""
    evidence: Sequence[HostEvidence] = ()
    """Where each member runs."""
    store: Store | None = None
    """The world's store, for groups to come."""

    def group_rank(self, world_rank: int) -> int:
        """Return the rank in the group of a rank of the world.

        >>> Members("g", "", (1, 3), 0).group_rank(3)
        1
        """
        try:
            return self.ranks.index(world_rank)
        except ValueError:
            raise UsageError(
                f"rank {world_rank!r} of the world is not in the group {self.name!r} of ranks "
                f"{list(self.ranks)}"
            ) from None

    def world_rank(self, group_rank: int) -> int:
        """Return the rank in the world of a rank of the group."""
        if not 0 <= group_rank < len(self.ranks):
            raise UsageError(
                f"there is no rank {group_rank} in the group {self.name!r} of {len(self.ranks)}"
            )
        return self.ranks[group_rank]
