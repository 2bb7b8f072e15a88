"""Engines: how buckets are averaged over the ranks of a group.

``BoardEngine`` works on memory that all ranks have mapped; ``CallEngine`` makes a collective call
for each bucket and works on any backend. Both say which parameters no rank had a gradient for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from gradsync.base.dtypes import ReduceOp
from gradsync.ddp.bucket import Allocate, Bucket
from gradsync.group.group import ProcessGroup

__all__ = [
    "BOARD_LIMITS",
    "CALL_LIMITS",
    "BoardEngine",
    "CallEngine",
    "Engine",
    "allocator",
    "has_boards",
    "make_engine",
]


class Engine(Protocol):
    """Averages buckets; they are launched in order, then finished together."""

    def launch(self, bucket: Bucket, missing: bytes | None, weight: float | None) -> None:
        """Send a bucket on its way; with a weight the result is the weighted mean."""

    def lend(self, bucket: Bucket) -> bool:
        """Launch a bucket whose gradients lie elsewhere; False if that cannot be done."""

    def poll(self) -> None:
        """Make progress on what has been launched, without waiting."""

    def finish(self) -> None:
        """Wait until every bucket holds the mean."""

    def missing_everywhere(self, bucket: Bucket) -> Sequence[int]:
        """Return the positions in the bucket that no rank had a gradient for."""


class CallEngine:
    """One all-reduce for each bucket, with which parameters were used in the bucket's tail."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._works: list[Any] = []
        self._weighted: list[Bucket] = []
        self._weight = 0.0
        self._used: set[int] = set()

    def launch(self, bucket: Bucket, missing: bytes | None, weight: float | None) -> None:
        """Start the bucket's all-reduce."""
        if missing is None:
            bucket.tail.fill_(1)  # where others had some missing, their mean is there
        else:
            bucket.tail.copy_(1 - torch.tensor(list(missing)))
            self._used.add(bucket.index)
        op = ReduceOp.AVG
        if weight is not None:
            op = ReduceOp.SUM
            bucket.flat.mul_(weight)
            self._weighted.append(bucket)
            self._weight = weight
        self._works.append((bucket, self._group.all_reduce_async(bucket.whole, op)))

    def lend(self, bucket: Bucket) -> bool:
        """Refuse: a call needs all of the bucket in one place."""
        return False

    def poll(self) -> None:
        """Do nothing: calls make progress by themselves."""

    def finish(self) -> None:
        """Wait for the calls in their order; divide by the sum of the weights if there are any."""
        works, self._works = self._works, []
        weighted, self._weighted = self._weighted, []
        for _, work in works:
            work.wait()
        if weighted:
            total = torch.tensor([self._weight], dtype=torch.float64)
            self._group.all_reduce(total)
            share = 1.0 / float(total) if float(total) else 0.0
            for bucket in weighted:
                bucket.flat.mul_(share)
                bucket.tail.sgn_()

    def missing_everywhere(self, bucket: Bucket) -> Sequence[int]:
        """Read the bucket's tail."""
        if bucket.index not in self._used:
            return ()
        found = [k for k, used in enumerate(bucket.tail.tolist()) if not used]
        self._used.discard(bucket.index)
        return found


class BoardEngine:
    """Ranks reduce their slice of every bucket that all of them have filled, in shared memory."""

    def __init__(self, group: ProcessGroup, buckets: Sequence[Bucket], timeout_s: float) -> None:
        # Where there are only parameters without elements, the bucket's tail stands for them.
        flats = [bucket.flat if bucket.nbytes else bucket.whole for bucket in buckets]
        self._board = group.bucket_board(flats, [len(bucket.params) for bucket in buckets])
        self._timeout_s = timeout_s
        # Lent gradients, by bucket, until this rank has reduced its slice of them.
        self._lent: deque[tuple[Bucket, list[torch.Tensor]]] = deque()
        self._lent_bytes = 0

    def launch(self, bucket: Bucket, missing: bytes | None, weight: float | None) -> None:
        """Say that this rank's bucket is filled."""
        self._board.arrive(bucket.index, 1.0 if weight is None else weight, missing)
        self._release()

    def lend(self, bucket: Bucket) -> bool:
        """Copy in what the other ranks reduce, and the rest unless it can stay until we have."""
        if not self._board.can_lend:
            return False
        keep = self._lent_bytes <= MOST_LENT_BYTES
        grads = bucket.to_lend()
        if grads is None or not self._board.lend(bucket.index, 1.0, grads, keep):
            return False
        bucket.take_over()
        if keep:
            self._lent.append((bucket, grads))
            self._lent_bytes += bucket.flat.nbytes
        self._release()
        return True

    def _release(self) -> None:
        """Let go of the gradients that are no longer needed."""
        lent, reduced = self._lent, self._board.reduced()
        while lent and lent[0][0].index < reduced:
            self._lent_bytes -= lent.popleft()[0].flat.nbytes

    def poll(self) -> None:
        """Reduce this rank's slice of what has become full everywhere."""
        self._board.poll()

    def finish(self) -> None:
        """Wait for the others' buckets and reduce what is left."""
        self._board.finish(self._timeout_s)
        self._lent.clear()
        self._lent_bytes = 0

    def missing_everywhere(self, bucket: Bucket) -> Sequence[int]:
        """Ask the board."""
        return tuple(self._board.missing_everywhere(bucket.index))


def allocator(group: ProcessGroup, device: torch.device) -> Allocate:
    """Return what makes the memory of buckets: shared with the other ranks where that works."""
    if device.type == "cpu":
        return lambda count, dtype: group.shared_empty(count, dtype=dtype)
    return lambda count, dtype: torch.empty(count, dtype=dtype, device=device)


# A call has a price, so buckets are large, but for the first one, which is to leave early. On a
# board a bucket costs next to nothing: small ones are brought in while they are in the cache, and
# leave little to do at the end (32 MiB of gradients: 54 ms of a core for a step, not 63).
CALL_LIMITS = (1 << 20, 25 << 20)
BOARD_LIMITS = (1 << 20,)

# A rank that is ahead of the others copies its gradients in after all rather than keep more of
# them: with 32 MiB of gradients the peak was 14 MiB higher without the limit.
MOST_LENT_BYTES = 4 << 20


def has_boards(group: ProcessGroup, devices: Iterable[torch.device]) -> bool:
    """Return whether buckets on these devices can be on a board of the group."""
    on_host = all(device.type == "cpu" for device in devices)
    return on_host and group.is_shared(group.shared_empty(1, dtype=torch.uint8))


def make_engine(group: ProcessGroup, buckets: Sequence[Bucket], timeout_s: float) -> Engine:
    """Return the quickest engine that can serve these buckets."""
    if buckets and has_boards(group, [bucket.flat.device for bucket in buckets]):
        return BoardEngine(group, buckets, timeout_s)
    return CallEngine(group)
