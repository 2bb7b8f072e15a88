"""When gradients travel, and what they are afterwards."""

import copy
import pickle
import weakref

import pytest
import torch
from models import ROWS, Unused, batch, make
from torch import nn

import gradsync as dist
from gradsync.ddp.bucket import Bucket
from gradsync.testing import assert_same_on_all_ranks, gather_for_assert


def leaf(value: float, grad: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value]), requires_grad=grad)


class Scale(nn.Module):
    """Its output is x·w, so the gradient of w is the sum of x."""

    def __init__(self):
        super().__init__()
        self.w = leaf(1.0)

    def forward(self, x):
        return x * self.w


def scale() -> tuple[dist.DistributedDataParallel, nn.Parameter]:
    ddp = dist.DistributedDataParallel(Scale())
    return ddp, ddp.module.w


def grads(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in module.parameters()]


@pytest.mark.ranks(2)
def test_the_forward_decides_whether_its_backward_synchronises(rank):
    x = torch.tensor([1.0 + 2 * rank])  # the mean over ranks is 2
    ddp, w = scale()
    for _ in range(3):  # before and after the buckets are planned anew
        w.grad = None
        with ddp.no_sync():
            out = ddp(x)
        out.backward()
        assert w.grad.item() == x.item()  # of this rank alone
        out = ddp(x)
        with ddp.no_sync():
            out.backward()
        assert w.grad.item() == 4.0  # what was accumulated has come along


@pytest.mark.ranks(2)
def test_no_order_of_forwards_and_backwards_lets_the_ranks_diverge(rank):
    x = torch.tensor([1.0 + 2 * rank])
    ddp, w = scale()
    for _ in range(3):
        w.grad = None
        first, second = ddp(x), ddp(10 * x)
        (first + second).backward()
        assert w.grad.item() == 22.0  # two forwards, one backward
        w.grad = None
        first, second = ddp(x), ddp(10 * x)
        first.backward()
        second.backward()
        assert w.grad.item() == 22.0  # two of each
        w.grad = None
        out = ddp(x)
        out.backward(retain_graph=True)
        out.backward()
        assert w.grad.item() == 4.0  # a second backward of the same graph
        w.grad = None
        out = ddp(x)
        with ddp.no_sync():
            other = ddp(10 * x)
        out.backward()  # of a forward that synchronises, whatever came after it
        assert w.grad.item() == 2.0
        other.backward()
        assert w.grad.item() == 2.0 + 10 * x.item()


@pytest.mark.ranks(2)
def test_buffers_are_synchronised_between_two_forwards_of_one_backward(rank):
    ddp = dist.DistributedDataParallel(nn.Sequential(nn.Linear(6, 2), nn.BatchNorm1d(2)))
    for _ in range(2):
        first, second = ddp(batch(rank, ROWS)), ddp(batch(rank + 2, ROWS))
        (first + second).square().sum().backward()
        assert_same_on_all_ranks(torch.cat([grad.flatten() for grad in grads(ddp)]))


@pytest.mark.ranks(2)
def test_autograd_grad_stays_local_and_upsets_nothing(rank):
    x = torch.tensor([1.0 + 2 * rank])
    ddp, w = scale()
    for _ in range(3):
        w.grad = None
        out = ddp(x)
        (local,) = torch.autograd.grad(out, w, retain_graph=True)
        assert local.item() == x.item()
        assert w.grad is None
        out.backward()
        assert w.grad.item() == 2.0
        # A penalty on the gradient: d/dw (x·w·x)² = 2·x⁴·w, and the mean of x⁴ is 41.
        w.grad = None
        inputs = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(ddp(inputs) * inputs, inputs, create_graph=True)
        (slope / 2).square().backward()
        assert w.grad.item() == pytest.approx((1 + 9) / 2 * 2)
    with pytest.raises(dist.UsageError, match="create_graph=True"):
        ddp(x).square().backward(create_graph=True)
    w.grad = None
    ddp(x).backward()  # nothing had been sent: go on
    assert w.grad.item() == 2.0


@pytest.mark.ranks(2)
def test_buckets_that_are_planned_anew_never_exist_twice(rank, monkeypatch):
    alive: weakref.WeakSet[Bucket] = weakref.WeakSet()
    most = 0

    class Counted(Bucket):
        def __init__(self, *args):
            nonlocal most
            super().__init__(*args)
            alive.add(self)
            most = max(most, len(alive))

    monkeypatch.setattr("gradsync.ddp.reducer.Bucket", Counted)
    torch.manual_seed(0)
    used_first = nn.Linear(4, 4)  # registered last: gradients do not come in the order planned
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), used_first])
    layers.forward = lambda x: layers[1](layers[0](layers[2](x)))
    ddp = dist.DistributedDataParallel(layers, bucket_cap_mb=1e-6)
    before = ddp._replica.reducer.plan
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.ones(1, 4)).sum().backward()
    assert ddp._replica.reducer.plan != before
    assert most == len(ddp._replica.reducer.buckets) == 6


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = leaf(1.0), leaf(1.0), leaf(1.0)

    def forward(self, x, names):
        return sum(x * getattr(self, name) for name in names)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("cap", [None, 0])
