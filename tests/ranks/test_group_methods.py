"""What groups do with objects and lists of tensors by their methods: the functions call these."""

import threading
import time
from datetime import timedelta

import pytest
import torch

import gradsync as dist

BACKENDS = ["shm", "threads"]


@pytest.mark.ranks(3, backend=BACKENDS)
def test_objects_are_returned(rank, world_size, group):
    mine = {"rank": rank, "text": "x" * 1000 * rank}
    everyone = [{"rank": r, "text": "x" * 1000 * r} for r in range(world_size)]
    assert group.all_gather_object(mine) == everyone
    assert group.gather_object(mine, 2) == (everyone if rank == 2 else None)
    assert group.broadcast_object(mine, 1) == everyone[1]
    assert group.broadcast_object(mine if rank == 0 else None, 0)["rank"] == 0
    entries = [rank, {rank}]
    group.broadcast_object_list(entries, 2)
    assert entries == [2, {2}]
    assert group.scatter_object(everyone if rank == 1 else None, 1) == mine


@pytest.mark.ranks(3, backend=BACKENDS)
def test_roots_give_an_object_for_each_and_stand_in_the_group(rank, group):
    with pytest.raises(dist.UsageError, match="no rank 3 in the group"):
        group.gather_object(1, 3)
    with pytest.raises(dist.UsageError, match="no rank -1 in the group"):
        group.broadcast_object(1, -1)
    with pytest.raises(TypeError, match="a rank is an int, got str"):
        group.scatter_object(None, "0")
    with pytest.raises(TypeError, match="broadcast_object_list needs a list, got tuple"):
        group.broadcast_object_list((1,), 0)
    if rank == 0:
        with pytest.raises(dist.UsageError, match="must give objects"):
            group.scatter_object(None, 0)
        with pytest.raises(dist.UsageError, match="an object for each of the 3 ranks, got 2"):
            group.scatter_object([1, 2], 0)
    else:
        with pytest.raises(dist.UsageError, match="only the root, rank 0, gives objects"):
            group.scatter_object([1, 2, 3], 0)
    assert group.all_gather_object(rank) == [0, 1, 2]  # nothing was sent


@pytest.mark.ranks(3, backend=BACKENDS)
def test_objects_travel_between_two_ranks(rank, group):
    lock = threading.Lock()
    if rank == 0:
        assert sorted(group.recv_object(tag=7) for _ in range(2)) == ["from 1", "from 2"]
        assert group.recv_object(2) == {"last": [2]}
        with pytest.raises(dist.UsageError, match="an object could not be pickled"):
            group.recv_object(1)
    else:
        group.send_object(f"from {rank}", 0, tag=7)
    if rank == 1:
        with pytest.raises(dist.UsageError, match="an object could not be pickled"):
            group.send_object(lock, 0)
    if rank == 2:
        group.send_object({"last": [2]}, 0)


@pytest.mark.ranks(2, backend=BACKENDS)
def test_object_that_cannot_be_pickled_is_an_error_everywhere_and_the_group_goes_on(rank, group):
    obj = threading.Lock() if rank == 1 else "fine"
    with pytest.raises(dist.UsageError, match="object of rank 1 could not be pickled"):
        group.all_gather_object(obj)
    with pytest.raises(dist.UsageError, match="object of rank 1 could not be pickled"):
        group.gather_object(obj, 0)
    with pytest.raises(dist.UsageError, match="object of rank 1 could not be pickled"):
        group.broadcast_object(obj, 1)
    assert group.broadcast_object(rank, 1) == 1


@pytest.mark.ranks(2, backend=BACKENDS)
def test_lists_of_tensors_are_reduced_gathered_and_scattered(rank, group):
    def lists():
        return [torch.full((n,), rank + 1.0) for n in (2, 3, 70_000)]

    for start in (group.all_reduce_coalesced, group.all_reduce_coalesced_async):
        tensors = lists()
        work = start(tensors, "max")
        if work is not None:
            assert work.wait()
            assert work.result() == tensors
        assert all((tensor == 2).all() for tensor in tensors)

    outputs = [[torch.empty_like(tensor) for tensor in lists()] for _ in range(2)]
    group.all_gather_coalesced(outputs, lists())
    assert [each.unique().item() for each in outputs[0]] == [1.0] * 3
    assert [each.unique().item() for each in outputs[1]] == [2.0] * 3
    wholes = [torch.empty(2 * tensor.numel()) for tensor in lists()]
    group.all_gather_single_coalesced_async(wholes, lists()).wait()
    assert [whole.sum().item() for whole in wholes] == [6.0, 9.0, 210_000.0]

    parts = [torch.empty(tensor.numel()) for tensor in lists()]
    group.reduce_scatter_coalesced(parts, wholes)
    assert [part.unique().item() for part in parts] == [2.0 * (rank + 1)] * 3
    states = lists()
    group.broadcast_coalesced(states, 1, timeout=timedelta(seconds=20))
    assert [state.unique().item() for state in states] == [2.0] * 3


@pytest.mark.ranks(2, backend=BACKENDS)
def test_lists_that_differ_leave_large_tensors_alone_too(rank, group):
    small = [torch.ones(1), torch.ones(2)]
    large = torch.full((100_000,), rank + 1.0)

    def in_block(tensors):
        with dist.coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)

    calls = (group.all_reduce_coalesced, lambda t: group.broadcast_coalesced(t, 0), in_block)
    for call in calls:
        with pytest.raises(dist.MismatchError, match="do not fit together"):
            call([large, *(small if rank == 0 else reversed(small))])
        assert (large == rank + 1).all()


@pytest.mark.ranks(3)
def test_monitored_barrier_takes_seconds_and_names_all_who_are_missing(rank, group):
    group.monitored_barrier(timeout=20)
    if rank == 0:
        with pytest.raises(dist.CollectiveTimeout, match=r"ranks 1, 2 did not come .* 200 ms"):
            group.monitored_barrier(0.2, wait_all_ranks=True)
    else:
        time.sleep(0.8)  # late, and not gone
