"""Reductions by every name that callers give them, and the scaled sum."""

import pytest
import torch
import torch.distributed as torch_dist

import gradsync as dist
from gradsync.base.dtypes import ReduceOp
from gradsync.group.reductions import find_reduction, scaled


def test_reductions_are_found_by_every_name():
    for op in ReduceOp:
        if op is ReduceOp.PREMUL_SUM:
            continue
        theirs = getattr(torch_dist.ReduceOp, op.name)
        for name in (op, int(op), op.name, op.name.lower(), theirs, torch_dist.ReduceOp(theirs)):
            assert find_reduction(name) == (op, None), name
    assert find_reduction(torch_dist.ReduceOp.PREMUL_SUM(0.5)) == (ReduceOp.PREMUL_SUM, 0.5)


def test_what_is_no_reduction_is_refused_with_the_names_of_those_that_are():
    for wrong in ("total", 9, -1, True):
        with pytest.raises(dist.UsageError, match="SUM, AVG, PRODUCT"):
            find_reduction(wrong)
    for wrong in (None, 1.5, torch.ones(1), torch.float32, sum):
        with pytest.raises(TypeError, match="SUM, AVG, PRODUCT"):
            find_reduction(wrong)
    for bare in (ReduceOp.PREMUL_SUM, "premul_sum", torch_dist.ReduceOp.PREMUL_SUM):
        with pytest.raises(dist.UsageError, match="needs a factor"):
            find_reduction(bare)
    with pytest.raises(RuntimeError, match="only PREMUL_SUM takes a factor"):  # torch's class
        ReduceOp.SUM(2)


def test_factors_that_make_no_sense_are_refused():
    for factor in (torch.ones(2), 0.5, True, "2"):
        with pytest.raises((dist.UsageError, TypeError)):
            scaled(torch.ones(2, dtype=torch.int32), factor, "all_reduce")
    with pytest.raises(dist.UsageError, match=r"torch\.bool"):
        scaled(torch.ones(2, dtype=torch.bool), 2, "all_reduce")
    with pytest.raises(dist.UsageError, match="complex64"):
        scaled(torch.ones(2), 1j, "all_reduce")


@pytest.mark.ranks(2, 3, backend=["shm", "threads"])
def test_scaled_sum_takes_each_ranks_own_factor(rank, world_size, group):
    factors = [0.5 * (r + 1) for r in range(world_size)]
    for dtype in (torch.float64, torch.float32, torch.float16, torch.float8_e4m3fn):
        for factor in (factors[rank], torch.tensor(factors[rank])):
            op = dist.ReduceOp.PREMUL_SUM(factor)
            ones = torch.ones(5).to(dtype)
            total = torch.full((5,), sum(factors)).to(dtype).tolist()

            tensor = ones.clone()
            dist.all_reduce(tensor, op)
            assert tensor.tolist() == total

            tensor = ones.clone()
            group.reduce(tensor, 1, op)
            assert tensor.tolist() == (total if rank == 1 else ones.tolist())

            inputs = [ones.clone() for _ in range(world_size)]
            output = torch.empty_like(ones)
            dist.reduce_scatter(output, inputs, op)
            assert output.tolist() == total
            assert all(piece.tolist() == ones.tolist() for piece in inputs)

            whole = torch.ones(5 * world_size).to(dtype)
            dist.reduce_scatter_single(output, whole, op)
            assert output.tolist() == total
            assert whole.tolist() == [1.0] * whole.numel()

    whole_numbers = torch.tensor([3, 4])
    dist.all_reduce(whole_numbers, dist.ReduceOp.PREMUL_SUM(rank + 1))
    times = sum(range(1, world_size + 1))
    assert whole_numbers.tolist() == [3 * times, 4 * times]

    gaps = torch.ones(3, 2)
    dist.all_reduce(gaps[:, 0], dist.ReduceOp.PREMUL_SUM(2))
    assert gaps.tolist() == [[2.0 * world_size, 1.0]] * 3
    dist.all_reduce(gaps, torch_dist.ReduceOp.MAX)
    dist.all_reduce(gaps, "min")
    assert gaps.tolist() == [[2.0 * world_size, 1.0]] * 3


@pytest.mark.ranks(2)
def test_scaled_sum_is_not_a_sum(rank, group):
    tensor = torch.ones(3)
    op = dist.ReduceOp.PREMUL_SUM(1.0) if rank else dist.ReduceOp.SUM
    with pytest.raises(dist.MismatchError, match="PREMUL_SUM"):
        group.all_reduce(tensor, op)
    assert tensor.tolist() == [1.0] * 3
