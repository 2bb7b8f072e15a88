"""Groups of some of the world's ranks."""

import gc
import os
import threading
import time

import pytest
import torch

import gradsync as dist
from gradsync.testing import faults
from gradsync.testing.conformance import check_group


def total(group) -> float:
    tensor = torch.tensor([float(dist.get_rank())])
    group.all_reduce(tensor)
    return tensor.item()


@pytest.mark.ranks(4, backend=["shm", "threads"])
def test_members_get_a_group_and_the_others_a_mark(rank):
    group = dist.new_group([3, 1], group_desc="odd ones")
    if rank in (1, 3):
        assert dist.get_process_group_ranks(group) == [1, 3]
        assert (group.size(), group.rank(), group.group_desc) == (2, rank // 2, "odd ones")
        assert dist.get_group_rank(group, rank) == rank // 2
        assert dist.get_global_rank(group, 1) == 3
        assert total(group) == 4.0
        check_group(group)
        with pytest.raises(dist.UsageError, match=r"rank 0 of the world is not in the group"):
            dist.get_group_rank(group, 0)
    else:
        assert group == dist.GroupMember.NON_GROUP_MEMBER
        assert (dist.get_rank(group), dist.get_world_size(group)) == (-1, -1)
        with pytest.raises(dist.UsageError, match="not in the group"):
            dist.get_backend(group)
        dist.destroy_process_group(group)  # nothing to do, no harm
    assert dist.get_pg_count() == 2
    dist.barrier()


@pytest.mark.ranks(3, backend=["shm", "threads"])
def test_order_of_ranks_may_be_chosen(rank):
    group = dist.new_group([2, 0, 1], sort_ranks=False)
    assert dist.get_process_group_ranks(group) == [2, 0, 1]
    assert group.rank() == [1, 2, 0][rank]
    tensor = torch.tensor([float(rank)])
    group.broadcast(tensor, 0)
    assert tensor.item() == 2.0
    assert dist.group.WORLD is dist.GroupMember.WORLD
    assert dist.group.WORLD.size() == 3


@pytest.mark.ranks(4, backend=["shm", "threads"])
def test_only_members_call_with_local_synchronization(rank):
    if rank < 2:
        for _ in range(3):  # the same ranks again: another group each time
            group = dist.new_group([0, 1], use_local_synchronization=True)
            assert total(group) == 1.0
            dist.destroy_process_group(group)
    group = dist.new_group([1, 2, 3])  # all ranks call, however many groups each knows
    if rank:
        assert total(group) == 6.0


@pytest.mark.ranks(4, backend=["shm", "threads"])
def test_sub_groups_in_rows(rank):
    mine, groups = dist.new_subgroups(2)
    assert dist.get_process_group_ranks(mine) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert [isinstance(g, dist.ProcessGroup) for g in groups] == [rank < 2, rank >= 2]
    assert total(mine) == (1.0 if rank < 2 else 5.0)
    mine, groups = dist.new_subgroups_by_enumeration([[0, 3], [1]])
    assert (mine is None) == (rank == 2)
    part = dist.split_group(split_ranks=[[0, 2], [3]])
    assert (part is None) == (rank == 1)
    if rank in (0, 2):
        assert total(part) == 2.0


@pytest.mark.ranks(2)
def test_mistakes_are_found_before_anything_is_sent():
    for ranks, message in (
        ([], "at least one rank"),
        ([0, 0], "only once"),
        ([0, 2], "no rank 2 in a world of 2"),
    ):
        with pytest.raises(dist.UsageError, match=message):
            dist.new_group(ranks)
    for nonsense in (["0"], 0):
        with pytest.raises(TypeError, match="ranks is a list of numbers, got"):
            dist.new_group(nonsense)
    with pytest.raises(dist.UsageError, match="must divide the 2 ranks"):
        dist.new_subgroups(3)
    with pytest.raises(dist.UsageError, match="rank 0 is in more than one"):
        dist.new_subgroups_by_enumeration([[0], [0, 1]])
    with pytest.raises(dist.BackendUnavailable, match="'gloo' is not available"):
        dist.new_group([0], backend="gloo")
    group = dist.new_group()
    dist.destroy_process_group(group)
    with pytest.raises(dist.UsageError, match="destroyed already"):
        dist.destroy_process_group(group)
    with pytest.raises(dist.UsageError, match="has been destroyed"):
        group.barrier()
    dist.barrier()


@pytest.mark.ranks(3)
def test_mistake_in_the_part_of_one_is_found_by_all(rank):
    for parts, message in (
        ([[0, 1], [1, 2]], "rank 1 is in more than one part"),
        ([[0, 1], [2, 9]], "there is no rank 9"),
    ):
        with pytest.raises(dist.UsageError, match=message):
            dist.split_group(split_ranks=parts)
    dist.barrier()


@pytest.mark.ranks(3)
def test_ranks_that_ask_for_different_groups_are_told_so(rank):
    """Members and others alike; without the check a group of the wrong ranks could form."""
    told = ""
    try:
        dist.new_group([0, 1, 2] if rank == 0 else [0, 1])
    except (dist.UsageError, dist.PeerLostError) as error:
        told = str(error)
    # Rank 2 finds nothing wrong if all that came before it had asked for the same as it does.
    assert rank == 2 or "asked for different groups" in told
    assert rank == 2 or "[0, 1, 2]" in told
    dist.barrier()
    # One that is in neither of two groups, and comes last, finds it.
    if rank == 2:
        dist.barrier()
        with pytest.raises(dist.UsageError, match=r"rank 2 for one of the ranks \[0\], another"):
            dist.new_group([0])
    else:
        assert total(dist.new_group([0, 1])) == 1.0
        dist.barrier()


@pytest.mark.ranks(2)
def test_rank_that_does_not_come_to_new_group_is_described(rank):
    if rank == 0:
        with pytest.raises(dist.RendezvousError, match="every rank of the world") as caught:
            dist.new_group(timeout=0.2)
        assert "rank 1 stands at" in str(caught.value)
        assert "in test_rank_that_does_not_come" in str(caught.value)
    dist.barrier()


@pytest.mark.ranks(2)
def test_groups_are_independent_of_each_other(rank):
    """Two threads use two groups in opposite orders; neither waits for the other."""
    first, second = dist.new_group(), dist.new_group()
    order = [first, second] if rank == 0 else [second, first]
    threads = [threading.Thread(target=group.barrier) for group in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.ranks(2)
def test_a_hundred_groups_leave_nothing():
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    gc.collect()  # what tests before this one left in their errors' frames
    before = descriptors(), threading.active_count()
    world = dist.group.WORLD
    keys = len(world.members.store.list_keys())
    dist.barrier()
    for number in range(100):
        group = dist.new_group()
        group.barrier()
        dist.destroy_process_group(group)
        if number < 5:
            dist.destroy_process_group(dist.new_group([number % 2]))
    dist.barrier()
    assert (descriptors(), threading.active_count()) == before
    assert len(world.members.store.list_keys()) == keys


@pytest.mark.ranks(3, faults=[faults.kill(rank=2, at="barrier#1")])
def test_death_is_seen_in_every_group(rank):
    group = dist.new_group([1, 2])
    if rank == 2:
        dist.barrier()
    lost = group if rank == 1 else dist.group.WORLD
    with pytest.raises(dist.PeerLostError, match="SIGKILL"):
        lost.barrier()


@pytest.mark.ranks(2, backend=["shm", "threads"])
def test_world_takes_its_groups_along(rank):
    group = dist.new_group()
    group.barrier()
    dist.destroy_process_group()
    with pytest.raises(dist.UsageError, match="has been destroyed"):
        group.barrier()


@pytest.mark.ranks(3, backend="threads")
def test_rank_that_leaves_does_not_keep_those_waiting_who_form_a_group(rank):
    if rank == 2:
        dist.destroy_process_group()
        return
    with pytest.raises(dist.PeerLostError, match=r"rank 1 of .* left before") as caught:
        dist.new_group([rank, 2], use_local_synchronization=True)
    assert caught.value.ranks == (1,)
    pair = dist.new_group([0, 1], use_local_synchronization=True)
    tensor = dist.shared_zeros(1, group=pair)
    tensor += rank
    pair.all_reduce(tensor)
    assert tensor.item() == 1.0


@pytest.mark.ranks(3, group=False)
def test_rank_that_has_left_the_world_is_not_waited_for(rank, world_size, store):
    dist.init_process_group(store=store, rank=rank, world_size=world_size)
    if rank == 1:
        dist.destroy_process_group()
        store.get("told 0"), store.get("told 2")  # its process lives on
        return
    start = time.monotonic()
    with pytest.raises(dist.PeerLostError, match=r"rank 1 .*left the world before the group"):
        dist.new_group()
    if rank == 2:
        dist.group.WORLD.leave("ValueError: bad batch 17")
        store.get("told 0")
    else:
        with pytest.raises(dist.PeerLostError, match=r"rank 2 .*failed .*: ValueError: bad batch"):
            dist.new_group([0, 2], use_local_synchronization=True)
    assert time.monotonic() - start < 5
    store.set(f"told {rank}", "yes")
    dist.destroy_process_group()


@pytest.mark.ranks(3)
def test_rank_that_gave_up_on_a_new_group_is_named_to_those_who_come_later(rank, store):
    if rank == 0:
        with pytest.raises(dist.RendezvousError, match="not every member came"):
            dist.new_group(timeout=0.2)
        store.set("gave up", "yes")
        return
    store.get("gave up")
    with pytest.raises(dist.PeerLostError, match=r"rank 0 .*failed before the group was formed"):
        dist.new_group(timeout=5)


@pytest.mark.ranks(4, faults=[faults.kill(rank=1, at="barrier#1")])
def test_world_goes_on_without_a_rank_that_died(rank):
    others = dist.new_group([0, 2, 3], group_desc="without one")
    with pytest.raises(dist.PeerLostError):
        dist.barrier()
    if rank == 3:
        dist.destroy_process_group()
        return
    pair = dist.shrink_group([2], others)
    assert dist.get_process_group_ranks(pair) == [0, 2]
    assert pair.group_desc == "without one"
    assert others.is_closed()
    assert total(pair) == 2.0
    world = dist.shrink_group([1, 3])
    assert world is dist.group.WORLD
    assert pair.is_closed()
    assert (dist.get_rank(), dist.get_world_size()) == (rank // 2, 2)
    assert total(world) == 1.0
    assert total(dist.new_group()) == 1.0


@pytest.mark.ranks(2)
def test_mistakes_in_shrinking_are_of_torchs_kind(rank):
    for kind, wrong in (
        (TypeError, (1,)),
        (TypeError, ["1"]),
        (ValueError, []),
        (ValueError, [2]),
        (ValueError, [1 - rank, 1 - rank]),
        (ValueError, [0, 1]),
        (RuntimeError, [rank]),
    ):
        with pytest.raises(kind):
            dist.shrink_group(wrong)
    with pytest.raises(ValueError, match="SHRINK_ABORT"):
        dist.shrink_group([1 - rank], shrink_flags=2)
    dist.barrier()


@pytest.mark.ranks(3, group=False)
def test_shrinking_may_be_tried_again(rank, world_size, store):
    dist.init_process_group(store=store, rank=rank, world_size=world_size)
    if rank < 2:
        if rank == 0:
            dist.group.WORLD.set_timeout(0.2)
        else:
            store.get("gave up")
        with pytest.raises(dist.DistError):  # rank 1 is late, and rank 0 has gone when it comes
            dist.shrink_group([2])
        store.set("gave up" if rank == 0 else "was told", "yes")
        store.get("was told")
        time.sleep(0.3 * rank)  # long enough for rank 0 to find what is left of the first attempt
        dist.group.WORLD.set_timeout(20)
        assert total(dist.shrink_group([2])) == 1.0
    dist.destroy_process_group()


@pytest.mark.ranks(4, faults=[faults.kill(rank=3, at="broadcast#1")])
def test_errors_say_which_ranks_of_the_world_are_meant(rank):
    group = dist.new_group([0, 2, 3])
    if rank == 3:
        dist.broadcast(torch.ones(1), 0)
    if rank == 1:
        return
    me = rf"on rank {rank // 2} \({rank} in the world\) of 3 in the group '1'"
    with pytest.raises(dist.PeerLostError, match=rf"{me}: rank 2 \(3 in the world\)") as caught:
        group.barrier()
    assert "Ranks 0, 1, 2 of this group are ranks 0, 2, 3 of the world" in str(caught.value)
    assert caught.value.ranks == (2,)
    with pytest.raises(dist.PeerLostError, match=r"recv.* from rank 2 \(3 in the world\) on rank"):
        dist.recv(torch.ones(1), 3, group=group)


@pytest.mark.ranks(3, backend=["shm", "threads"])
def test_late_and_different_ranks_of_a_group_are_told_by_their_ranks_in_the_world(rank):
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    if rank == 1:
        with pytest.raises(dist.CollectiveTimeout, match=r"Missing: rank 1 \(2 in the world\)"):
            group.barrier(timeout=0.2)
    else:
        with pytest.raises(dist.DistBackendError, match=r"ended by rank 0 \(1 in the world\)"):
            group.recv(torch.ones(1), 0, timeout=20)
