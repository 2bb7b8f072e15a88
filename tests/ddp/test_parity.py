"""Training on ranks gives what one process gives on the whole batch."""

import pytest
import torch
from models import MODELS, ROWS, make, train

import gradsync as dist
from gradsync.testing import assert_same_on_all_ranks

OPTIONS = {
    "defaults": {},
    "flags": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "static": {"static_graph": True, "bucket_cap_mb": 0.0001},
    "tiny buckets": {"bucket_cap_mb": 0},
}


@pytest.mark.ranks(2, 3, may_leave=["environment"])
@pytest.mark.parametrize("name", MODELS)
def test_same_as_one_process(rank, world_size, name):
    for options in OPTIONS.values():
        for set_to_none in (True, False):
            whole, copy = make(name), make(name, seed=rank + 2)
            if rank == 0:
                copy = make(name)
            rows = ROWS * world_size
            train(whole, whole.parameters(), rows, slice(None), set_to_none=set_to_none)
            ddp = dist.DistributedDataParallel(copy, **options)
            part = slice(rank * ROWS, (rank + 1) * ROWS)
            train(ddp, ddp.parameters(), rows, part, set_to_none=set_to_none)
            for (key, ours), theirs in zip(
                copy.named_parameters(), whole.parameters(), strict=True
            ):
                torch.testing.assert_close(ours, theirs, msg=lambda m, k=key: f"{k}: {m}")
                assert_same_on_all_ranks(ours.detach())
