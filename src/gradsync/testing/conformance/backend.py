"""What every backend must do, driven by the table of operations.

``check_group`` runs on each rank of a group, processes or threads; ``check_backend`` makes threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gradsync.backends.backend import Backend
from gradsync.backends.ops import OPS
from gradsync.base.dtypes import DTYPE_NAMES, ReduceOp
from gradsync.errors import UsageError
from gradsync.group.group import ProcessGroup
from gradsync.testing.threads import ThreadRank, run_threads

__all__ = ["check_backend", "check_group"]

SIZES = (0, 1, 7, 1000, 100_003)

_FLOATS = {"float64", "float32", "float16", "bfloat16"}
_COMPLEX = {"complex128", "complex64"}
_BITWISE = {ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR}


def check_group(group: ProcessGroup) -> None:
    """Check all operations of a group; every rank must call this at the same point."""
    for op in OPS:
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


def _is_defined(dtype: str, reduce: ReduceOp) -> bool:
    if reduce in _BITWISE:
        return dtype not in _FLOATS | _COMPLEX
    if reduce == ReduceOp.AVG:
        return dtype in _FLOATS | _COMPLEX
    return dtype not in _COMPLEX or reduce == ReduceOp.SUM


def _sample(rank: int, count: int, dtype: str) -> torch.Tensor:
    # Small whole numbers: their sums and products are exact in every type, in any order.
    numbers = (torch.arange(count) * 7 + rank * 3) % 4
    return numbers.to(getattr(torch, dtype))


def _model(tensors: list[torch.Tensor], reduce: ReduceOp) -> torch.Tensor:
    """Reduce in one process, in a type that holds the exact result."""
    dtype = tensors[0].dtype
    if dtype is torch.bool:
        stacked = torch.stack(tensors).to(torch.int64)
        wide = stacked if reduce != ReduceOp.SUM else stacked.bool().any(0, keepdim=True).long()
    else:
        wide = torch.stack(
            [t.to(torch.complex128 if dtype.is_complex else torch.float64) for t in tensors]
        )
        if reduce in _BITWISE:
            wide = torch.stack(tensors).to(torch.int64)
    folds: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        ReduceOp.SUM: torch.add,
        ReduceOp.AVG: torch.add,
        ReduceOp.PRODUCT: torch.mul,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
        ReduceOp.BAND: torch.bitwise_and,
        ReduceOp.BOR: torch.bitwise_or,
        ReduceOp.BXOR: torch.bitwise_xor,
    }
    result = wide[0]
    for other in wide[1:]:
        result = folds[reduce](result, other)
    if reduce == ReduceOp.AVG:  # part by part: torch rounds a complex quotient differently
        parts = torch.view_as_real(result) if result.is_complex() else result
        parts /= len(tensors)
    return result.to(dtype)


def all_reduce_is_right_for_every_type_and_operation(group: ProcessGroup) -> None:
    for dtype in DTYPE_NAMES:
        for reduce in ReduceOp:
            if not _is_defined(dtype, reduce):
                continue
            for count in SIZES:
                inputs = [_sample(rank, count, dtype) for rank in range(group.size())]
                tensor = inputs[group.rank()].clone()
                group.all_reduce(tensor, reduce)
                assert torch.equal(tensor, _model(inputs, reduce)), (dtype, reduce.name, count)


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
        for dtype in DTYPE_NAMES:
            for count in SIZES:
                tensor = _sample(group.rank(), count, dtype)
                group.broadcast(tensor, root)
                assert torch.equal(tensor, _sample(root, count, dtype)), (root, dtype, count)


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
}
