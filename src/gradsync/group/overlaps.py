"""Calls that would write to what they read: they read a copy instead.

While a rank writes its results others may still read what it gives. Only a rank's own piece of the
one may be its own piece of the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradsync.backends.call import Buffer, Call

__all__ = ["apart"]


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


def _meet(given: Sequence[Buffer], into: Sequence[Buffer], rank: int) -> bool:
    reads = [(buffer.address, buffer.address + _bytes(buffer)) for buffer in given]
    writes = [(buffer.address, buffer.address + _bytes(buffer)) for buffer in into]
    if max(end for _, end in reads) <= min(writes)[0]:
        return False
    if max(end for _, end in writes) <= min(reads)[0]:
        return False
    own = (reads[rank if len(reads) > 1 else 0], writes[rank if len(writes) > 1 else 0])
    return any(
        read[0] < write[1] and write[0] < read[1] and not (read == write and (read, write) == own)
        for read in reads
        for write in writes
    )


def _bytes(buffer: Buffer) -> int:
    size: int = buffer.owner.element_size()
    return buffer.numel * size


def _copy(buffer: Buffer) -> Buffer:
    flat = buffer.owner.detach().view(-1)
    start = (buffer.address - flat.data_ptr()) // flat.element_size()
    copy = flat[start : start + buffer.numel].clone()
    return Buffer(copy.data_ptr(), buffer.numel, buffer.dtype, copy)
