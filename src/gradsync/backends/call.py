"""``Call``: everything about one operation that a backend needs, with tensors as buffer views.

Tuples rather than dataclasses: building one is on the path of every call (0.4 us against 2 us for a
frozen dataclass of this size).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gradsync.backends.ops import Op
from gradsync.base.dtypes import ReduceOp

__all__ = ["NO_BUFFER", "Buffer", "Call"]


class Buffer(NamedTuple):
    """Contiguous memory; ``owner`` is the tensor that keeps it alive, for engines that want one."""

    address: int
    numel: int
    dtype: int
    owner: Any


NO_BUFFER = Buffer(0, 0, 0, None)


class Call(NamedTuple):
    """One operation on one group.

    ``buffer`` is the rank's own tensor: what it gives, gets, or both. Operations that move a piece
    per rank have the others in ``inputs`` and ``outputs``, one for each rank; all_to_all has only
    these.
    """

    op: Op
    buffer: Buffer
    timeout_s: float
    reduce: ReduceOp = ReduceOp.SUM
    root: int = 0
    inputs: tuple[Buffer, ...] = ()
    outputs: tuple[Buffer, ...] = ()
    asynchronous: bool = False
    """Whether ``submit`` may return before the call is carried out."""
    peer: int = -1
    """The rank at the other end of a message; -1 receives from any."""
    tag: int = 0

    @property
    def main_buffer(self) -> Buffer:
        """The rank's own tensor, or the first of its inputs: for messages and observers."""
        return self.inputs[0] if self.inputs and self.buffer is NO_BUFFER else self.buffer
