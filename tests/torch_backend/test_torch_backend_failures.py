"""What goes wrong under torch.distributed arrives as torch's errors, soon, and names its cause."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from beside_gloo import run_on
from torch.nn.parallel import DistributedDataParallel

import gradsync

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.ranks(2, group=False, may_leave=["environment"]),
]


def different_sizes(rank, size):
    with pytest.raises(dist.DistBackendError, match=r"float32\[3\]") as caught:
        dist.all_reduce(torch.ones(3 + rank))
    assert isinstance(caught.value.__cause__, gradsync.MismatchError)
    with pytest.raises(dist.DistBackendError, match="broken"):
        dist.barrier()


def one_comes_late(rank, size):
    late = dist.new_group(timeout=timedelta(seconds=0.3))
    store = late.get_group_store()
    if rank == 1:
        store.wait(["over"], timedelta(seconds=30))
    else:
        start = time.monotonic()
        work = dist.all_reduce(torch.ones(3), group=late, async_op=True)
        with pytest.raises(dist.DistBackendError, match=r"Missing: rank 1") as caught:
            work.wait()
        assert 0.2 < time.monotonic() - start < 10
        assert isinstance(caught.value.__cause__, gradsync.CollectiveTimeout)
        assert isinstance(work.exception(), dist.DistBackendError)
        with pytest.raises(dist.DistBackendError, match="Missing: rank 1"):
            work.get_future().wait()
        with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier"):
            dist.monitored_barrier(timeout=timedelta(seconds=0.2))
        store.set("over", "1")


def one_gives_up(rank, size):
    time.sleep(0.6 * rank)
    limit = timedelta(seconds=20 if rank else 0.3)
    with pytest.raises(dist.DistBackendError, match="arrier"):  # torch's, on both
        dist.monitored_barrier(timeout=limit)


def one_makes_another_call(rank, size):
    calls = (lambda: dist.broadcast(torch.ones(1), 0), dist.monitored_barrier)
    with pytest.raises(dist.DistBackendError, match="different things"):
        calls[rank]()


def one_aborts(rank, size):
    if rank == 1:
        dist.group.WORLD.abort()
    with pytest.raises(dist.DistBackendError, match="aborted"):
        dist.barrier()


def wrong_arguments(rank, size):
    with pytest.raises(ValueError, match="rank 7"):
        dist.group.WORLD.broadcast(torch.ones(1), 7)
    with pytest.raises(RuntimeError, match="one tensor"):
        dist.group.WORLD.allreduce([torch.ones(1), torch.ones(1)])
    dist.barrier()


def error_in_a_hook(rank, size):
    def hook(state, bucket):
        def refuse(future):
            raise KeyError("not mine")

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(refuse)

    hook.__annotations__ = {
        "bucket": dist.GradBucket,
        "return": torch.futures.Future[torch.Tensor],
    }
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model.register_comm_hook(None, hook)
    with pytest.raises(RuntimeError, match="KeyError: 'not mine'"):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize(
    "program",
    [
        different_sizes,
        one_comes_late,
        one_gives_up,
        one_makes_another_call,
        one_aborts,
        wrong_arguments,
        error_in_a_hook,
    ],
    ids=lambda p: p.__name__,
)
def test_failure_is_torchs_and_named(store, rank, world_size, program):
    run_on("gradsync", store, rank, world_size, program)


def third_rank(path, act):
    """Become a rank that does something and dies, without a word."""
    try:
        dist.init_process_group("gradsync", init_method=f"file://{path}", rank=2, world_size=3)
        act()
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def train(steps):
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()


def test_death_of_a_rank_ends_a_training_of_ddp(shared, tmp_path, rank):
    path = shared(lambda: str(tmp_path / "meeting"))
    child = os.fork() if rank == 0 else 0
    if rank == 0 and child == 0:
        third_rank(path, lambda: train(steps=2))
    dist.init_process_group("gradsync", init_method=f"file://{path}", rank=rank, world_size=3)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"DistBackendError|SIGKILL|rank 2|gone"):
        train(steps=50)
    assert time.monotonic() - start < 20
    with pytest.raises(dist.DistBackendError, match="rank 2") as caught:
        dist.barrier()
    assert isinstance(caught.value.__cause__, gradsync.PeerLostError)
    dist.destroy_process_group()
    if rank == 0:
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def test_rank_that_died_before_a_new_group_is_named_by_its_rank_in_the_world(
    shared, tmp_path, rank
):
    path = shared(lambda: str(tmp_path / "meeting"))
    child = os.fork() if rank == 0 else 0
    if rank == 0 and child == 0:
        third_rank(path, dist.barrier)
    dist.init_process_group("gradsync", init_method=f"file://{path}", rank=rank, world_size=3)
    dist.barrier()
    start = time.monotonic()
    for ranks in ([1, 2], None) if rank == 1 else (None,):
        with pytest.raises(dist.DistBackendError, match=r"rank 2 \(pid \d+ on .* ended before it"):
            dist.new_group(ranks, use_local_synchronization=ranks is not None)
    assert time.monotonic() - start < 20  # half an hour is what they may wait
    dist.destroy_process_group()
    if rank == 0:
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