def test_parameters_without_a_gradient(rank, cap, caplog):
    ddp = dist.DistributedDataParallel(Branches(), bucket_cap_mb=cap)
    m, x = ddp.module, torch.tensor([1.0])
    with caplog.at_level("INFO", logger="gradsync"):
        for _ in range(3):
            ddp.zero_grad()
            ddp(x, "ab" if rank == 0 else "b").backward()
            assert m.a.grad.item() == 0.5  # zero counts for the rank without it
            assert m.b.grad.item() == 1.0
            assert m.c.grad is None  # of nobody
            assert ddp.reducer.unused == ("c",)
    lines = [r.getMessage() for r in caplog.records if "no gradient" in r.getMessage()]
    assert lines == [f"no gradient on rank {rank} for: {'a, ' * rank}c. On no rank: c"]
    # An old gradient of nobody's stays as it is; of somebody's, it counts once.
    m.c.grad = torch.tensor([7.0])
    kept = m.c.grad
    m.a.grad = torch.tensor([5.0])
    ddp(x, "ab" if rank == 0 else "b").backward()
    assert m.c.grad is kept
    assert kept.item() == 7.0
    assert m.a.grad.item() == 5.5
    # Accumulated on one rank in a branch that the last backward does not take: not lost.
    ddp.zero_grad()
    with ddp.no_sync():
        ddp(x * 4 * (rank + 1), "c").backward()
    ddp(x, "a").backward()
    assert m.c.grad.item() == 6.0
    assert m.b.grad is None
    for p in (m.a, m.c):
        assert_same_on_all_ranks(p.grad)


@pytest.mark.ranks(2)
def test_strict_raises_with_the_names(rank):
    ddp = dist.DistributedDataParallel(Unused(), strict=True)
    with pytest.raises(dist.UsageError, match=rf"on rank {rank}: never.weight, never.bias"):
        ddp(batch(0, 2)).sum().backward()
    assert_same_on_all_ranks(ddp.module.used.weight.grad)


@pytest.mark.ranks(2)
def test_weighted_mean_over_ranks_and_micro_batches(rank):
    rows = [[2, 5, 1], [4, 3, 6]]
    data = [batch(k, 12) for k in range(3)]

    def loss(model, k, start, count):
        return model(data[k][start : start + count]).square().mean()

    whole, ddp = make("plain"), dist.DistributedDataParallel(make("plain"))
    for micro in ([0], [0, 1, 2]):
        used = torch.cat([data[k][: rows[0][k] + rows[1][k]] for k in micro])
        whole.zero_grad()
        whole(used).square().mean().backward()
        for _ in range(3):
            ddp.zero_grad()
            for k in ddp.accumulate(micro):
                ddp.weight(rows[rank][k])
                loss(ddp, k, rank * rows[0][k], rows[rank][k]).backward()
            torch.testing.assert_close(grads(ddp), grads(whole))
    # Nothing to count on one rank: its gradient, even a NaN, is left out.
    whole.zero_grad()
    loss(whole, 0, 0, 5).backward()
    for nothing_first in (True, False):
        ddp.zero_grad()
        for k in ddp.accumulate(range(2)):
            nothing = rank == 0 or (k == 0) == nothing_first
            ddp.weight(0 if nothing else 5)
            loss(ddp, 0, 0, 0 if nothing else 5).backward()
        torch.testing.assert_close(grads(ddp), grads(whole))
    with pytest.raises(dist.UsageError, match="not negative"):
        ddp.weight(-1)
    ddp.zero_grad()
    with ddp.no_sync():
        loss(ddp, 0, 0, 2).backward()
        with pytest.raises(dist.UsageError, match="before each one"):
            ddp.weight(2)


