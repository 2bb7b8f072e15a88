"""Many tensors in few calls: beside Gloo, in few calls indeed, and nothing left after a failure."""

import math
import time
from functools import partial

import pytest
import torch
import torch.distributed as torch_dist

import gradsync as dist
from gradsync.backends.lane import CLOSED_LANE
from gradsync.backends.work import DoneWork
from gradsync.group.together import Together
from gradsync.stores import to_torch
from gradsync.testing import faults

SUMS = [dist.ReduceOp.SUM, "sum", torch_dist.ReduceOp.SUM]
SHAPES = [(3,), (), (2, 2), (0,), (70_000,), (70_000,), (5,)]


def tensors(rank: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.full(shape, float(rank + n), dtype=dtype) for n, shape in enumerate(SHAPES)]


def in_block(*functions) -> None:
    with dist.coalescing_manager():
        for function in functions:
            function()


def watched(group) -> list[str]:
    """Return the names of the calls that the group makes from now on."""
    seen = []
    group.hooks.add_before(lambda call: seen.append(call.op.name))
    return seen


@pytest.mark.ranks(2, 3, may_leave=["thread", "socket"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_results_are_those_of_gloo(rank, world_size, store):
    torch_dist.init_process_group("gloo", store=to_torch(store), rank=rank, world_size=world_size)
    mine, others = tensors(rank), tensors(rank)
    dist.all_reduce_coalesced(mine, dist.ReduceOp.MAX)
    torch_dist.all_reduce_coalesced(others, torch_dist.ReduceOp.MAX)
    assert all(map(torch.equal, mine, others))

    mine = tensors(rank)
    found, expected = ([tensors(-1) for _ in range(world_size)] for _ in range(2))
    dist.all_gather_coalesced(found, mine)
    for at, tensor in enumerate(mine):
        torch_dist.all_gather([each[at] for each in expected], tensor)
    for ours, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))

    results = []
    for module in (dist, torch_dist):
        values = tensors(rank)
        with module._coalescing_manager(async_ops=True) as manager:
            for tensor in values:
                module.all_reduce(tensor)
        manager.wait()
        results.append(values)
    assert all(map(torch.equal, *results))
    torch_dist.destroy_process_group()


