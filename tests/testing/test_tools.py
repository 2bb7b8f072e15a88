"""Assertions over ranks, the sequencer, the virtual clock, and ranks as threads."""

import threading
import time

import pytest
import torch

import gradsync as dist
from gradsync.base.deadline import Deadline
from gradsync.errors import UsageError
from gradsync.stores.hash import HashStore
from gradsync.testing import (
    Sequencer,
    VirtualClock,
    assert_all_ranks,
    assert_same_on_all_ranks,
    gather_for_assert,
    run_threads,
)

BOTH = pytest.mark.ranks(3, backend=["shm", "threads"])


@BOTH
def test_gather_brings_every_value_to_every_rank(rank):
    values = gather_for_assert({"rank": rank, "pad": "x" * (rank * 1000)})
    assert [value["rank"] for value in values] == [0, 1, 2]


@BOTH
def test_condition_that_fails_on_one_rank_fails_on_all_by_name(rank):
    assert_all_ranks(True)
    with pytest.raises(AssertionError, match=r"false on rank 1 of 3: the loss is nan"):
        assert_all_ranks(rank != 1, "the loss is nan")
    dist.barrier()  # nobody is ahead of anybody


@BOTH
def test_tensors_are_compared_to_the_bit(rank):
    tensor = torch.tensor([1.0, float("nan"), 3.0])
    assert_same_on_all_ranks(tensor)
    tensor[2] += 1e-6 * (rank == 2)
    with pytest.raises(AssertionError, match="rank 0 and rank 2 differ, first at flat index 2"):
        assert_same_on_all_ranks(tensor)
    with pytest.raises(AssertionError, match=r"rank 1 has torch\.float32\[4\]"):
        assert_same_on_all_ranks(torch.zeros(3 + (rank == 1)))
    with pytest.raises(AssertionError, match="flat index 0"):
        assert_same_on_all_ranks(torch.tensor([-0.0 if rank == 1 else 0.0]))


@BOTH
def test_sequencer_forces_the_order(rank, store, world_size):
    order = Sequencer(store)
    for turn in range(6):
        if turn % world_size == world_size - 1 - rank:
            with order(turn):
                store.append("log", str(rank))
    store.barrier("end", world_size)
    assert store.get("log") == b"210210"


def test_sequencer_goes_on_after_an_error():
    order = Sequencer(HashStore(), timeout=1)
    with pytest.raises(ZeroDivisionError), order(0):
        raise ZeroDivisionError
    with order(1):
        pass


def test_clock_jumps_when_all_sleep():
    clock = VirtualClock(participants=2)
    woken = []

    def sleeper(name: str, seconds: float) -> None:
        clock.sleep(seconds)
        woken.append((name, clock()))
        clock.leave()

    threads = [
        threading.Thread(target=sleeper, args=args) for args in (("late", 7200.0), ("early", 60.0))
    ]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert woken == [("early", 60.0), ("late", 7200.0)]
    assert time.monotonic() - start < 5


def test_clock_drives_deadlines():
    clock = VirtualClock()
    deadline = Deadline(10.0, clock=clock)
    clock.advance(9.5)
    assert deadline.remaining() == 0.5
    clock.sleep(0.5)
    assert deadline.expired()
    with pytest.raises(UsageError, match="backwards"):
        clock.advance(-1)


def test_threads_return_results_and_errors():
    def body(me):
        dist.barrier()
        if me.rank == 1:
            raise ValueError("mine")
        dist.barrier()

    ranks = run_threads(3, body)
    assert isinstance(ranks[1].error, ValueError)
    assert all(isinstance(ranks[r].error, dist.PeerLostError) for r in (0, 2))


def test_thread_that_hangs_is_shown_with_its_stack_and_the_others_are_released():
    go_on = threading.Event()

    def body(me):
        if me.rank == 1:
            go_on.wait(10)
        else:
            dist.barrier()

    ranks = run_threads(2, body, timeout_s=0.3)
    assert "go_on.wait(10)" in ranks[1].stack
    assert "dist.barrier()" in ranks[0].stack
    go_on.set()
    for me in ranks:
        assert me.done.wait(5)
    assert isinstance(ranks[0].error, dist.DistBackendError)


def test_threads_have_groups_of_their_own_and_the_process_keeps_its():
    dist.init_process_group()
    try:
        ranks = run_threads(2, lambda me: (dist.get_rank(), dist.get_world_size()))
        assert [me.result for me in ranks] == [(0, 2), (1, 2)]
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()
