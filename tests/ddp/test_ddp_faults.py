"""A rank that is killed before, in or after any bucket is an error on the others, not a hang."""

import os
import signal
import time

import pytest
from models import batch
from torch import nn

import gradsync as dist
from gradsync.ddp.engine import CallEngine
from gradsync.testing import faults

STEP = 3  # in which the rank dies: buckets have been planned anew, and overlap


def train(rank, calls, layer=None, late=False):
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    step = 0

    def die(_):
        if rank == 1 and step == STEP:
            os.kill(os.getpid(), signal.SIGKILL)

    param = None if layer is None else model[layer].weight
    if param is not None and not late:
        param.register_post_accumulate_grad_hook(die)  # before the bucket is launched
    ddp = dist.DistributedDataParallel(model, bucket_cap_mb=0)
    if calls:
        ddp.reducer.change_engine(lambda group, buckets, timeout_s: CallEngine(group))
    for step in range(STEP + 2):
        ddp.zero_grad()
        out = ddp(batch(step, 2))
        if param is not None and late and step == STEP:
            param.register_post_accumulate_grad_hook(die)  # after it
        out.sum().backward()


@pytest.mark.ranks(3, faults=[faults.kill(rank=1, at="finish_buckets#99")])
@pytest.mark.parametrize(
    ("calls", "layer", "late"), [(False, 2, False), (False, 0, True), (True, 1, True)]
)
def test_killed_around_a_bucket(rank, calls, layer, late):
    start = time.monotonic()
    with pytest.raises(dist.PeerLostError, match="SIGKILL") as caught:
        train(rank, calls, layer, late)
    assert caught.value.ranks == (1,)
    assert time.monotonic() - start < 20


@pytest.mark.ranks(2, faults=[faults.kill(rank=1, at=f"finish_buckets#{STEP + 1}")])
def test_killed_at_the_end_of_backward(rank):
    with pytest.raises(dist.PeerLostError, match="SIGKILL"):
        train(rank, calls=False)


@pytest.mark.ranks(2, faults=[faults.kill(rank=1, at="broadcast#2")])
def test_killed_while_planning():
    with pytest.raises(dist.PeerLostError, match="SIGKILL"):
        train(0, calls=False)


@pytest.mark.ranks(2, faults=[faults.delay(rank=1, at="finish_buckets#2", seconds=0.5)])
def test_late_rank_is_waited_for(rank):
    train(rank, calls=False)


@pytest.mark.ranks(2)
def test_error_after_something_was_sent_is_not_forgotten(rank):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    ddp = dist.DistributedDataParallel(model, bucket_cap_mb=0)
    for _ in range(2):
        ddp(batch(0, 2)).sum().backward()

    def fail(_):
        raise ArithmeticError("bad luck")

    model[0].weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        ddp(batch(0, 2)).sum().backward()
    with pytest.raises(dist.DistError, match="cut short by an error after it had sent gradients"):
        ddp(batch(0, 2))
    assert ddp._get_ddp_logging_data()["has_error"] == 1
