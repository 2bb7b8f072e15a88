"""Uneven inputs: ranks that have run out of batches shadow the others."""

import pytest
import torch
from models import ROWS, Momentum, batch, make
from torch import nn

import gradsync as dist
from gradsync.testing import assert_same_on_all_ranks


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.w


def gradients(ddp, rank, **options):
    """Return the gradient of each step: the long rank has four batches, the other two."""
    seen = []
    with ddp.join(**options):
        for step in range(4 if rank == 0 else 2):
            ddp.zero_grad()
            ddp(torch.tensor([1.0 + step])).backward()
            seen.append(ddp.module.w.grad.item())
    return seen


@pytest.mark.ranks(2)
def test_gradients_are_divided_by_all_ranks_or_by_the_active_ones(rank):
    assert gradients(dist.DistributedDataParallel(Scale()), rank) == [1, 2, 1.5, 2][: 4 - 2 * rank]
    active = dist.DistributedDataParallel(Scale())
    found = gradients(active, rank, divide_by_initial_world_size=False)
    assert found == [1, 2, 3, 4][: 4 - 2 * rank]
    calls = dist.DistributedDataParallel(Scale())
    from gradsync.ddp.engine import CallEngine

    calls.reducer.change_engine(lambda group, buckets, timeout_s: CallEngine(group))
    found = gradients(calls, rank, divide_by_initial_world_size=False)
    assert found == [1, 2, 3, 4][: 4 - 2 * rank]
    calls.zero_grad()
    calls(torch.tensor([1.0 + rank])).backward()  # afterwards all is as before
    assert calls.module.w.grad.item() == 1.5


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", ["plain", "conv", "sparse", "unused"])
def test_all_ranks_end_with_the_model_of_the_last(rank, name):
    ddp = dist.DistributedDataParallel(make(name, seed=rank))
    optim = Momentum(ddp.parameters())
    with ddp.join():
        for step in range([0, 5, 2][rank]):
            optim.zero_grad()
            with ddp.no_sync() if step == 1 else torch.enable_grad():
                out = ddp(batch(step, 2))
            out.square().mean().backward()
            if step != 1:
                optim.step()
    for tensor in ddp.state_dict().values():
        assert_same_on_all_ranks(tensor)


@pytest.mark.ranks(2)
def test_all_ranks_raise_when_asked_to(rank):
    ddp = dist.DistributedDataParallel(Scale())
    with pytest.raises(RuntimeError, match="1 of 2 ranks ran out of inputs"):
        gradients(ddp, rank, throw_on_early_termination=True)
    with pytest.raises(ValueError, match="at least one"):
        dist.Join([])
    with dist.Join([ddp], enable=False):
        ddp(torch.ones(1)).backward()


class Counter(dist.Joinable):
    """A joinable that sums a number over the ranks."""

    def __init__(self, group):
        super().__init__()
        self.group = group
        self.total = 0

    def __call__(self):
        dist.Join.notify_join_context(self)
        self.add(1)

    def add(self, own):
        count = torch.tensor([own])
        self.group.all_reduce(count)
        self.total += int(count)

    def join_hook(self, **kwargs):
        counter = self

        class Hook(dist.JoinHook):
            def main_hook(self):
                counter.add(0)

        return Hook()

    join_device = torch.device("cpu")

    @property
    def join_process_group(self):
        return self.group


@pytest.mark.ranks(2)
def test_several_joinables(rank, group):
    counter, ddp = Counter(group), dist.DistributedDataParallel(Scale())
    with dist.Join([counter, ddp]):
        for _ in range(2 + 3 * rank):
            counter()
            ddp(torch.ones(1)).backward()
    assert counter.total == 7
    with pytest.raises(ValueError, match="same process group"):
        dist.Join([counter, dist.DistributedDataParallel(Scale(), process_group=dist.new_group())])


class _Sometimes(nn.Module):
    """Has nothing to do for some inputs: its output depends on no parameter then."""

    def __init__(self):
        super().__init__()
        self.net = make("plain")

    def forward(self, x, nothing):
        if nothing is None:
            return self.net(x).square().sum()
        return torch.tensor(0.0, requires_grad=True) if nothing == "leaf" else 2 * x.sum()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("nothing", ["leaf", "result"])
def test_a_rank_whose_output_depends_on_no_parameter(rank, nothing):
    ddp, alone = dist.DistributedDataParallel(_Sometimes()), _Sometimes()
    for step in range(7):
        x = batch(step + 9 * rank, ROWS).requires_grad_()
        idle = nothing if step in (0, 3, 4) and rank == step % 2 else None
        for model in (ddp, alone):
            model.zero_grad()
            model(x, idle).backward()
            torch.autograd.grad(model(x, None), x)  # makes no calls
        for p, q in zip(ddp.parameters(), alone.parameters(), strict=True):
            mean = torch.zeros_like(q) if q.grad is None else q.grad
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            torch.testing.assert_close(p.grad, mean)
