"""What every backend must do, driven by the table of operations.

``check_group`` runs on each rank of a group, processes or threads; ``check_backend`` makes threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gradsync.backends.backend import Backend
from gradsync.backends.ops import OPS, TRANSFERS
from gradsync.base.dtypes import ReduceOp
from gradsync.errors import UsageError
from gradsync.group.group import ProcessGroup
from gradsync.testing.conformance import (
    exchange_checks,
    gather_checks,
    reduce_checks,
    transfer_checks,
)
from gradsync.testing.conformance.samples import DTYPES, is_defined, model, same, sample, sizes_for
from gradsync.testing.threads import ThreadRank, run_threads

__all__ = ["check_backend", "check_group"]


def check_group(group: ProcessGroup) -> None:
    """Check all operations of a group; every rank must call this at the same point."""
    for op in (*OPS, *TRANSFERS):
        for check in _CHECKS[op.name]:
            try:
                check(group)
            except Exception as error:
                raise AssertionError(f"the backend fails {check.__name__}: {error}") from error


def check_backend(
    make: Callable[[int], Sequence[Backend]], sizes: Sequence[int] = (1, 2, 4)
) -> None:
    """Check backends whose ranks may be threads: ``make(size)`` returns one for each rank.

    >>> from gradsync.backends.threads import ThreadsBackend
    >>> check_backend(ThreadsBackend.make, sizes=(2,))
    """
    for size in sizes:
        backends = make(size)

        def body(me: ThreadRank) -> None:
            check_group(me.group)

        for me in run_threads(size, body, backends=backends):
            if me.error is not None:
                raise me.error
            if me.stack:
                raise AssertionError(f"rank {me.rank} of {size} hangs:\n{me.stack}")


# -- checks ---------------------------------------------------------------------------------------


def all_reduce_is_right_for_every_type_and_operation(group: ProcessGroup) -> None:
    for dtype in DTYPES:
        for reduce in ReduceOp:
            if not is_defined(dtype, reduce):
                continue
            for count in sizes_for(dtype, reduce):
                inputs = [sample(rank, count, dtype) for rank in range(group.size())]
                tensor = inputs[group.rank()].clone()
                group.all_reduce(tensor, reduce)
                assert same(tensor, model(inputs, reduce)), (dtype, reduce.name, count)


def all_reduce_refuses_what_has_no_meaning(group: ProcessGroup) -> None:
    for dtype, reduce in (
        ("float32", ReduceOp.BAND),
        ("int64", ReduceOp.AVG),
        ("complex64", ReduceOp.MAX),
    ):
        tensor = torch.ones(3, dtype=getattr(torch, dtype))
        try:
            group.all_reduce(tensor, reduce)
        except UsageError:
            assert torch.equal(tensor, torch.ones_like(tensor))
        else:
            raise AssertionError(f"{reduce.name} of {dtype} was accepted")
    group.barrier()  # and the group is still good


def all_reduce_takes_tensors_with_gaps(group: ProcessGroup) -> None:
    base = torch.full((5, 6), float(group.rank()))
    group.all_reduce(base.t()[1])
    total = float(sum(range(group.size())))
    assert base[:, 1].tolist() == [total] * 5
    assert base[:, 0].tolist() == [float(group.rank())] * 5


def broadcast_is_right_from_every_root(group: ProcessGroup) -> None:
    for root in range(group.size()):
        for dtype in DTYPES:
            for count in sizes_for(dtype):
                tensor = sample(group.rank(), count, dtype)
                group.broadcast(tensor, root)
                assert same(tensor, sample(root, count, dtype)), (root, dtype, count)


def broadcast_refuses_a_root_that_is_not_there(group: ProcessGroup) -> None:
    for root in (-1, group.size()):
        try:
            group.broadcast(torch.ones(1), root)
        except UsageError:
            continue
        raise AssertionError(f"root {root} of {group.size()} was accepted")


def barrier_can_be_called_again_and_again(group: ProcessGroup) -> None:
    for _ in range(20):
        group.barrier()


def work_of_an_async_call_is_complete(group: ProcessGroup) -> None:
    tensor = torch.ones(4)
    work = group.all_reduce_async(tensor)
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is tensor
    assert tensor.tolist() == [float(group.size())] * 4


_CHECKS: dict[str, Sequence[Callable[[ProcessGroup], None]]] = {
    "barrier": (barrier_can_be_called_again_and_again,),
    "broadcast": (
        broadcast_is_right_from_every_root,
        broadcast_refuses_a_root_that_is_not_there,
    ),
    "all_reduce": (
        all_reduce_is_right_for_every_type_and_operation,
        all_reduce_refuses_what_has_no_meaning,
        all_reduce_takes_tensors_with_gaps,
        work_of_an_async_call_is_complete,
    ),
    **gather_checks.CHECKS,
    **reduce_checks.CHECKS,
    **exchange_checks.CHECKS,
    **transfer_checks.CHECKS,
    "finish_buckets": (),  # of gradsync's own boards; other backends need none
}