@pytest.mark.ranks(2)
def test_frozen_and_unfrozen_between_steps(rank):
    whole, ddp = make("plain"), dist.DistributedDataParallel(make("plain"))
    for step, trains in enumerate([True, False, False, True, True]):
        x = batch(step, 2 * ROWS)
        for model in (whole, ddp.module):
            model.net[0].weight.requires_grad_(trains)
            model.zero_grad()
        whole(x).square().mean().backward()
        ddp(x[rank * ROWS :][:ROWS]).square().mean().backward()
        for ours, theirs in zip(ddp.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        assert (ddp.module.net[0].weight.grad is None) != trains


@pytest.mark.ranks(2)
def test_state_copies_and_torch_checkpoints(rank):
    ddp = dist.DistributedDataParallel(make("attention"))
    state = ddp.state_dict()
    assert set(state) == {f"module.{key}" for key in ddp.module.state_dict()}
    for twin in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        assert twin.reducer is not ddp.reducer
        for model in (ddp, twin):
            model.zero_grad()
            model(batch(rank, 4)).square().mean().backward()
        torch.testing.assert_close(grads(twin), grads(ddp))
        assert_same_on_all_ranks(twin.module.qkv.weight.grad)
    half = dist.new_group([0, 1])
    with pytest.raises(dist.UsageError, match="default group"):
        copy.deepcopy(dist.DistributedDataParallel(make("plain"), process_group=half))


@pytest.mark.ranks(3)
def test_different_models_are_named_on_every_rank(rank):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4 + (rank == 2)))
    with pytest.raises(dist.UsageError) as caught:
        dist.DistributedDataParallel(model)
    assert "number 2 is (1.weight: float32[4, 4]" in str(caught.value)
    assert "(1.weight: float32[5, 4], strides [4, 1]) on rank 2" in str(caught.value)
    # Values that differ are no mistake: rank 0's count; without init_sync each keeps its own.
    ddp = dist.DistributedDataParallel(make("plain", seed=rank))
    for p in ddp.parameters():
        assert_same_on_all_ranks(p.detach())
    ddp = dist.DistributedDataParallel(make("plain", seed=rank), init_sync=False)
    first = gather_for_assert(ddp.module.net[0].bias[0].item())
    assert len(set(first)) == 3


@pytest.mark.ranks(1)
def test_arguments_are_checked():
    wrap, model = dist.DistributedDataParallel, nn.Linear(2, 2)
    for kwargs, match in [
        ({"device_ids": [0, 1]}, "one device or none"),
        ({"device_ids": [0]}, "on one accelerator"),
        ({"output_device": 1}, "on one accelerator"),
        ({"bucket_cap_mb": -1}, "MiB"),
    ]:
        with pytest.raises(ValueError, match=match):
            wrap(model, **kwargs)
    with pytest.raises(RuntimeError, match="no parameter that requires"):
        wrap(nn.ReLU())
    with pytest.raises(RuntimeError, match="not initialised yet"):
        wrap(nn.LazyLinear(3))
    with pytest.raises(RuntimeError, match="'weight' is on the meta device"):
        wrap(nn.Linear(2, 2, device="meta"))
    with pytest.warns(FutureWarning, match="check_reduction"):
        wrap(model, check_reduction=True)
    with pytest.warns(FutureWarning, match="forward_sync_buffers was given"):
        wrap(nn.Linear(2, 2), broadcast_buffers=False, forward_sync_buffers=True)


@pytest.mark.ranks(2)
def test_batch_norm_over_ranks_is_refused_where_it_would_not_be_one():
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    for wrap in (dist.DistributedDataParallel, dist.replicate):
        with pytest.raises(ValueError, match=r"1 is a torch\.nn\.SyncBatchNorm, which"):
            wrap(model)


@pytest.mark.ranks(2)
def test_gradients_are_places_in_buckets_that_users_may_replace(rank):
    ddp = dist.DistributedDataParallel(make("plain"))
    whole = make("plain")
    x = batch(0, 2 * ROWS)
    whole(x).square().mean().backward()
    for step in range(4):
        ddp(x[rank * ROWS :][:ROWS]).square().mean().backward()
        torch.testing.assert_close(grads(ddp), grads(whole))
        memory = {p.grad.untyped_storage().data_ptr() for p in ddp.parameters()}
        assert len(memory) == 1
        for p in ddp.parameters():
            p.grad.detach_()
            if step == 0:
                p.grad.zero_()
            elif step == 1:
                p.grad = torch.zeros_like(p)
            else:
                p.grad = None


@pytest.mark.ranks(2)
def test_nested_modules_and_two_in_one_backward(rank):
    inner = dist.DistributedDataParallel(nn.Linear(6, 6))
    outer = dist.DistributedDataParallel(nn.Sequential(inner, nn.Linear(6, 6)))
    head = dist.DistributedDataParallel(nn.Linear(6, 4))
    whole = copy.deepcopy(nn.Sequential(inner.module, outer.module[1], head.module))
    x = batch(0, 2 * ROWS)
    for _ in range(3):
        for model in (whole, outer, head):
            model.zero_grad()
        whole(x).square().mean().backward()
        head(outer(x[rank * ROWS :][:ROWS])).square().mean().backward()
        torch.testing.assert_close(grads(outer) + grads(head), grads(whole))


@pytest.mark.ranks(2)
def test_an_error_in_backward(rank):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("bad luck")

    ddp = dist.DistributedDataParallel(make("plain"))
    with pytest.raises(ArithmeticError):
        Fails.apply(ddp(batch(0, 2))).sum().backward()
    for _ in range(3):  # nothing had been sent: go on
        ddp.zero_grad()
        ddp(batch(rank, 2)).sum().backward()
        assert_same_on_all_ranks(ddp.module.net[0].weight.grad)
