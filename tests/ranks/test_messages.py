"""Sends and receives: beside Gloo, when they do not fit, and when a rank dies."""

import os
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as torch_dist

import gradsync as dist
from gradsync.testing import faults


@pytest.mark.ranks(2, may_leave=["thread", "socket"])  # Gloo's own go when they like
def test_results_are_those_of_gloo(rank, world_size, store):
    from gradsync.stores import to_torch

    torch_dist.init_process_group("gloo", store=to_torch(store), rank=rank, world_size=world_size)
    peer, seen = 1 - rank, []
    for lib in (dist, torch_dist):
        log = []
        for count in (0, 1, 1000, 300_000):
            mine, got = torch.arange(float(count)) + rank, torch.empty(count)
            if rank == 0:
                lib.send(mine, 1, tag=4)
                source = lib.recv(got, 1)
            else:
                # Gloo receives nothing from anybody, but not from any source.
                source = lib.recv(got, None if count else 0, tag=4)
                lib.send(mine, 0)
            log += [source, got.sum().item(), got.tolist()[:3]]
        # Tags in another order than sent; two of one tag in theirs.
        given = [torch.full((5000,), float(10 * rank + tag)) for tag in (1, 2, 1)]
        works = [lib.isend(t, peer, tag=tag) for t, tag in zip(given, (1, 2, 1), strict=True)]
        for tag in (2, 1, 1):
            got = torch.empty(5000)
            work = lib.irecv(got, peer, tag=tag)
            log += [work.wait(), got[0].item(), work.is_completed(), work.is_success()]
        log += [work.wait() for work in works]
        batch = [torch.empty(3), torch.empty(3, dtype=torch.uint16)]
        ops = [
            lib.P2POp(lib.irecv, batch[0], peer),
            lib.P2POp(lib.isend, torch.ones(3) * rank, peer),
            lib.P2POp(lib.isend, torch.full((3,), rank, dtype=torch.uint16), group_peer=peer),
            lib.P2POp(lib.irecv, batch[1], group_peer=peer),
        ]
        log += [work.wait() for work in lib.batch_isend_irecv(ops)]
        log += [t.tolist() for t in batch] + [ops[0].peer, ops[0].group_peer]
        objects = ["hello", {"rank": 0}, torch.arange(3)] if rank == 0 else [None] * 3
        if rank == 0:
            lib.send_object_list(objects, 1)
        else:
            log.append(lib.recv_object_list(objects, 0))
        log += objects[:2] + objects[2].tolist()
        seen.append(log)
    assert seen[0] == seen[1]
    torch_dist.destroy_process_group()


@pytest.mark.ranks(2, backend=["shm", "threads"])
def test_blocking_sends_in_opposite_order_do_not_deadlock(rank, group):
    tensor = torch.full((200_000,), float(rank))
    group.send(tensor, 1 - rank, tag=1)
    group.send(tensor + 10, 1 - rank, tag=2)
    for tag, extra in ((2, 10), (1, 0)):
        got = torch.empty_like(tensor)
        assert group.recv(got, tag=tag) == 1 - rank
        assert (got == 1 - rank + extra).all()


@pytest.mark.ranks(2, backend=["shm", "threads"])
def test_works_in_flight(rank, group):
    peer = 1 - rank
    got = torch.zeros(4, 3)
    receipt = group.recv_async(got[:, 1], tag=3)
    assert not receipt.is_completed()
    assert receipt.exception() is None
    with pytest.raises(dist.UsageError, match="no source rank"):
        receipt.source_rank()
    with pytest.raises(dist.CollectiveTimeout, match="was not over after"):
        receipt.wait(0.01)
    future = receipt.get_future().then(lambda done: done.value()[0].sum().item())
    group.barrier()
    work = group.send_async(torch.full((4,), 2.0), peer, tag=3)
    assert future.wait() == 8.0
    assert (receipt.source_rank(), receipt.is_success(), work.wait()) == (peer, True, True)
    assert got.tolist() == [[0.0, 2.0, 0.0]] * 4
    with pytest.raises(dist.UsageError, match="only the work of a receive"):
        work.source_rank()
    # Whoever drops the handle and the tensor does not take the message back.
    group.send_async(torch.arange(500_000.0), peer)
    large = torch.empty(500_000)
    group.recv(large, peer)
    assert torch.equal(large, torch.arange(500_000.0))