@pytest.mark.ranks(3, backend=["shm", "threads"])
def test_small_tensors_share_a_call(rank, world_size, group):
    calls = watched(group)
    mixed = [*tensors(rank), *tensors(rank, torch.int64)[:3]]
    mixed[2] = torch.full((4, 4), rank + 2.0)[::2, ::2]
    future = dist.all_reduce_coalesced(mixed, async_op=True)
    assert future.wait() == mixed
    # The sizes, then two of 280 KB, the small floats, the integers.
    assert calls == ["all_gather", *["all_reduce"] * 4]
    assert mixed[0].tolist() == [3.0] * 3
    assert mixed[2].tolist() == [[9.0, 9.0]] * 2
    assert mixed[-1].tolist() == [[3 + 2 * world_size] * 2] * 2

    del calls[:]
    inputs = [torch.full((2, 3), float(rank)), torch.full((4,), 10.0 * rank)]
    outputs = [torch.empty(6, 3), torch.empty(12)]
    with dist.coalescing_manager():
        for output, tensor in zip(outputs, inputs, strict=True):
            assert dist.all_gather_single(output, tensor) is None
    assert calls == ["all_gather"] * 3  # calls that are waited for at once cost less than copies
    assert outputs[0][:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert outputs[1].tolist() == [0.0] * 4 + [10.0] * 4 + [20.0] * 4

    del calls[:]
    results = [torch.empty(2, 3), torch.empty(4)]
    with dist.coalescing_manager(group, device="cpu", async_ops=True) as manager:
        for result, output in zip(results, outputs, strict=True):
            dist.reduce_scatter_single(result, output, dist.ReduceOp.AVG, async_op=True)
    manager.wait()
    assert calls == ["all_gather", "reduce_scatter"]
    assert [result.unique().item() for result in results] == [rank, 10.0 * rank]
    again = [torch.empty(2, 3), torch.empty(4)]
    dist.reduce_scatter_coalesced(again, outputs, "avg")
    assert all(map(torch.equal, again, results))

    del calls[:]
    states = [torch.full((n,), float(rank)) for n in (1, 2, 30, 3)] + [torch.tensor([rank])]
    dist._broadcast_coalesced(group, states, 20, 2)
    assert calls == ["all_gather", *["broadcast"] * 5]
    assert all((state == 2).all() for state in states)
    assert dist.all_reduce_coalesced([]) is None
    assert dist.all_reduce_coalesced([], async_op=True).wait() == []


@pytest.mark.ranks(2, backend=["shm", "threads"])
def test_block_takes_one_kind_and_leaves_nothing_behind(rank, group):
    calls = watched(group)
    x, y = torch.ones(2), torch.ones(2)
    output = torch.empty(4)
    for second in (
        lambda: dist.all_reduce(y, dist.ReduceOp.MAX),
        lambda: dist.all_gather_single(output, y),
    ):
        with pytest.raises(RuntimeError, match="one kind and one reduction"):
            in_block(lambda: dist.all_reduce(x), second)
    with pytest.raises(ZeroDivisionError):
        in_block(lambda: dist.all_reduce(x), lambda: 1 / 0)
    with dist.coalescing_manager():
        work = dist.all_reduce(x, async_op=True)
        with pytest.raises(ValueError, match="made at the end of the block"):
            work.wait()
        with pytest.raises(ValueError, match="open already"), dist.coalescing_manager():
            pass
        dist.barrier()
        assert x.tolist() == [1.0, 1.0]
    assert x.tolist() == [2.0, 2.0]
    assert calls == ["barrier", "all_gather", "all_reduce"]  # also for one: another rank has two
    with dist.coalescing_manager() as manager:
        pass
    manager.wait()
    numbers = [torch.ones(1), torch.ones(1), torch.ones(1)]
    in_block(*(partial(dist.all_reduce, *each) for each in zip(numbers, SUMS, strict=True)))
    assert numbers == [torch.full((1,), 2.0)] * 3
    assert calls == ["barrier", "all_gather", "all_reduce", "all_gather", *["all_reduce"] * 3]
    with pytest.raises(dist.UsageError, match="CPU"), dist.coalescing_manager(device="meta"):
        pass
    with pytest.raises(TypeError, match="needs tensors"):
        dist.all_reduce_coalesced([1.0])
    with pytest.raises(dist.UsageError, match="expanded"):
        dist.all_reduce_coalesced([torch.ones(1).expand(3), x])
    with pytest.raises(dist.UsageError, match="shape"):
        dist.reduce_scatter_coalesced([x], [torch.ones(5)])
    dist.all_reduce(x)
    assert x.tolist() == [4.0, 4.0]


@pytest.mark.ranks(2, faults=[faults.kill(rank=1, at="all_reduce#2")])
def test_future_of_calls_that_fail_has_their_error(group):
    dist.all_reduce(torch.ones(1))
    start = time.monotonic()
    future = dist.all_reduce_coalesced(tensors(0), async_op=True)
    with pytest.raises(dist.PeerLostError, match="SIGKILL"):
        future.wait()
    assert time.monotonic() - start < 1
    with pytest.raises(dist.PeerLostError), dist.coalescing_manager():
        dist.all_reduce(torch.ones(1))


def test_time_to_wait_for_several_calls_is_never_endless_because_it_has_run_out():
    limits = []

    class Slow(DoneWork):
        def wait(self, timeout=None):
            limits.append(timeout)
            time.sleep(0.01)
            return True

    together = Together([(Slow([]), None), (Slow([]), None)], [])
    assert together.wait(0.005)
    assert together.wait(0)  # no limit
    assert together.wait()
    assert 0 < limits[1] < limits[0] <= 0.005  # zero would be no limit
    assert limits[2:] == [math.inf, math.inf, None, None]


@pytest.mark.ranks(2)
def test_tensors_that_differ_from_rank_to_rank_are_a_mismatch_and_stay_as_they_are(rank, group):
    def swapped(sizes):
        return [torch.full((n,), float(n)) for n in (sizes if rank == 0 else reversed(sizes))]

    def by_function(tensors):
        dist.all_reduce_coalesced(tensors)

    def by_future(tensors):
        dist.all_reduce_coalesced(tensors, async_op=True).wait()

    def by_block(tensors):
        with dist.coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)

    def by_gather(tensors):
        outputs = [[torch.empty_like(t) for t in tensors] for _ in range(2)]
        dist.all_gather_coalesced(outputs, tensors)

    for call in (by_function, by_future, by_block, by_gather):
        tensors = swapped([2, 3])
        with pytest.raises(
            dist.MismatchError, match=r"rank 1: .*2 tensors: float32\[3\]"
        ) as caught:
            call(tensors)
        assert str(caught.value).count("test_coalescing.py:") == 2
        for tensor, kept in zip(tensors, swapped([2, 3]), strict=True):
            torch.testing.assert_close(tensor, kept, rtol=0, atol=0)
    dist.all_reduce_coalesced([torch.ones(2), torch.ones(3)])


