"""Under torch's DDP with Gloo the weights come out the same, and checkpoints change hands."""

import gc

import pytest
import torch
from models import ROWS, make, train

import gradsync as dist
from gradsync.testing import assert_same_on_all_ranks

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}
CASES = [
    ("plain", {}, "adamw"),
    ("plain", {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0002}, "sgd"),
    ("conv", {"static_graph": True}, "sgd"),
    ("attention", {}, "adamw"),
    ("unused", {"find_unused_parameters": True}, "adamw"),
    ("by_rank", {"find_unused_parameters": True}, "sgd"),
    ("mixed", {"gradient_as_bucket_view": True}, "sgd"),
    ("checkpoint", {}, "adamw"),
    ("reentrant", {"static_graph": True}, "sgd"),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.ranks(2, may_leave=["environment", "thread", "socket"])
def test_same_as_torch(rank, world_size, shared, tmp_path):
    folder = shared(lambda: str(tmp_path))
    store = torch.distributed.FileStore(f"{folder}/store", world_size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    part = slice(rank * ROWS, (rank + 1) * ROWS)
    try:
        for name, options, optimizer in CASES:
            wraps = torch.nn.parallel.DistributedDataParallel, dist.DistributedDataParallel
            theirs, ours = (wrap(make(name), **options) for wrap in wraps)
            make_optimizer = OPTIMIZERS[optimizer]
            for ddp in (theirs, ours):
                train(ddp, ddp.parameters(), 2 * ROWS, part, optimizer=make_optimizer)
            for (key, a), b in zip(
                ours.state_dict().items(), theirs.state_dict().values(), strict=True
            ):
                torch.testing.assert_close(a, b, msg=lambda m, n=name, k=key: f"{n} {k}: {m}")
                assert_same_on_all_ranks(a)
            # Each loads what the other saved, and goes on to the same weights.
            ours.load_state_dict(theirs.state_dict())
            theirs.load_state_dict(ours.state_dict())
            for ddp in (theirs, ours):
                train(ddp, ddp.parameters(), 2 * ROWS, part, 1, make_optimizer, start=9)
            torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    finally:
        # torch's reducer must not be the last to hold its Gloo group: it would end the group's
        # threads while it has Python's lock, which one of them may be waiting for.
        theirs = ours = ddp = None
        gc.collect()
        torch.distributed.destroy_process_group()
