"""Parameters that are frozen between steps, and gradients of another type than theirs."""

import copy

import pytest
import torch
from models import ROWS, batch, chain
from torch import nn

import gradsync as dist
from gradsync.ddp.comm_hooks import allreduce_hook
from gradsync.ddp.engine import CallEngine
from gradsync.testing import assert_same_on_all_ranks


@pytest.mark.ranks(2)
@pytest.mark.parametrize("steps", [1, 3])  # before and after buckets are planned by arrival
@pytest.mark.parametrize("calls", [False, True])
def test_frozen_on_one_rank_only_is_told_on_both(rank, steps, calls):
    ddp = dist.DistributedDataParallel(chain())
    if calls:
        ddp.reducer.change_engine(lambda group, buckets, timeout_s: CallEngine(group))
    for step in range(steps):
        ddp(batch(step, ROWS)).sum().backward()
    if rank == 1:
        ddp.module[0].weight.requires_grad_(False)
    told = r"changed here of: 0\.weight\. Freeze" if rank == 1 else "may have frozen or converted"
    with pytest.raises(dist.MismatchError, match=told):
        ddp(batch(0, ROWS)).sum().backward()


@pytest.mark.ranks(2)
def test_different_ones_frozen_are_not_averaged_with_each_other(rank):
    twins = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    ddp = dist.DistributedDataParallel(twins)
    ddp(batch(0, ROWS)).sum().backward()
    twins[rank].requires_grad_(False)  # the same sizes are left
    with pytest.raises(dist.UsageError, match=r"0\.weight: .*, frozen\) on rank 0 and .* freeze"):
        ddp(batch(0, ROWS)).sum().backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("everywhere", [False, True])
def test_what_was_accumulated_before_freezing_is_averaged(rank, everywhere):
    ddp, alone = dist.DistributedDataParallel(chain()), chain()
    frozen = ddp.module[0].weight
    for step in range(3):
        frozen.requires_grad_(True)
        if step > 0:
            ddp(batch(step, ROWS)).sum().backward()
        for model in (ddp, alone):
            model.zero_grad()
        if everywhere or rank == 1:  # the other rank has nothing of its own
            with ddp.no_sync():
                ddp(batch(step + 9 * rank, ROWS)).square().sum().backward()
            alone(batch(step + 9 * rank, ROWS)).square().sum().backward()
        mean = torch.zeros_like(frozen) if alone[0].weight.grad is None else alone[0].weight.grad
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        frozen.requires_grad_(False)
        first = ddp(batch(step + rank, ROWS)).sum()
        (first + ddp(batch(rank, ROWS)).sum()).backward()
        torch.testing.assert_close(frozen.grad, mean)
        for param in ddp.parameters():
            assert_same_on_all_ranks(param.grad)
        ddp(batch(rank, ROWS)).sum().backward()  # once is enough
        torch.testing.assert_close(frozen.grad, mean)


class Parts(nn.Module):
    """Uses the parameters that it is told to."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(2)) for _ in range(3))

    def forward(self, names):
        return sum(getattr(self, name).sum() for name in names)


@pytest.mark.ranks(2)
def test_what_was_accumulated_after_unfreezing_is_averaged(rank):
    ddp = dist.DistributedDataParallel(Parts())
    for _ in range(3):
        ddp.zero_grad()
        ddp.module.b.requires_grad_(False)
        ddp("a").backward()
        ddp.module.b.requires_grad_(True)
        if rank == 1:
            with ddp.no_sync():
                ddp("b").backward()
        ddp("a").backward()
        assert ddp.module.b.grad.tolist() == [0.5, 0.5]


@pytest.mark.ranks(2)
def test_gradients_that_were_accumulated_and_dropped_are_none(rank):
    ddp = dist.DistributedDataParallel(Parts())
    for _ in range(3):
        with ddp.no_sync():
            ddp("b").backward()
        ddp.zero_grad()
        ddp("a").backward()  # c has no gradient either
        assert ddp.module.a.grad.tolist() == [1.0, 1.0]
        assert ddp.module.b.grad is None
        assert ddp.module.c.grad is None


@pytest.mark.ranks(2)
@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch before 2.10")
@pytest.mark.parametrize("hook", [None, allreduce_hook])
def test_gradients_of_another_type_than_their_parameters(rank, hook):
    alone = chain().bfloat16()
    ddp = dist.DistributedDataParallel(copy.deepcopy(alone))
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    for step in range(6):
        if step == 2:  # some of them, after some training
            for param in [*ddp.module[1:].parameters(), *alone[1:].parameters()]:
                param.grad = None
                param.grad_dtype = torch.float32
        for model in (ddp, alone):
            model.zero_grad(set_to_none=step != 4)
            model(batch(step + 9 * rank, ROWS).bfloat16()).float().square().sum().backward()
        for ours, theirs in zip(ddp.parameters(), alone.parameters(), strict=True):
            assert ours.grad.dtype == theirs.grad_dtype
            mean = theirs.grad.float()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            torch.testing.assert_close(ours.grad, mean.to(theirs.grad_dtype))
