"""What the others see when one rank dies, raises, leaves, is late or does something else."""

import os
import signal
import time

import pytest
import torch

import gradsync as dist


def expect_lost(rank: int, how: str, expected: str) -> None:
    dist.init_process_group(timeout=30)
    dist.barrier()
    if rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(3)
        if how == "leave":
            dist.destroy_process_group()
            return
    start = time.monotonic()
    with pytest.raises(dist.PeerLostError, match=expected) as caught:
        dist.all_reduce(torch.ones(10))
    assert time.monotonic() - start < 5
    assert caught.value.ranks == (1,)
    assert caught.value.op == "all_reduce"
    # The group is broken, and says so at once.
    with pytest.raises(dist.PeerLostError):
        dist.barrier()
    os._exit(42)  # tells the parent that everything above was as expected


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("kill", r"rank 1 on .* is gone \(pid \d+: its process is gone: killed by signal 9"),
        ("exit", r"rank 1 on .* is gone \(pid \d+: its process is gone: exited with code 3"),
        (
            "leave",
            r"rank 1 on .* is gone \(pid \d+: left the group before this call; last call: #1",
        ),
    ],
)
def test_lost_rank_is_named_with_its_end(how, expected):
    context = dist.spawn(expect_lost, (how, expected), nprocs=3, join=False)
    assert context is not None
    with pytest.raises(dist.RankFailedError):
        context.join(grace_period=20)
    codes = [process.exitcode for process in context.processes]
    assert codes == [42, {"kill": -9, "exit": 3, "leave": 0}[how], 42]


def raise_on_one(rank: int) -> None:
    dist.init_process_group(timeout=30)
    if rank == 1:
        raise ValueError("bad batch 17")
    with pytest.raises(dist.PeerLostError, match="bad batch 17"):
        dist.barrier()
    os._exit(42)


def test_traceback_of_a_rank_that_raises_reaches_the_others():
    context = dist.spawn(raise_on_one, nprocs=2, join=False)
    assert context is not None
    with pytest.raises(dist.RankFailedError, match="bad batch 17") as caught:
        context.join(grace_period=20)
    assert caught.value.rank == 1
    assert context.processes[0].exitcode == 42


def mismatch(rank: int) -> None:
    dist.init_process_group(timeout=30)
    tensor = torch.full((10 + (rank == 1),), float(rank))
    before = tensor.clone()
    with pytest.raises(dist.MismatchError) as caught:
        dist.all_reduce(tensor)
    assert "all_reduce(float32[10], SUM)" in str(caught.value)
    assert "all_reduce(float32[11], SUM)" in str(caught.value)
    assert torch.equal(tensor, before)


def test_mismatch_is_raised_on_every_rank_with_the_table():
    dist.spawn(mismatch, nprocs=3)


def late(rank: int) -> None:
    dist.init_process_group(timeout=30)
    group = dist.group.world.default_group()
    dist.barrier()
    if rank == 1:
        time.sleep(1.5)
        return
    with pytest.raises(
        dist.CollectiveTimeout, match=r"timed out after 0.3 s.*Missing: rank 1"
    ) as c:
        group.barrier(timeout=0.3)
    assert isinstance(c.value, TimeoutError)
    assert c.value.ranks == (1,)


def test_late_rank_is_named_at_the_deadline():
    dist.spawn(late, nprocs=2)


def fork_beside(rank: int) -> None:
    dist.init_process_group(timeout=30)
    child = os.fork()
    if child == 0:
        try:
            dist.barrier()
        except dist.UsageError as error:
            os._exit(0 if "fork of rank" in str(error) else 2)
        os._exit(3)
    assert os.waitpid(child, 0)[1] == 0
    dist.barrier()  # the child's end was nobody's end


def test_forked_child_gets_a_clear_error_and_harms_nobody():
    dist.spawn(fork_beside, nprocs=2)


def abort(rank: int) -> None:
    dist.init_process_group(timeout=30)
    if rank == 0:
        dist.group.world.default_group().abort("the disk is full")
    with pytest.raises(dist.AbortedError, match="rank 0 aborted the group: the disk is full"):
        dist.barrier()


def test_abort_reaches_everyone_with_its_reason():
    dist.spawn(abort, nprocs=2)
