"""``BucketBoard``: gradient buckets in shared memory, averaged while the ranks still compute.

Made by ``ProcessGroup.bucket_board``. A rank says of each bucket when it is full, and reduces its
slice of every bucket that is full on all ranks whenever it comes by; it waits only in ``finish``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradsync.backends.backend import Backend
from gradsync.backends.call import NO_BUFFER, Call
from gradsync.backends.ops import FINISH_BUCKETS
from gradsync.errors import UsageError
from gradsync.group.buffers import view
from gradsync.group.hooks import Hooks

__all__ = ["BucketBoard"]


class BucketBoard:
    """The buckets of one model on one group; all ranks have the same."""

    def __init__(
        self,
        backend: Backend,
        hooks: Hooks,
        buckets: Sequence[torch.Tensor],
        parts: Sequence[int],
        timeout_s: float,
    ) -> None:
        make = getattr(backend, "bucket_board", None)
        if make is None:
            raise UsageError(f"the backend {backend.name!r} has no bucket boards")
        self._hooks = hooks
        self._buckets = tuple(buckets)  # kept alive: the board has their addresses only
        views = [view(bucket, "bucket_board") for bucket in buckets]
        self._board: Any = make(list(zip(views, parts, strict=True)), timeout_s)
        self.can_lend: bool = self._board.read_tensors(torch.Tensor)
        self.reduced = self._board.reduced
        """How many buckets of this pass, from the first, this rank has reduced."""
        self.poll = self._board.poll
        """Reduce this rank's slice of every bucket that has become full on all ranks."""
        self.missing_everywhere = self._board.missing_everywhere
        """After ``finish``: the positions of the parameters of a bucket that no rank had."""

    def arrive(self, bucket: int, weight: float = 1.0, missing: bytes | None = None) -> None:
        """Say that this rank's bucket is full, and reduce what can be reduced; never waits.

        ``missing`` has a byte for each parameter of the bucket, 1 where this rank has no gradient
        (its part of the bucket must be zero then).
        """
        self._board.arrive(bucket, weight, missing)

    def lend(
        self, bucket: int, weight: float, gradients: list[torch.Tensor], keep: bool = True
    ) -> bool:
        """Like ``arrive``, with gradients that lie elsewhere and make up the bucket, in order.

        With ``keep`` they are copied only as far as other ranks need them, and must be left alone
        until ``reduced()`` has passed the bucket. Returns False, and does nothing, unless all of
        them are contiguous and of its dtype.
        """
        return bool(self._board.lend(bucket, weight, gradients, keep))

    def finish(self, timeout_s: float) -> None:
        """Wait until all buckets are full everywhere and hold the weighted mean over the ranks.

        A collective: it is compared with the calls of the other ranks like any other.
        """
        call = Call(FINISH_BUCKETS, NO_BUFFER, timeout_s)
        hooks = self._hooks
        if hooks.before:
            hooks.run(hooks.before, call)
        self._board.finish(call)
        if hooks.after:
            hooks.run(hooks.after, call)
