"""Calls that would write to what they read: they read a copy instead.

While a rank writes its results others may still read what it gives. Only a rank's own piece of the
one may be its own piece of the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradsync.backends.call import Buffer, Call
from gradsync.group.in_flight import settle

__all__ = ["apart", "kept"]


def apart(call: Call, rank: int) -> Call:
    """Return a call that does the same and does not write to what it reads."""
    if not call.inputs and not call.outputs:
        return call
    given = call.inputs or (call.buffer,)
    into = call.outputs or (call.buffer,)
    if not _meet(given, into, rank):
        return call
    copies = tuple(_copy(buffer) for buffer in given)
    return call._replace(inputs=copies) if call.inputs else call._replace(buffer=copies[0])


def kept(call: Call) -> Call:
    """Return the call with memory of its own right: a tensor may be given other memory meanwhile.

    That is what ``tensor.data = other`` does, to free what has been sent, say.
    """
    inputs, outputs = tuple(map(_kept, call.inputs)), tuple(map(_kept, call.outputs))
    return call._replace(buffer=_kept(call.buffer), inputs=inputs, outputs=outputs)


def _kept(buffer: Buffer) -> Buffer:
    return buffer if buffer.owner is None else buffer._replace(owner=buffer.owner.detach())


def _meet(given: Sequence[Buffer], into: Sequence[Buffer], rank: int) -> bool:
    reads = [(buffer.address, buffer.address + _bytes(buffer)) for buffer in given]
    writes = [(buffer.address, buffer.address + _bytes(buffer)) for buffer in into]
    if max(end for _, end in reads) <= min(writes)[0]:
        return False
    if max(end for _, end in writes) <= min(reads)[0]:
        return False
    own = (rank if len(reads) > 1 else 0, rank if len(writes) > 1 else 0)
    return any(
        read[0] < write[1] and write[0] < read[1] and not (read == write and (i, k) == own)
        for i, read in enumerate(reads)
        for k, write in enumerate(writes)
    )


def _bytes(buffer: Buffer) -> int:
    size: int = buffer.owner.element_size()
    return buffer.numel * size


def _copy(buffer: Buffer) -> Buffer:
    settle(buffer.owner)
    flat = buffer.owner.detach().view(-1)
    start = (buffer.address - flat.data_ptr()) // flat.element_size()
    copy = flat[start : start + buffer.numel].clone()
    return Buffer(copy.data_ptr(), buffer.numel, buffer.dtype, copy)
