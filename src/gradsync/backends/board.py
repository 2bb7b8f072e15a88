"""The native board of gradient buckets, with its failures as gradsync's errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradsync import _native
from gradsync.backends.call import Call
from gradsync.errors import DistError, UsageError

__all__ = ["ShmBoard"]


class ShmBoard:
    """The buckets of one model on one group of the shared-memory backend."""

    def __init__(
        self, board: _native.Board, failure: Callable[[_native.StatusError, Call], DistError]
    ) -> None:
        self._board = board
        self._failure = failure
        # The core's own methods: they cannot fail, and are on the path of every gradient.
        self.poll = board.poll
        self.reduced = board.reduced
        self.missing_everywhere = board.missing_everywhere

    def arrive(self, bucket: int, weight: float, missing: bytes | None) -> None:
        """Say that this rank's bucket is full, and reduce what can be reduced."""
        try:
            self._board.arrive(bucket, weight, missing)
        except _native.StatusError as error:
            raise UsageError(f"bucket_board: {error.args[1]}") from None

    def read_tensors(self, tensor_type: type) -> bool:
        """Get ready for ``lend``; False if tensors of this type do not say where they are."""
        table = getattr(tensor_type, "__dlpack_c_exchange_api__", None)
        if table is None:
            return False
        self._board.lend_tensors(tensor_type, table)
        return True

    def lend(self, bucket: int, weight: float, gradients: list[Any], keep: bool) -> bool:
        """Like ``arrive``, with gradients from elsewhere; False if they are not as they must be."""
        try:
            return self._board.lend(bucket, weight, gradients, keep)
        except _native.StatusError as error:
            raise UsageError(f"bucket_board: {error.args[1]}") from None

    def finish(self, call: Call) -> None:
        """Carry out the call that ends a pass."""
        try:
            self._board.finish(call.timeout_s)
        except _native.StatusError as error:
            raise self._failure(error, call) from None
