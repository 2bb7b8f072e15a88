"""Collectives of many tensors in few calls: small ones travel side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gradsync.backends.work import Work
from gradsync.base.dtypes import ReduceOp
from gradsync.errors import UsageError
from gradsync.group.buffers import check_shapes, check_writable
from gradsync.group.capture import Capture
from gradsync.group.collectives import Group, member_group
from gradsync.group.compiling import keep_compiler_out
from gradsync.group.group import ProcessGroup
from gradsync.group.layouts import Layouts
from gradsync.group.packing import PACK_BYTES, check_tensors, joined, packs, spread
from gradsync.group.reductions import Reduction
from gradsync.group.together import Step, Together

__all__ = [
    "CoalescingManager",
    "_broadcast_coalesced",
    "_coalescing_manager",
    "all_gather_coalesced",
    "all_reduce_coalesced",
    "coalescing_manager",
    "reduce_scatter_coalesced",
]

Tensors = Sequence[torch.Tensor]
Future = torch.futures.Future[list[torch.Tensor]]


def all_reduce_coalesced(
    tensors: Tensors,
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Future | None:
    """Combine each of ``tensors`` over all ranks, in place; small ones travel side by side.

    They may differ in dtype. With ``async_op`` a future of the tensors is returned.

    >>> import torch, gradsync
    >>> gradsync.init_process_group()
    >>> gradsync.all_reduce_coalesced([torch.ones(2), torch.ones(3)], async_op=True).wait()
    [tensor([1., 1.]), tensor([1., 1., 1.])]
    >>> gradsync.destroy_process_group()
    """
    where = member_group("all_reduce_coalesced", group)
    if where is None:
        return None
    return _answer(_all_reduce(where, tensors, op), async_op)


def all_gather_coalesced(
    output_tensor_lists: Sequence[Tensors],
    input_tensor_list: Tensors,
    group: Group = None,
    async_op: bool = False,
) -> Future | None:
    """Fill ``output_tensor_lists[r][i]`` with tensor ``i`` of rank ``r``; small ones go together.

    With ``async_op`` a future of all the outputs is returned, those of rank 0 first.
    """
    where = member_group("all_gather_coalesced", group)
    if where is None:
        return None
    return _answer(_all_gather_lists(where, output_tensor_lists, input_tensor_list), async_op)


def reduce_scatter_coalesced(
    outputs: Tensors,
    inputs: Tensors,
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Future | None:
    """Like ``reduce_scatter_single`` for each output and input; small ones travel side by side."""
    where = member_group("reduce_scatter_coalesced", group)
    if where is None:
        return None
    return _answer(_reduce_scatter(where, outputs, inputs, op), async_op)


def _broadcast_coalesced(
    process_group: ProcessGroup, tensors: Tensors, buffer_size: int, authoritative_rank: int = 0
) -> None:
    """Overwrite ``tensors`` with those of a rank of the group, in buffers of that many bytes.

    At most two buffers are there at a time.
    """
    check_tensors("_broadcast_coalesced", "tensors", tensors)
    found, first = _packed(process_group, "_broadcast_coalesced", tensors, buffer_size)
    Together(first, []).wait()
    in_flight: deque[Together] = deque()
    for pack in found:
        if len(in_flight) == 2:
            in_flight.popleft().wait()
        chosen = [tensors[at] for at in pack]
        if len(pack) == 1:
            step: Step = (process_group.broadcast_async(chosen[0], authoritative_rank), None)
        else:
            flat = joined(chosen)
            work = process_group.broadcast_async(flat, authoritative_rank)
            step = (work, partial(spread, flat, chosen))
        in_flight.append(Together([step], chosen))
    for together in in_flight:
        together.wait()


class CoalescingManager:
    """What ``coalescing_manager`` yields: ``wait`` for the calls that were made of the block."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def append(self, work: Work | None = None) -> None:
        """Wait for this one too."""
        if work is not None:
            self.works.append(work)

    def wait(self) -> None:
        """Wait until the results of the block are there."""
        for work in self.works:
            work.wait()


@contextmanager
def coalescing_manager(
    group: Group = None, device: Any = None, async_ops: bool = False
) -> Iterator[CoalescingManager]:
    """Put off the block's calls of one kind, and make them together at its end.

    Calls of ``all_reduce``, ``all_gather_single`` and ``reduce_scatter_single`` are put off; one
    block takes one kind of them, and one reduction. Other collectives run at once. Results are
    there after the block, or after ``wait()`` of what it yields with ``async_ops``. A block that
    raises sends nothing.

    >>> import torch, gradsync
    >>> gradsync.init_process_group()
    >>> tensors = [torch.ones(2), torch.ones(3)]
    >>> with gradsync.coalescing_manager():
    ...     for tensor in tensors:
    ...         gradsync.all_reduce(tensor)
    >>> gradsync.destroy_process_group()
    """
    where = member_group("coalescing_manager", group)
    manager = CoalescingManager()
    if where is None:
        yield manager
        return
    if device is not None and torch.device(device).type != "cpu":
        raise UsageError(f"coalescing_manager works on CPU tensors, got device={device!r}")
    if where.capture is not None:
        raise UsageError(f"a coalescing_manager of the group {where.group_name!r} is open already")
    capture = where.capture = Capture()
    try:
        yield manager
    finally:
        where.capture = None
    if capture.calls:
        manager.append(_start(where, capture))
        if not async_ops:
            manager.wait()


