"""The same program on Gloo and on gradsync, one after the other, in the ranks of a test."""

import gc

import torch
import torch.distributed as dist

from gradsync.stores import to_torch


def run_on(backend, store, rank, size, program, **options):
    """Return what ``program(rank, size)`` returns with torch's default group on ``backend``."""
    own = dist.PrefixStore(f"{backend}-{program.__name__}", to_torch(store))
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, **options)
    try:
        torch.manual_seed(0)
        return program(rank, size)
    finally:
        dist.destroy_process_group()
        gc.collect()  # what refers to itself keeps Gloo's sockets open


def assert_same_as_on_gloo(store, rank, size, program, **tolerance):
    """Compare the tensors that ``program(rank, size)`` returns, which must be some."""
    expected = run_on("gloo", store, rank, size, program)
    found = run_on("gradsync", store, rank, size, program)
    assert len(expected) > 0
    torch.testing.assert_close(found, expected, **tolerance or {"rtol": 0, "atol": 0})