@pytest.mark.ranks(2)
def test_small_tensors_share_synchronous_calls_where_those_are_not_cheap(rank, group, monkeypatch):
    monkeypatch.setattr(group, "_lane", CLOSED_LANE)
    calls = watched(group)
    mixed = [*tensors(rank), torch.tensor([rank])]
    dist.all_reduce_coalesced(mixed)
    assert calls == ["all_gather", *["all_reduce"] * 4]  # two of 280 KB, the small ones, the int
    assert mixed[0].tolist() == [1.0] * 3
    assert mixed[-1].tolist() == [1]

    del calls[:]
    states = [torch.full((n,), float(rank)) for n in (1, 2, 30, 3)] + [torch.tensor([rank])]
    dist._broadcast_coalesced(group, states, 20, 1)
    assert calls == ["all_gather", *["broadcast"] * 4]
    assert all((state == 1).all() for state in states)


@pytest.mark.ranks(2)
def test_one_tensor_or_none_on_some_rank_and_another_reduction_are_told(rank, group):
    lists = ([torch.ones(3), torch.ones(4)], [torch.ones(7)]), ([], [torch.ones(7)])
    for pair in lists:
        with pytest.raises(dist.MismatchError, match=r"(?s)rank 0: SUM of .*rank 1: SUM of 1 tens"):
            dist.all_reduce_coalesced(pair[rank])
    with pytest.raises(dist.MismatchError, match=r"(?s)rank 0: SUM of .*rank 1: MAX of "):
        dist.all_reduce_coalesced([torch.ones(3), torch.ones(4)], ("sum", "max")[rank])
    if rank == 0:  # mistakes that this rank can see: nothing was sent
        with pytest.raises(dist.UsageError, match="op must be a ReduceOp"):
            dist.all_reduce_coalesced([torch.ones(3), torch.ones(4)], "nonsense")
        with pytest.raises(dist.UsageError, match=r"int64 times 0\.5"):
            dist.all_reduce_coalesced([torch.ones(3).long()] * 2, dist.ReduceOp.PREMUL_SUM(0.5))
    tensors = [torch.ones(3), torch.ones(4)]
    dist.all_reduce_coalesced(tensors)
    dist.all_reduce_coalesced(tensors[0])
    assert [tensor[0].item() for tensor in tensors] == [4.0, 2.0]


@pytest.mark.ranks(2)
def test_block_that_differs_names_its_line(rank, group):
    with pytest.raises(dist.MismatchError) as caught, dist.coalescing_manager():
        dist.all_reduce(torch.ones(2 + rank))
    assert str(caught.value).count("test_coalescing.py:") == 2
    assert "contextlib" not in str(caught.value)