_coalescing_manager = coalescing_manager


def _answer(together: Together, async_op: bool) -> Future | None:
    if async_op:
        return together.get_future()
    together.wait()
    return None


# -- starting the calls ---------------------------------------------------------------------------


def _start(group: ProcessGroup, capture: Capture) -> Together:
    arguments = [list(each) for each in zip(*capture.calls, strict=True)]
    if capture.name == "all_reduce":
        return _all_reduce(group, arguments[0], capture.op)
    if capture.name == "all_gather_single":
        return _all_gather_single(group, *arguments)
    return _reduce_scatter(group, arguments[0], arguments[1], capture.op)


def _checked(name: str, outputs: Tensors, inputs: Tensors | None = None) -> None:
    check_tensors(name, "the outputs", outputs)
    for tensor in outputs:
        check_writable(tensor, name)
    if inputs is None:
        return
    check_tensors(name, "the inputs", inputs)
    if len(inputs) != len(outputs):
        raise UsageError(f"{name}: {len(outputs)} outputs for {len(inputs)} inputs")


def _packed(
    group: ProcessGroup, name: str, tensors: Tensors, most_bytes: int = PACK_BYTES
) -> tuple[list[list[int]], list[Step]]:
    """Return which tensors go together, and the call that goes before them."""
    found = list(packs(tensors, most_bytes))
    if group.size() == 1 or all(len(pack) == 1 for pack in found):
        return found, []
    return found, [(Layouts(group, name, tensors), None)]


def _all_reduce(group: ProcessGroup, tensors: Tensors, op: Any) -> Together:
    name = "all_reduce_coalesced"
    _checked(name, tensors)
    found, steps = _packed(group, name, tensors)
    for pack in found:
        chosen = [tensors[at] for at in pack]
        if len(pack) == 1:
            steps.append((group.all_reduce_async(chosen[0], op), None))
            continue
        flat = joined(chosen)
        steps.append((group.all_reduce_async(flat, op), partial(spread, flat, chosen)))
    return Together(steps, list(tensors))


def _all_gather_single(group: ProcessGroup, outputs: Tensors, inputs: Tensors) -> Together:
    name, size = "all_gather_single", group.size()
    _checked(name, outputs, inputs)
    for output, tensor in zip(outputs, inputs, strict=True):
        group.check_stacked(name, output, tensor, ("an output", "its input"))
    found, steps = _packed(group, name, inputs)
    for pack in found:
        given, into = [inputs[at] for at in pack], [outputs[at] for at in pack]
        if len(pack) == 1:
            steps.append((group.all_gather_single_async(into[0], given[0]), None))
            continue
        flat = joined(given)
        rows = torch.empty(size, flat.numel(), dtype=flat.dtype)
        work = group.all_gather_single_async(rows, flat.view(-1))
        steps.append((work, partial(spread, rows, into, size)))
    return Together(steps, list(outputs))


def _all_gather_lists(group: ProcessGroup, outputs: Sequence[Tensors], inputs: Tensors) -> Together:
    name, size = "all_gather_coalesced", group.size()
    check_tensors(name, "input_tensor_list", inputs)
    if not isinstance(outputs, list | tuple) or len(outputs) != size:
        raise UsageError(f"{name} needs a list of tensors for each of the {size} ranks")
    for each in outputs:
        _checked(name, each, inputs)
        for output, tensor in zip(each, inputs, strict=True):
            check_shapes([output], tensor.shape, name)
    found, steps = _packed(group, name, inputs)
    for pack in found:
        flat = joined([inputs[at] for at in pack])
        rows = torch.empty(size, flat.numel(), dtype=flat.dtype)
        into = [[each[at] for at in pack] for each in outputs]
        work = group.all_gather_single_async(rows, flat.view(-1))
        steps.append((work, partial(_spread_rows, rows, into)))
    return Together(steps, [output for each in outputs for output in each])


def _spread_rows(rows: torch.Tensor, outputs: Sequence[Tensors]) -> None:
    for row, into in zip(rows, outputs, strict=True):
        spread(row, into)


def _reduce_scatter(group: ProcessGroup, outputs: Tensors, inputs: Tensors, op: Any) -> Together:
    name, size = "reduce_scatter_coalesced", group.size()
    _checked(name, outputs, inputs)
    for output, tensor in zip(outputs, inputs, strict=True):
        group.check_stacked(name, tensor, output, ("an input", "its output"))
    found, steps = _packed(group, name, outputs)
    for pack in found:
        given, into = [inputs[at] for at in pack], [outputs[at] for at in pack]
        if len(pack) == 1:
            steps.append((group.reduce_scatter_single_async(into[0], given[0], op), None))
            continue
        rows = joined(given, size)
        flat = torch.empty(rows.shape[1], dtype=rows.dtype)
        work = group.reduce_scatter_single_async(flat, rows, op)
        steps.append((work, partial(spread, flat, into)))
    return Together(steps, list(outputs))


keep_compiler_out(globals())