@pytest.mark.ranks(2)
def test_messages_go_on_beside_a_collective(rank, group):
    tensor = torch.zeros(1000)
    if rank == 1:
        # Rank 0 is inside a barrier, in another thread, until the answer is there.
        assert group.recv(tensor, 0) == 0
        group.send(tensor + 1, 0)
        group.barrier()
        return
    thread = threading.Thread(target=group.barrier)
    thread.start()
    group.send(tensor, 1)
    group.recv(tensor, 1)
    thread.join()
    assert (tensor == 1).all()


@pytest.mark.ranks(2)
def test_a_rank_sends_to_itself(rank):
    got = torch.empty(3)
    receipt = dist.irecv(got, src=rank)
    assert dist.isend(torch.arange(3.0), dst=rank).wait()
    assert receipt.wait()
    assert got.tolist() == [0.0, 1.0, 2.0]
    for call in (dist.send, dist.recv):
        with pytest.raises(ValueError, match="is this rank"):
            call(got, rank)


def send_until_refused(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    group.send(tensor, 1)
    group.barrier()
    group.send(tensor, 1)


@pytest.mark.ranks(2, backend=["shm", "threads"])
@pytest.mark.parametrize("count", [10, 1_000_000])
def test_another_size_or_dtype_is_a_mismatch_on_both_sides(rank, group, count):
    for wrong in (torch.full((count + 1,), -1.0), torch.full((count,), -1, dtype=torch.int32)):
        name = str(wrong.dtype).removeprefix("torch.")
        both = rf"float32\[{count}\].*{name}\[{wrong.numel()}\]"
        if rank == 0:
            # One that is still on its way fails itself, one that had left already the next call.
            with pytest.raises(dist.MismatchError, match=both) as caught:
                send_until_refused(group, torch.ones(count))
            if count > 10:
                group.barrier()
            assert caught.value.ranks == (1,)
        else:
            with pytest.raises(dist.MismatchError, match=both) as caught:
                group.recv(wrong, 0)
            assert caught.value.ranks == (0,)
            assert (wrong == -1).all()
            group.barrier()
    # Neither the pair nor the group is broken.
    tensor = torch.ones(5)
    if rank == 0:
        group.send(tensor * 3, 1)
    else:
        group.recv(tensor, 0)
    group.all_reduce(tensor)
    assert tensor.tolist() == [4.0] * 5


@pytest.mark.ranks(2)
def test_the_short_way_fails_like_the_long_one(rank):
    sub = dist.new_group([0, 1])  # nobody observes it, so calls take the lane
    tensor = torch.full((4,), float(rank))
    assert not sub.hooks.before
    if rank == 0:
        sub.send(tensor, 1)
        sub.send(tensor, 1, tag=2**40)
        sub.send(tensor, 1, tag=1)
        sub.barrier()
        with pytest.raises(dist.MismatchError, match=r"an earlier send; this call was not"):
            sub.send(tensor, 1)
        sub.send(tensor, 1)
    else:
        assert [sub.recv(tensor), sub.recv(tensor, 0, tag=2**40)] == [0, 0]
        assert tensor.tolist() == [0.0] * 4
        with pytest.raises(dist.MismatchError, match=r"recv\(float32\[3\], tag 1\) from rank 0"):
            sub.recv(tensor[:3], 0, tag=1)
        sub.barrier()
        sub.recv(tensor, 0)
    dist.destroy_process_group(sub)


@pytest.mark.ranks(3, faults=[faults.kill(rank=1, at="send#3")])
def test_killed_rank_is_named(rank, group):
    tensor = torch.ones(10)
    if rank == 1:
        group.send(tensor, 0)
        group.send_async(tensor, 0, tag=1).wait()
        group.send(tensor, 0)
    if rank == 2:
        start = time.monotonic()
        with pytest.raises(dist.PeerLostError, match=r"send\(float32\[900000\], tag 0\) to rank 1"):
            group.send(torch.ones(900_000), 1)
    else:
        group.recv(tensor, 1, tag=1)
        start = time.monotonic()
        waiting = group.recv_async(tensor, tag=7)
        with pytest.raises(dist.PeerLostError, match="killed by signal 9") as caught:
            group.recv(tensor, 1, tag=5)
        assert caught.value.ranks == (1,)
        assert caught.value.op == "recv"
        assert isinstance(waiting.exception(), dist.PeerLostError)
        # What it had sent is still there, and then there is no more of it.
        assert group.recv(tensor) == 1
        with pytest.raises(dist.PeerLostError):
            group.recv(tensor)
    assert time.monotonic() - start < 1
    with pytest.raises(dist.PeerLostError):
        group.send(tensor, 1)
    with pytest.raises(dist.PeerLostError):
        group.barrier()


@pytest.mark.ranks(2, backend=["shm", "threads"])
def test_nobody_comes_in_time(rank, group):
    tensor = torch.ones(400_000)
    if rank == 0:
        group.send(tensor[:3], 1, tag=9)
        with pytest.raises(dist.CollectiveTimeout, match=r"0\.1 s: no such message") as caught:
            group.recv(tensor, 1, tag=2, timeout=0.1)
        assert caught.value.ranks == (1,)
        assert "Waited for: rank 1 (pid" in str(caught.value)
        with pytest.raises(dist.CollectiveTimeout, match="of 1600000 bytes could be written"):
            group.send(tensor, 1, timeout=0.1)
        late = group.recv_async(tensor, 1, tag=2, timeout=0.1)
        with pytest.raises(dist.CollectiveTimeout, match=r"recv\(float32\[400000\], tag 2\)"):
            late.wait()
        group.barrier()
        group.send(tensor * 2, 1)
        group.barrier()
    else:
        group.barrier()
        with pytest.raises(dist.AbortedError, match="ended by rank 0: the sender gave up"):
            group.recv(tensor, 0)
        with pytest.raises(dist.CollectiveTimeout, match=r"messages wait .* tags (0, )?9"):
            group.recv(tensor, 0, tag=1, timeout=0.05)
        group.recv(tensor, 0)
        assert (tensor == 2).all()
        group.barrier()


@pytest.mark.ranks(3)
def test_ranks_of_the_world_and_of_the_group(rank):
    sub = dist.new_group([2, 1])
    tensor = torch.full((2,), float(rank))
    if rank == 0:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert dist.send(tensor, 1, group=sub) is None
            assert dist.recv(tensor, 1, group=sub) == -1
            assert dist.isend(tensor, 1, group=sub) is None
            assert dist.irecv(tensor, 1, group=sub) is None
            assert dist.recv_object_list([None], 1, group=sub) == -1
        assert len(caught) == 5
        return
    other = 3 - rank
    for there, back in (({"dst": other}, {"src": other}), ({"group_dst": sub.rank() ^ 1}, {})):
        work = dist.isend(tensor, group=sub, **there)
        assert dist.recv(tensor.clone(), group=sub, **back) == other
        work.wait()
    for call in (dist.isend, dist.send, dist.irecv, dist.recv):
        with pytest.raises(ValueError, match="rank 0 of the world is not in the group"):
            call(tensor, 0, group=sub)
        with pytest.raises(ValueError, match="got 1 and 0"):
            call(tensor, 1, sub, 0, 0)
        with pytest.raises(RuntimeError, match="a tag is at least 0"):
            call(tensor, other, tag=-1)
        with pytest.raises(TypeError, match=r"needs a torch\.Tensor"):
            call([1, 2], other)
    for call in (dist.isend, dist.send):
        with pytest.raises(ValueError, match="got None and None"):
            call(tensor)


@pytest.mark.ranks(2, threads=True)
def test_batches_and_lists_are_checked_first(rank):
    peer, tensor = 1 - rank, torch.ones(2)
    op = dist.P2POp(dist.isend, tensor, peer, tag=5)
    assert repr(op) == f"P2POp(isend to rank {peer} of 'world', (2,), torch.float32, tag=5)"
    with pytest.raises(ValueError, match=r"isend or gradsync\.irecv"):
        dist.P2POp(dist.all_reduce, tensor, peer)
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        dist.P2POp(dist.isend, 3, peer)
    with pytest.raises(IndexError):
        dist.batch_isend_irecv([])
    for bad in ((op,), [op, 3], None):
        with pytest.raises(ValueError, match="list of P2POp"):
            dist.batch_isend_irecv(bad)
    wrong = dist.P2POp(dist.irecv, tensor, peer, tag=-5)
    with pytest.raises(ValueError, match="a tag is at least 0"):
        dist.batch_isend_irecv([op, wrong])  # nothing is sent
    with pytest.raises(dist.CollectiveTimeout):
        dist.group.WORLD.recv(tensor, peer, tag=5, timeout=0.05)
    dist.barrier()
    with pytest.raises(ValueError, match="got None and None"):
        dist.recv_object_list([None])
    with pytest.raises(TypeError, match="recv_object_list needs a list, got tuple"):
        dist.recv_object_list((None,), peer)
    # An object that cannot be pickled is an error on both sides.
    if rank == 0:
        with pytest.raises(dist.UsageError, match="could not be pickled"):
            dist.send_object_list([lambda: 0], 1)
        dist.send_object_list([1, 2], 1)
    else:
        with pytest.raises(dist.UsageError, match="could not be pickled"):
            dist.recv_object_list([None], 0)
        with pytest.raises(dist.UsageError, match="sent 2 objects, this rank has room for 1"):
            dist.recv_object_list([None], 0)


@pytest.mark.ranks(2)
def test_observers_see_messages(rank, group):
    seen = []
    group.hooks.add_before(lambda call: seen.append(("before", call.op.name, call.peer, call.tag)))
    group.hooks.add_after(lambda call: seen.append(("after", call.op.name)))
    tensor = torch.ones(1)
    if rank == 0:
        group.send(tensor, 1, tag=2)
    else:
        group.recv_async(tensor, 0, tag=2).wait()
    name = ("send", "recv")[rank]
    deadline = time.monotonic() + 5
    while len(seen) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)  # another thread may tell
    assert seen == [("before", name, 1 - rank, 2), ("after", name)]


