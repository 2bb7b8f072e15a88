"""Tensors in shared memory: the same results without copies, and memory that is given back."""

from __future__ import annotations

import gc
import os

import pytest
import torch

import gradsync as dist
from gradsync.base.dtypes import ReduceOp

RANKS = pytest.mark.ranks(2, 3, backend=["shm", "threads"])


@RANKS
def test_shared_tensors_give_the_same_bits_as_private_ones() -> None:
    rank = dist.get_rank()
    for count in (0, 1, 5, 4096, 5000, 300_001):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            generator = torch.Generator().manual_seed(rank)
            values = (torch.rand(count, generator=generator) * 100).to(dtype)
            private, shared = values.clone(), dist.shared_like(values)
            op = ReduceOp.MAX if dtype is torch.int64 else ReduceOp.AVG
            dist.all_reduce(private, op)
            dist.all_reduce(shared, op)
            assert torch.equal(private, shared)
            # A part of one, and a mixture of both kinds.
            mixed = dist.shared_like(values) if rank == 1 else values.clone()
            dist.all_reduce(mixed, op)
            assert torch.equal(private, mixed)
            part = dist.shared_like(values)
            dist.all_reduce(part[count // 3 :], op)
            assert torch.equal(part[count // 3 :], private[count // 3 :])
            assert torch.equal(part[: count // 3], values[: count // 3])


@RANKS
def test_every_collective_takes_shared_tensors() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    values = torch.arange(size * 30_000, dtype=torch.float32) + rank
    everyone = [torch.arange(size * 30_000, dtype=torch.float32) + r for r in range(size)]
    mine = dist.shared_like(values)
    sent = dist.shared_like(values)
    dist.broadcast(sent, 1)
    assert torch.equal(sent, everyone[1])
    whole = dist.shared_empty(size * values.numel())
    dist.all_gather_single(whole, mine)
    assert torch.equal(whole, torch.cat(everyone))
    gathered = [dist.shared_empty(values.numel()) for _ in range(size)]
    dist.all_gather(gathered, mine)
    assert torch.equal(torch.cat(gathered), whole)
    part = dist.shared_empty(30_000)
    dist.reduce_scatter_single(part, mine)
    total = torch.stack(everyone).sum(0)
    assert torch.equal(part, total.view(size, -1)[rank])
    reduced = dist.shared_like(values)
    dist.reduce(reduced, 0)
    assert torch.equal(reduced, total if rank == 0 else values)
    swapped = dist.shared_empty(values.numel())
    dist.all_to_all_single(swapped, mine)
    assert torch.equal(
        swapped.view(size, -1), torch.stack([e.view(size, -1)[rank] for e in everyone])
    )
    at_root = [dist.shared_empty(values.numel()) for _ in range(size)] if rank == 0 else None
    dist.gather(mine, at_root, 0)
    got = dist.shared_empty(values.numel())
    dist.scatter(got, at_root, 0)
    assert torch.equal(got, values)
    assert torch.equal(mine, values)


@pytest.mark.ranks(3)
def test_sub_groups_share_the_worlds_memory() -> None:
    group = dist.new_group([0, 2])
    tensor = dist.shared_like(torch.full((100_000,), float(dist.get_rank() + 1)))
    if isinstance(group, dist.ProcessGroup):
        assert group.is_shared(tensor)
        group.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((100_000,), 4.0))
        own = group.shared_zeros(50_000)
        group.all_reduce(own)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((100_000,), 10.0))


@pytest.mark.ranks(1)
def test_memory_is_given_back_and_outlives_the_group() -> None:
    def resident() -> int:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("Shmem:"))

    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    before = resident()
    big = group.shared_empty(256 * 1024 * 1024, dtype=torch.uint8)
    assert resident() - before > 200 * 1024
    big.fill_(7)
    dist.destroy_process_group(group)
    assert int(big[-1]) == 7
    del big
    gc.collect()
    assert resident() - before < 100 * 1024
    grown = dist.shared_zeros(1000, dtype=torch.int32)
    assert not grown.any()
    assert dist.shared_empty(0).numel() == 0
    assert dist.shared_empty((2, 3)).shape == (2, 3)
    with pytest.raises(dist.BackendUnavailable, match="shared memory could not be reserved"):
        dist.shared_empty(1 << 44, dtype=torch.uint8)


@pytest.mark.ranks(1)
def test_a_forked_child_frees_nothing_of_its_parents() -> None:
    tensor = dist.shared_like(torch.arange(5000))
    child = os.fork()
    if child == 0:
        del tensor
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert torch.equal(tensor, torch.arange(5000))
