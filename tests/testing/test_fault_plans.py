"""Fault plans: parsing them, and carrying each kind out at the very call it names."""

import os
import time

import pytest
import torch

import gradsync as dist
from gradsync.errors import UsageError
from gradsync.testing import faults


def test_plan_is_data():
    fault = faults.kill(rank=1, at="all_reduce#3")
    assert (fault.kind, fault.rank, fault.op, fault.number) == ("kill", 1, "all_reduce", 3)
    assert fault.is_deadly
    assert not faults.delay(rank=0, at="*#1", seconds=1).is_deadly
    assert fault == faults.kill(rank=1, at="all_reduce#3")


@pytest.mark.parametrize("at", ["all_reduce", "all_reduce#0", "#3", "AllReduce#1", "x#1.5"])
def test_bad_place_is_refused_with_an_example(at):
    with pytest.raises(UsageError, match="all_reduce#3"):
        faults.kill(rank=0, at=at)
    with pytest.raises(UsageError, match="negative"):
        faults.kill(rank=-1, at="barrier#1")


@pytest.mark.ranks(
    2,
    backend=["shm", "threads"],
    faults=[faults.raise_(rank=1, at="barrier#2", error=ValueError("as planned"))],
)
def test_raise_happens_at_that_call_and_no_other(rank):
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    if rank == 1:
        with pytest.raises(ValueError, match="as planned"):
            dist.barrier()
    dist.barrier()


@pytest.mark.ranks(
    2, backend=["shm", "threads"], faults=[faults.delay(rank=0, at="*#2", seconds=0.2)]
)
def test_delay_holds_the_others_up():
    dist.barrier()
    start = time.monotonic()
    dist.all_reduce(torch.ones(1))
    assert time.monotonic() - start >= 0.19


@pytest.mark.ranks(2, faults=[faults.kill(rank=1, at="all_reduce#1", signal=15)])
def test_signal_is_real_and_chosen():
    with pytest.raises(dist.PeerLostError, match="SIGTERM"):
        dist.all_reduce(torch.ones(1))


@pytest.mark.ranks(2, faults=[faults.drop_connection(rank=1, at="barrier#1")])
def test_store_survives_a_cut_connection(rank, store):
    before = store.add("count", 1)
    dist.barrier()
    assert store.add("count", 1) > before
    dist.barrier()
    assert store.get("count") == b"4"


@pytest.mark.ranks(2, backend=["threads"], faults=[faults.kill(rank=1, at="barrier#1")])
def test_death_is_skipped_on_threads_which_cannot_die_alone():
    raise AssertionError("never reached")


@pytest.mark.ranks(2, faults=[faults.exit_(rank=0, at="barrier#1", code=5)])
def test_survivor_runs_on_after_the_planned_death(rank):
    assert rank in (0, 1)
    with pytest.raises(dist.PeerLostError, match="exited with code 5"):
        dist.barrier()
    assert os.getpid()
