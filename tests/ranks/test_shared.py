"""Tensors in shared memory: the same results without copies, and memory that is given back."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

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


# Each gets this rank's tensor, one like it for every rank, and what makes an output of that kind,
# and returns what it filled.
Make = Callable[[torch.Tensor], torch.Tensor]
Tensors = list[torch.Tensor]


def _broadcast(mine: torch.Tensor, _pieces: Tensors, _make: Make) -> Tensors:
    dist.broadcast(mine, 1)
    return [mine]


def _reduce(mine: torch.Tensor, _pieces: Tensors, _make: Make) -> Tensors:
    dist.reduce(mine, 1)
    return [mine]


def _all_gather(mine: torch.Tensor, pieces: Tensors, make: Make) -> Tensors:
    outputs = [make(piece) for piece in pieces]
    dist.all_gather(outputs, mine)
    return outputs


def _gather(mine: torch.Tensor, pieces: Tensors, make: Make) -> Tensors:
    outputs = [make(piece) for piece in pieces] if dist.get_rank() == 1 else None
    dist.gather(mine, outputs, 1)
    return outputs or []


def _scatter(mine: torch.Tensor, pieces: Tensors, make: Make) -> Tensors:
    output = make(mine)
    dist.scatter(output, pieces if dist.get_rank() == 1 else None, 1)
    return [output]


def _reduce_scatter(mine: torch.Tensor, pieces: Tensors, make: Make) -> Tensors:
    output = make(mine)
    dist.reduce_scatter(output, pieces)
    return [output]


def _all_to_all(_mine: torch.Tensor, pieces: Tensors, make: Make) -> Tensors:
    outputs = [make(piece) for piece in pieces]
    dist.all_to_all(outputs, pieces)
    return outputs


COLLECTIVES = (_broadcast, _reduce, _all_gather, _gather, _scatter, _reduce_scatter, _all_to_all)


@RANKS
def test_every_collective_gives_the_same_with_shared_tensors() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()

    def run(collective: Callable[..., Tensors], count: int, make: Make) -> tuple[Tensors, Tensors]:
        generator = torch.Generator().manual_seed(rank)
        inputs = [make(torch.rand(count, generator=generator)) for _ in range(size + 1)]
        return collective(inputs[0], inputs[1:], make), inputs

    # Staged in one round, where they are or in many rounds.
    for count in (100, 20_000, 300_001):
        for collective in COLLECTIVES:
            expected, untouched = run(collective, count, torch.clone)
            for sharing in (range(size), [1], [0]):
                make = dist.shared_like if rank in sharing else torch.clone
                results, inputs = run(collective, count, make)
                for wanted, result in zip(expected + untouched, results + inputs, strict=True):
                    assert torch.equal(wanted, result), (collective.__name__, count, sharing)


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
    for wrong in (-1, "2", (2, None)):
        with pytest.raises(dist.UsageError, match="a shape is made of numbers"):
            dist.shared_empty(wrong)
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
