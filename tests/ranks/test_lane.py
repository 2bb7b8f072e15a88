"""The short way from plain tensors to the native core, and when it is not taken.

The test kit observes the default group, which closes its lane; groups made here are not observed.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch

import gradsync as dist
from gradsync.backends.lane import CLOSED_LANE
from gradsync.group.world import default_group


@pytest.mark.ranks(2, 3)
def test_every_operation_has_it_with_the_same_result() -> None:
    group = dist.new_group()
    lane, rank, size = group._lane, group.rank(), group.size()
    everyone = [torch.arange(size * 2, dtype=torch.float32) + 10 * r for r in range(size)]
    mine, total = everyone[rank], torch.stack(everyone).sum(0)
    is_root = rank == 1
    assert lane.barrier()
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8):
        reduced = mine.to(dtype)
        assert lane.all_reduce(reduced, dist.ReduceOp.SUM)
        assert torch.equal(reduced, total.to(dtype))
    sent, at_root = mine.clone(), mine.clone()
    assert lane.broadcast(sent, 1)
    assert torch.equal(sent, everyone[1])
    assert lane.reduce(at_root, 1, dist.ReduceOp.MAX)
    assert torch.equal(at_root, everyone[-1] if is_root else mine)
    listed = [torch.empty(size * 2) for _ in range(size)]
    assert lane.all_gather(listed, mine)
    assert torch.equal(torch.stack(listed), torch.stack(everyone))
    whole = torch.empty(size * size * 2)
    assert lane.all_gather_single(whole, mine)
    assert torch.equal(whole, torch.cat(everyone))
    gathered = [torch.empty(size * 2) for _ in range(size)] if is_root else None
    assert lane.gather(mine, gathered, 1)
    assert gathered is None or torch.equal(torch.stack(gathered), torch.stack(everyone))
    scattered = torch.empty(size * 2)
    assert lane.scatter(scattered, everyone if is_root else None, 1)
    assert torch.equal(scattered, mine)
    part = torch.empty(2)
    assert lane.reduce_scatter_single(part, mine, dist.ReduceOp.SUM)
    assert torch.equal(part, total.view(size, 2)[rank])
    reduced = torch.empty(rank + 1)
    uneven = [torch.full((r + 1,), float(rank)) for r in range(size)]
    assert lane.reduce_scatter(reduced, uneven, dist.ReduceOp.SUM)
    assert torch.equal(reduced, torch.full((rank + 1,), float(sum(range(size)))))
    received = [torch.empty(rank + 1) for _ in range(size)]
    assert lane.all_to_all(received, uneven)
    assert [other.tolist() for other in received] == [[float(r)] * (rank + 1) for r in range(size)]
    swapped = torch.empty(size * 2)
    assert lane.all_to_all_single(swapped, mine)
    assert torch.equal(swapped, torch.cat([other.view(size, 2)[rank] for other in everyone]))


@pytest.mark.ranks(2)
def test_other_tensors_take_the_ordinary_way() -> None:
    group = dist.new_group()
    lane, op = group._lane, dist.ReduceOp.SUM
    one = torch.ones(4)
    odd = [
        torch.ones(4, 4).t()[::2],
        torch._neg_view(torch.full((4,), -1.0)),
        torch.ones(1, dtype=torch.complex64).conj(),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.nn.Parameter(torch.ones(3), requires_grad=False),
        torch.ones(0),
    ]
    for tensor in odd:
        assert not lane.all_reduce(tensor, op)
        group.all_reduce(tensor)
        assert torch.equal(
            tensor.to(torch.complex64), torch.full_like(tensor, 2).to(torch.complex64)
        )
    for wrong in (None, [1.0], torch.eye(2).to_sparse(), torch.ones(2, device="meta")):
        assert not lane.all_reduce(wrong, op)
        assert not lane.all_gather_single(one, wrong)
    assert not lane.all_reduce(one, None)
    assert not lane.all_reduce(one, 99)
    assert not lane.broadcast(one, 2)
    assert not lane.broadcast(one, -1)
    assert not lane.broadcast(one, "0")
    # As many elements, but not of this shape or type; not as many; not a list of tensors.
    assert not lane.all_gather_single(torch.ones(4, 2), one)
    assert not lane.all_gather_single(torch.ones(8, dtype=torch.int32), one)
    assert not lane.reduce_scatter_single(torch.ones(3), one, op)
    assert not lane.all_to_all_single(torch.ones(3), torch.ones(3))
    assert not lane.all_gather([one], one)
    assert not lane.all_gather([one, torch.ones(2, 2)], one)
    assert not lane.all_gather([one, None], one)
    assert not lane.reduce_scatter(one, [torch.ones(3), torch.ones(3)], op)
    assert not lane.reduce_scatter(one, [one, one.double()], op)
    assert not lane.reduce_scatter(one, (one, one), op)
    assert not lane.all_to_all([one, one], [one, one.double()])
    assert not lane.all_to_all([one, torch.ones(0)], [one, one])
    assert not lane.all_to_all([one, one], [])
    assert not lane.gather(one, [one, one] if group.rank() == 1 else None, 0)
    assert torch.equal(one, torch.ones(4))
    group.barrier()  # nothing of all this was sent


@pytest.mark.ranks(2)
def test_observed_groups_do_not_take_it() -> None:
    group = dist.new_group()
    seen: list[str] = []
    handle = group.hooks.add_after(lambda call: seen.append(call.op.name))
    assert not group._lane.barrier()
    group.barrier()
    assert seen == ["barrier"]
    handle.remove()
    assert group._lane.barrier()


@pytest.mark.ranks(2)
def test_errors_are_those_of_the_ordinary_way() -> None:
    group = dist.new_group()
    for op, message in ((True, "op must be a ReduceOp"), (dist.ReduceOp.PREMUL_SUM, "a factor")):
        with pytest.raises(dist.UsageError, match=message):
            group.all_reduce(torch.ones(2), op)
        with pytest.raises(dist.UsageError, match=message):
            group.reduce_scatter_single(torch.ones(1), torch.ones(2), op)
    with pytest.raises(dist.UsageError, match="not defined for elements of this type"):
        group.all_reduce(torch.ones(2, dtype=torch.int32), dist.ReduceOp.AVG)
    group.barrier()
    with pytest.raises(dist.MismatchError, match=r"(?s)float32\[2\].*float32\[3\]"):
        group.all_reduce(torch.ones(2 + group.rank()))
    with pytest.raises(dist.MismatchError):
        group.barrier()
    dist.destroy_process_group(group)
    assert group._lane is CLOSED_LANE
    with pytest.raises(dist.UsageError, match="destroyed"):
        group.all_reduce(torch.ones(2))


@pytest.mark.ranks(2)
def test_other_threads_go_on_while_a_call_waits() -> None:
    group = dist.new_group(timeout=timedelta(seconds=20))

    def let_the_other_go() -> None:
        time.sleep(0.1)  # the call waits by then
        dist.send(torch.ones(1), 1)

    thread = threading.Thread(target=let_the_other_go)
    if group.rank() == 0:
        thread.start()
    else:
        dist.recv(torch.ones(1), 0)
    assert group._lane.barrier()
    if group.rank() == 0:
        thread.join()


@pytest.mark.ranks(1)
def test_a_group_that_is_only_dropped_goes() -> None:
    group = dist.new_group()
    group.hooks.add_before(lambda call, group=group: None)
    gone = weakref.ref(group)
    world = default_group()
    assert world is not None
    world.children.remove(group)
    del group
    gc.collect()
    assert gone() is None


class StandIn(torch.Tensor):
    """Stands for another tensor, as a DTensor does."""

    @staticmethod
    def __new__(cls, other: torch.Tensor) -> StandIn:
        made: StandIn = torch.Tensor._make_wrapper_subclass(cls, other.shape)
        return made

    @classmethod
    def __torch_dispatch__(cls, *_: object) -> None:
        raise NotImplementedError


@pytest.mark.ranks(2)
def test_tensors_without_memory_are_refused() -> None:
    group = dist.new_group()
    freed = torch.ones(2)
    freed.untyped_storage().resize_(0)
    for tensor in (freed, StandIn(torch.ones(2))):
        for call in (group.all_reduce, group.all_reduce_async):
            with pytest.raises(dist.UsageError, match="without memory of its own"):
                call(tensor)
        with pytest.raises(dist.UsageError, match="without memory of its own"):
            group.send(tensor, 1 - group.rank())
    group.barrier()
