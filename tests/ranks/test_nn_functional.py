"""Collectives with gradients: the Jacobian of all ranks together, and beside torch's."""

import importlib
import warnings

import pytest
import torch
import torch.distributed as torch_dist
from torch.autograd import Function, gradcheck, gradgradcheck

import gradsync as dist
from gradsync.nn import functional
from gradsync.stores import to_torch


class Enter(Function):
    """From what all ranks hold to each rank's own row of it; adjoint: Leave.

    With both around it, a function on ranks is one function of one tensor that every rank
    computes, so that gradcheck sees the Jacobian of all ranks' outputs by all ranks' inputs.
    """

    @staticmethod
    def forward(ctx, group, whole):
        ctx.group = group
        return whole[group.rank()].clone()

    @staticmethod
    def backward(ctx, grad):
        return None, Leave.apply(ctx.group, grad)


class Leave(Function):
    @staticmethod
    def forward(ctx, group, mine):
        ctx.group = group
        rows = [torch.empty_like(mine) for _ in range(group.size())]
        group.all_gather(rows, mine)
        return torch.stack(rows)

    @staticmethod
    def backward(ctx, grad):
        return None, Enter.apply(ctx.group, grad)


def flat(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def cases(size: int, rank: int) -> dict:
    """Name → function of a rank's vector of ``3 * size`` numbers."""
    f, ops = functional, dist.ReduceOp
    lengths = [2 * size + 1, *[1] * (size - 1)]
    sent = [(2 * rank + to) % 3 for to in range(size)]
    received = [(2 * sender + rank) % 3 for sender in range(size)]

    def exchanged(x):
        whole = x[: sum(sent)]
        return f.all_to_all_single(x.new_empty(sum(received)), whole, received, sent)

    named = {
        f"all_reduce {op.name}": (lambda x, op=op: f.all_reduce(x, op))
        for op in ops
        if op.name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
    }
    named |= {
        f"reduce {op.name}": (lambda x, op=op: f.reduce(x, size - 1, op))
        for op in ops
        if op.name in ("SUM", "AVG", "PRODUCT", "MAX")
    }
    named |= {
        f"reduce_scatter {op.name}": (
            lambda x, op=op: f.reduce_scatter(x.new_empty(3), list(x.view(size, 3)), op)
        )
        for op in ops
        if op.name in ("SUM", "AVG", "MIN")
    }
    named |= {
        f"reduce_scatter_single {op.name}": (
            lambda x, op=op: f.reduce_scatter_single(x.new_empty(3), x, op)
        )
        for op in ops
        if op.name in ("SUM", "AVG", "PRODUCT")
    }
    return named | {
        "all_reduce PREMUL_SUM": lambda x: f.all_reduce(x, ops.PREMUL_SUM(rank + 0.5)),
        "reduce_scatter uneven": lambda x: f.reduce_scatter(
            x.new_empty(lengths[rank]), x.split(lengths)
        ),
        "broadcast": lambda x: f.broadcast(x, 1),
        "all_gather": lambda x: flat(*f.all_gather(x.view(3, size).t())),
        "all_gather_single": lambda x: f.all_gather_single(x.view(size, 3)),
        "gather": lambda x: flat(*f.gather(x, 1)),
        "scatter": lambda x: f.scatter(x.view(size, 3).unbind(0), 1),
        "all_to_all": lambda x: flat(
            *f.all_to_all([x.new_empty(3) for _ in range(size)], x.view(size, 3).unbind(0))
        ),
        "all_to_all_single": lambda x: f.all_to_all_single(x.new_empty(3 * size), x),
        "all_to_all_single uneven": exchanged,
    }


@pytest.mark.ranks(2, 3, backend=["threads"])
def test_gradients_are_those_of_the_sum_of_all_losses(rank, world_size, group):
    generator = torch.Generator().manual_seed(7)
    whole = torch.randn(world_size, 3 * world_size, dtype=torch.float64, generator=generator)
    whole.requires_grad_()
    for name, function in cases(world_size, rank).items():

        def together(w, function=function):
            mine = function(Enter.apply(group, w).clone()).reshape(-1)
            room = mine.new_zeros(3 * world_size**2 - mine.numel())  # all ranks give as many
            return Leave.apply(group, torch.cat([mine, room]))

        assert gradcheck(together, whole, fast_mode=True), name
        weights = torch.ones_like(together(whole)).cumsum(1).requires_grad_()
        assert gradgradcheck(together, whole, weights, fast_mode=True), name


@pytest.mark.ranks(2, may_leave=["thread", "socket"])
def test_results_and_gradients_are_torchs_where_those_are_right(rank, world_size, store):
    torch_dist.init_process_group("gloo", store=to_torch(store), rank=rank, world_size=world_size)
    theirs = importlib.import_module("torch.distributed.nn.functional")
    x = torch.arange(6.0) + 10 * rank
    weight = torch.arange(6.0) + 1 + rank
    calls = {
        "all_reduce": lambda f, t: f.all_reduce(t),
        "broadcast": lambda f, t: f.broadcast(t, 1),
        "all_gather": lambda f, t: flat(*f.all_gather(t))[:6],
        "all_to_all_single": lambda f, t: f.all_to_all_single(torch.empty(6), t),
        "scatter": lambda f, t: f.scatter([t, 2 * t], 0),
        "gather": lambda f, t: flat(*f.gather(t, 0))[:6],
        "reduce_scatter": lambda f, t: f.reduce_scatter(torch.empty(6), [t, 3 * t]),
    }
    warnings.simplefilter("ignore", FutureWarning)  # torch's are on their way out
    for name, call in calls.items():
        seen = []
        for module in (functional, theirs):
            leaf = x.clone().requires_grad_()
            result = call(module, leaf)
            (result * weight).sum().backward()
            seen.append((result.detach(), leaf.grad))
        assert torch.equal(seen[0][0], seen[1][0]), name
        assert torch.equal(seen[0][1], seen[1][1]), name
    torch_dist.destroy_process_group()


@pytest.mark.ranks(3, backend=["shm", "threads"])
def test_whoever_needs_no_gradient_takes_part_in_the_way_back(rank, world_size):
    mine = torch.ones(2, requires_grad=rank == 1)
    result = functional.all_reduce(mine)
    assert result.requires_grad
    (result * (rank + 1)).sum().backward()
    assert (mine.grad is None) == (rank != 1)
    assert rank != 1 or mine.grad.tolist() == [6.0, 6.0]
    assert not functional.all_reduce(mine.detach()).requires_grad
    with torch.no_grad():
        assert not functional.all_reduce(mine).requires_grad


@pytest.mark.ranks(2, backend=["shm", "threads"])
def test_gradients_may_be_expanded_or_have_gaps_and_outputs_unused(rank, group):
    x = torch.ones(2, 3, requires_grad=True)
    functional.gather(x, 0)[1].sum().backward()  # the gradient is expanded from one number
    assert x.grad.tolist() == ([[1.0] * 3] * 2 if rank == 1 else [[0.0] * 3] * 2)
    x.grad = None
    functional.all_gather(x)[0].t()[:, :1].sum().backward()  # the other output is of no use
    assert x.grad.tolist() == ([[2.0] * 3, [0.0] * 3] if rank == 0 else [[0.0] * 3] * 2)
    output = torch.empty(3)
    result = functional.reduce_scatter_single(output, x.reshape(-1))
    assert torch.equal(output, result)
    assert result.requires_grad
    assert not output.requires_grad
    assert torch.equal(
        functional.all_reduce(torch.tensor([rank + 1, 2]), "product"), torch.tensor([2, 4])
    )
    with pytest.raises(TypeError):
        functional.broadcast(1.0, 0)
    with pytest.raises(dist.UsageError):
        functional.all_reduce(x, "band")
    assert dist.nn.functional is functional