@pytest.mark.ranks(2)
def test_forked_child_gets_a_clear_error(rank, group):
    tensor = torch.ones(1)
    receipt = group.recv_async(tensor, 1 - rank)
    child = os.fork()
    if child == 0:
        try:
            group.send(tensor, 1 - rank)
        except dist.UsageError as error:
            os._exit(0 if "fork of rank" in str(error) else 2)
        os._exit(3)
    assert os.waitpid(child, 0)[1] == 0
    group.send(torch.tensor([5.0]), 1 - rank)
    assert receipt.wait()
    assert tensor.item() == 5


@pytest.mark.ranks(2)
def test_destroying_a_group_sends_what_is_in_flight(rank, store):
    tensor = torch.arange(300_000.0)
    sub = dist.new_group([0, 1])
    if rank == 0:
        work, never = sub.send_async(tensor, 1), sub.recv_async(torch.empty(1), 1)
        dist.destroy_process_group(sub)
        assert work.is_success()
        assert isinstance(never.exception(), dist.AbortedError)
    else:
        got = torch.empty_like(tensor)
        sub.recv(got, 0)
        assert torch.equal(got, tensor)
        with pytest.raises(dist.PeerLostError, match="left the group"):
            sub.recv(got, 0)
        dist.destroy_process_group(sub)
