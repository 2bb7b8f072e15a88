"""From calls to the native session's arguments: a row for each operation."""

from __future__ import annotations

from collections.abc import Callable

from gradsync import _native
from gradsync.backends.call import Buffer, Call
from gradsync.backends.ops import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
)
from gradsync.errors import BackendUnavailable

__all__ = ["run_call"]


def run_call(session: _native.Session, call: Call) -> _native.Pending | None:
    """Carry out a call and return None, or hand it in when it is asynchronous."""
    run = _RUN.get(call.op.number)
    if run is None:
        raise BackendUnavailable(f"the shared-memory backend has no {call.op.name}")
    return run(session, call)


def _addresses(buffers: tuple[Buffer, ...]) -> list[int]:
    return [buffer.address for buffer in buffers]


def _counts(buffers: tuple[Buffer, ...]) -> list[int]:
    return [buffer.numel for buffer in buffers]


def _barrier(session: _native.Session, call: Call) -> _native.Pending | None:
    return session.barrier(call.timeout_s, call.asynchronous)


def _broadcast(session: _native.Session, call: Call) -> _native.Pending | None:
    address, count, dtype, _ = call.buffer
    return session.broadcast(address, count, dtype, call.root, call.timeout_s, call.asynchronous)


def _all_reduce(session: _native.Session, call: Call) -> _native.Pending | None:
    address, count, dtype, _ = call.buffer
    return session.all_reduce(address, count, dtype, call.reduce, call.timeout_s, call.asynchronous)


def _reduce(session: _native.Session, call: Call) -> _native.Pending | None:
    address, count, dtype, _ = call.buffer
    return session.reduce(
        address, count, dtype, call.reduce, call.root, call.timeout_s, call.asynchronous
    )


def _all_gather(session: _native.Session, call: Call) -> _native.Pending | None:
    address, count, dtype, _ = call.buffer
    into, counts = _addresses(call.outputs), _counts(call.outputs)
    if counts.count(count) == len(counts):
        return session.all_gather(address, count, dtype, into, call.timeout_s, call.asynchronous)
    return session.all_gather_uneven(
        address, into, counts, dtype, call.timeout_s, call.asynchronous
    )


def _gather(session: _native.Session, call: Call) -> _native.Pending | None:
    address, count, dtype, _ = call.buffer
    return session.gather(
        address,
        count,
        dtype,
        _addresses(call.outputs),
        call.root,
        call.timeout_s,
        call.asynchronous,
    )


def _scatter(session: _native.Session, call: Call) -> _native.Pending | None:
    address, count, dtype, _ = call.buffer
    return session.scatter(
        _addresses(call.inputs), address, count, dtype, call.root, call.timeout_s, call.asynchronous
    )


def _reduce_scatter(session: _native.Session, call: Call) -> _native.Pending | None:
    address, _, dtype, _ = call.buffer
    inputs, counts = _addresses(call.inputs), _counts(call.inputs)
    return session.reduce_scatter(
        inputs, counts, address, dtype, call.reduce, call.timeout_s, call.asynchronous
    )


def _all_to_all(session: _native.Session, call: Call) -> _native.Pending | None:
    inputs, outputs = call.inputs, call.outputs
    return session.all_to_all(
        _addresses(inputs),
        _counts(inputs),
        _addresses(outputs),
        _counts(outputs),
        inputs[0].dtype,
        call.timeout_s,
        call.asynchronous,
    )


_RUN: dict[int, Callable[[_native.Session, Call], _native.Pending | None]] = {
    BARRIER.number: _barrier,
    BROADCAST.number: _broadcast,
    ALL_REDUCE.number: _all_reduce,
    REDUCE.number: _reduce,
    ALL_GATHER.number: _all_gather,
    GATHER.number: _gather,
    SCATTER.number: _scatter,
    REDUCE_SCATTER.number: _reduce_scatter,
    ALL_TO_ALL.number: _all_to_all,
}
