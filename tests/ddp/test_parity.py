"""Training on ranks gives what one process gives on the whole batch."""

import pytest
import torch
from models import MODELS, ROWS, batch, make, train

import gradsync as dist
from gradsync.ddp.engine import BoardEngine, CallEngine
from gradsync.testing import assert_same_on_all_ranks

OPTIONS = {
    "defaults": {},
    "flags": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "static": {"static_graph": True, "bucket_cap_mb": 0.0001},
    "tiny buckets": {"bucket_cap_mb": 0},
}


def compare(name, rank, size, options, set_to_none, engine):
    """Train both ways and compare the weights; rank 0's model is the one that counts."""
    whole, copy = make(name), make(name, seed=1 + rank)
    rows, part = ROWS * size, slice(rank * ROWS, (rank + 1) * ROWS)
    train(whole, whole.parameters(), rows, slice(None), set_to_none=set_to_none)
    ddp = dist.DistributedDataParallel(copy, **options)
    if engine is CallEngine:
        ddp.reducer.change_engine(lambda group, buckets, timeout_s: CallEngine(group))
    assert type(ddp.reducer._engine) is engine
    train(ddp, ddp.parameters(), rows, part, set_to_none=set_to_none)
    for (key, ours), theirs in zip(copy.named_parameters(), whole.parameters(), strict=True):
        told = f"{name} {options} {engine.__name__} {key}"
        torch.testing.assert_close(ours, theirs, msg=lambda m, t=told: f"{t}: {m}")
        assert_same_on_all_ranks(ours.detach())


@pytest.mark.ranks(2, may_leave=["environment"])
def test_same_as_one_process(rank, world_size):
    for name in MODELS:
        for number, options in enumerate(OPTIONS.values()):
            compare(name, rank, world_size, options, number % 2 == 0, BoardEngine)
        for set_to_none in (True, False):
            compare(name, rank, world_size, {}, set_to_none, CallEngine)


@pytest.mark.ranks(3, may_leave=["environment"])
def test_same_as_one_process_on_an_odd_number_of_ranks(rank, world_size):
    for name in MODELS:
        for number, engine in enumerate((BoardEngine, CallEngine)):
            compare(name, rank, world_size, OPTIONS["static"], number == 0, engine)


@pytest.mark.ranks(2, may_leave=["environment"])
def test_more_forwards_of_reentrant_checkpoints_in_one_backward_than_at_first(rank):
    ddp = dist.DistributedDataParallel(make("reentrant"), bucket_cap_mb=0)
    alone = make("reentrant")
    for step in range(6):
        for model in (ddp, alone):
            model.zero_grad()
            other = model(batch(step, ROWS))  # whose backward may never come
            outs = [model(batch(step + k + 9 * rank, ROWS)) for k in range(1 + step % 3)]
            sum(out.square().sum() for out in outs + [other] * (step == 4)).backward()
        for ours, theirs in zip(ddp.parameters(), alone.parameters(), strict=True):
            dist.all_reduce(theirs.grad, dist.ReduceOp.AVG)
            torch.testing.assert_close(ours.grad, theirs.grad)
