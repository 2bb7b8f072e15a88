"""Waiting for all ranks of a group."""

from __future__ import annotations

from gradsync.backends.call import NO_BUFFER, Call
from gradsync.backends.ops import BARRIER
from gradsync.backends.work import Work
from gradsync.base.deadline import Timeout, seconds
from gradsync.errors import CollectiveTimeout
from gradsync.group.torch_names import TorchNames
from gradsync.group.work import Prepared

__all__ = ["Barriers"]


class Barriers(TorchNames):
    """barrier, and the one whose errors are told the way torch's are."""

    def barrier(self, timeout: Timeout | None = None) -> None:
        """Wait until every rank has come here; calls made before are over then."""
        if timeout is not None or not self._lane.barrier():
            self.submit(Call(BARRIER, NO_BUFFER, self._limit(timeout)))
        if self._to_fill:
            self._fill()

    def barrier_async(self, timeout: Timeout | None = None) -> Work:
        """Start ``barrier`` and return its handle."""
        return self._start(Prepared(Call(BARRIER, NO_BUFFER, self._limit(timeout)), []))

    def monitored_barrier(
        self, timeout: Timeout | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait until every rank has come here, and say who has not, in torch's way.

        The error of rank 0 names the first rank that is missing, or all of them with
        ``wait_all_ranks``; those of the others point at rank 0. Its cause tells everything that is
        known.
        """
        before = self._get_sequence_number_for_group()
        try:
            self.barrier(timeout)
        except CollectiveTimeout as error:
            # Of an earlier call that broke the group, all that can be told is what it was.
            if not error.ranks or 0 < error.seq <= before:
                raise
            limit_s = error.timeout_s if timeout is None else seconds(timeout)
            raise self._told(error, limit_s, wait_all_ranks) from error

    def _told(
        self, error: CollectiveTimeout, limit_s: float, wait_all_ranks: bool
    ) -> CollectiveTimeout:
        missing = [self.members.world_rank(rank) for rank in error.ranks]
        within = f"within {limit_s * 1000:.0f} ms"
        if self._rank != 0 and 0 not in error.ranks:
            text = (
                f"not every rank came to monitored_barrier {within}; the error of rank "
                f"{self.members.world_rank(0)} names those that are missing"
            )
        elif len(missing) == 1 or not wait_all_ranks:
            missing = missing[:1]
            text = f"rank {missing[0]} did not come to monitored_barrier {within}"
        else:
            names = ", ".join(map(str, missing))
            text = f"ranks {names} did not come to monitored_barrier {within}"
        return CollectiveTimeout(
            f"{text} (told by rank {self.members.world_rank(self._rank)})",
            group=error.group,
            op="monitored_barrier",
            seq=error.seq,
            rank=error.rank,
            ranks=error.ranks if len(missing) == len(error.ranks) else error.ranks[:1],
            timeout_s=limit_s,
        )
