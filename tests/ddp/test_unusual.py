"""Less usual ways of training: parts in several wrappers, copies, uneven micro-batches, retries."""

import copy

import pytest
import torch
from models import ROWS, Plain, batch, chain, make
from torch import nn

import gradsync as dist
from gradsync.ddp.comm_hooks import allreduce_hook
from gradsync.ddp.engine import BoardEngine, CallEngine
from gradsync.testing import assert_same_on_all_ranks


def assert_means(module: nn.Module, alone: nn.Module) -> None:
    """Assert that gradients are the mean over ranks of those of a twin that trains alone."""
    for p, q in zip(module.parameters(), alone.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            mean = q.grad.clone()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            torch.testing.assert_close(p.grad, mean)


@pytest.mark.ranks(2)
def test_parts_may_be_in_several_wrappers(rank):
    whole = chain()
    alone = copy.deepcopy(whole)
    old = dist.DistributedDataParallel(whole)  # a wrapper that was kept
    wrapped, part = (dist.DistributedDataParallel(m) for m in (whole, whole[:2]))
    old(batch(rank, ROWS)).sum().backward()
    for step in range(4):
        x = batch(10 * step + rank, ROWS)
        for runs in (
            [(part, alone[:2])],
            [(wrapped, alone)],
            [(part, alone[:2]), (wrapped, alone)],  # two in one backward
            [(wrapped, alone), (part, alone[:2])],
        ):
            whole.zero_grad()
            alone.zero_grad()
            sum(ours(x).square().sum() for ours, _ in runs).backward()
            sum(theirs(x).square().sum() for _, theirs in runs).backward()
            assert_means(whole, alone)
    dist.replicate(whole[2])  # inside of a module that is synchronised as a whole
    for step in range(3):
        whole.zero_grad()
        alone.zero_grad()
        x = batch(step + 7 * rank, ROWS)
        wrapped(x).square().sum().backward()
        alone(x).square().sum().backward()
        assert_means(whole, alone)


@pytest.mark.ranks(2)
def test_a_copy_on_one_rank_only_can_be_kept(rank):
    ddp = dist.DistributedDataParallel(make("plain"))
    if rank == 0:
        kept = copy.deepcopy(ddp)
        torch.testing.assert_close(kept.state_dict(), ddp.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(kept(batch(0, ROWS)), ddp(batch(0, ROWS)))
    ddp(batch(rank, ROWS)).square().mean().backward()
    assert_same_on_all_ranks(ddp.module.net[0].weight.grad)


@pytest.mark.ranks(2)
def test_a_copy_meets_its_twins_when_it_trains(rank):
    ddp = copy.deepcopy(dist.DistributedDataParallel(make("plain")))
    with torch.no_grad():
        ddp.module.net[0].weight += rank
    alone = make("plain")
    for step in range(3):
        ddp.zero_grad()
        alone.zero_grad()
        for model in (ddp, alone):
            model(batch(step + 5 * rank, ROWS)).square().mean().backward()
        assert_means(ddp.module, alone)


@pytest.mark.ranks(3)
def test_ranks_with_buffers_may_have_different_numbers_of_micro_batches(rank):
    ddp = dist.DistributedDataParallel(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))
    for step in range(5):
        ddp.zero_grad()
        for x in ddp.accumulate([batch(step + k, ROWS) for k in range(1 + (step + rank) % 3)]):
            ddp.weight(len(x))
            ddp(x).square().sum().backward()
        assert_same_on_all_ranks(ddp.module[0].weight.grad)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("half-way")


def failing_chain() -> nn.Sequential:
    """Its backward fails in the middle if forward was told so."""
    whole = chain()
    whole.forward = lambda x, fail=False: whole[2](
        whole[1](_Fails.apply(whole[0](x)) if fail else whole[0](x))
    )
    return whole


@pytest.mark.ranks(2)
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("sent", [False, True])
def test_a_forward_from_before_an_error_in_backward(rank, before, sent):
    whole = failing_chain()
    cap = 1e-6 if sent else None  # a bucket for each parameter, or one for all
    ddp = dist.DistributedDataParallel(whole, bucket_cap_mb=cap)
    for step in range(before):
        ddp(batch(step, ROWS)).sum().backward()
    good, bad = ddp(batch(rank, ROWS)), ddp(batch(rank, ROWS), fail=True)
    with pytest.raises(ValueError, match="half-way"):
        bad.sum().backward()
    ddp.zero_grad()
    if sent and before:  # the first backward sends nothing before its end
        with pytest.raises(dist.DistError, match="cut short"):
            good.square().sum().backward()
        with pytest.raises(dist.DistError, match="cut short"):
            ddp._check_reducer_finalized()
        return
    good.square().sum().backward()
    assert_same_on_all_ranks(whole[0].weight.grad)
    ddp(batch(rank, ROWS)).sum().backward()
    assert_same_on_all_ranks(whole[0].weight.grad)


@pytest.mark.ranks(2)
def test_freezing_before_two_forwards_of_one_backward(rank):
    ddp = dist.DistributedDataParallel(chain())
    frozen = ddp.module[0]
    for step in range(6):
        ddp.zero_grad()
        frozen.requires_grad_(step % 3 != 2)
        first, second = ddp(batch(step + rank, ROWS)), ddp(batch(step + 9 * rank, ROWS))
        (first + second).square().sum().backward()
        assert (frozen.weight.grad is None) == (step % 3 == 2)
        for param in ddp.parameters():
            if param.grad is not None:
                assert_same_on_all_ranks(param.grad)


class _Odd(nn.Module):
    """Parameters without elements, also as the only ones of their type; a gradient made sparse."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.ones(8, 6))
        self.none = nn.Parameter(torch.zeros(0))
        self.none_wide = nn.Parameter(torch.zeros(3, 0, dtype=torch.float64))
        self.plain = Plain()

    def forward(self, x):
        rows = nn.functional.embedding((x.abs() * 3).long().clamp(max=7), self.rows, sparse=True)
        return self.plain(x + rows.mean(1)) + self.none.sum() + self.none_wide.sum().float()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hook", [None, allreduce_hook])
def test_parameters_without_elements_and_unexpectedly_sparse_gradients(rank, hook):
    torch.manual_seed(0)
    alone = _Odd()
    ddp = dist.DistributedDataParallel(copy.deepcopy(alone))
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    for step in range(3):
        ddp.zero_grad()
        alone.zero_grad()
        for model in (ddp, alone):
            model(batch(step + 5 * rank, ROWS)).square().mean().backward()
        alone.rows.grad = alone.rows.grad.to_dense()
        assert_means(ddp.module, alone)


@pytest.mark.ranks(2)
def test_weights_after_gradients_that_were_dropped(rank):
    ddp = dist.DistributedDataParallel(chain())
    with ddp.no_sync():
        ddp(batch(rank, ROWS)).sum().backward()
    ddp.zero_grad()
    ddp.weight(2.0)  # nothing without a weight is left
    ddp(batch(rank, ROWS)).sum().backward()
    assert_same_on_all_ranks(ddp.module[0].weight.grad)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_moved_out_of_their_bucket(rank, set_to_none):
    ddp = dist.DistributedDataParallel(chain())
    alone = chain()
    for step in range(6):
        for model in (ddp, alone):
            model.zero_grad(set_to_none=set_to_none)
            model(batch(step + 9 * rank, ROWS)).square().sum().backward()
        assert_means(ddp.module, alone)
        if step % 2:
            for param in ddp.parameters():
                param.grad.data = param.grad.data * 2


@pytest.mark.ranks(2)
def test_a_module_that_changes_its_type_or_layout(rank):
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1))
    ddp = dist.DistributedDataParallel(copy.deepcopy(alone))
    for change in (
        {},
        {"memory_format": torch.channels_last},
        {"dtype": torch.float64},
        {"dtype": torch.float32, "memory_format": torch.contiguous_format},
    ):
        for model in (ddp, alone):
            model.to(**change)
        x = torch.randn(2, 3, 5, 5, dtype=alone[0].weight.dtype)
        for _ in range(3):
            for model in (ddp, alone):
                model.zero_grad()
                model(x + rank).square().sum().backward()
            assert_means(ddp.module, alone)


@pytest.mark.ranks(2)
def test_hooks_on_parameters_run_before_gradients_are_sent(rank):
    def halve(param):
        param.grad.mul_(0.5)

    ddp = dist.DistributedDataParallel(chain(), bucket_cap_mb=1e-6)
    alone = chain()
    for step in range(6):
        if step == 3:  # long after wrapping
            for param in [*ddp.parameters(), *alone.parameters()]:
                param.register_post_accumulate_grad_hook(halve)
        for model in (ddp, alone):
            model.zero_grad()
            model(batch(step + 9 * rank, ROWS)).square().sum().backward()
        assert_means(ddp.module, alone)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_hooks_that_step_with_gradients_of_one_rank_are_an_error(rank, late, drop):
    def step(param):
        with torch.no_grad():
            param -= 0.1 * param.grad
        if drop:
            param.grad = None

    model = chain()
    if not late:
        model[1].weight.register_post_accumulate_grad_hook(step)
    ddp = dist.DistributedDataParallel(model, bucket_cap_mb=0)
    if late:
        for k in range(3):
            ddp(batch(k, ROWS)).sum().backward()
        model[1].weight.register_post_accumulate_grad_hook(step)
    with pytest.raises(dist.UsageError, match=r"during backward: 1\.weight\. An optimizer"):
        ddp(batch(rank, ROWS)).sum().backward()


@pytest.mark.ranks(2)
def test_a_layer_that_is_replaced_after_wrapping_is_named(rank):
    ddp = dist.DistributedDataParallel(chain())
    for step in range(3):
        ddp(batch(step, ROWS)).sum().backward()
    ddp.module[1] = dist.replicate(nn.Linear(6, 3))  # one that is synchronised by itself
    ddp(batch(0, ROWS)).sum().backward()
    ddp.module[2] = nn.Linear(3, 2)
    with pytest.raises(dist.UsageError, match=r"2\.weight, 2\.bias\. Wrap it again"):
        ddp(batch(0, ROWS)).sum().backward()
    again = dist.DistributedDataParallel(chain())
    again.module.load_state_dict(chain().state_dict(), assign=True)
    with pytest.raises(dist.UsageError, match=r"wrapped, .*: 0\.weight, .* Wrap it again"):
        again(batch(0, ROWS)).sum().backward()


@pytest.mark.ranks(2)
def test_different_buffers_are_named_on_every_rank(rank):
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.zeros(2 + rank))
    with pytest.raises(dist.UsageError, match=r"\(buffer table: float32\[2\]\) on rank 0 and "):
        dist.DistributedDataParallel(model)
    model.table.resize_(3)
    dist.DistributedDataParallel(model)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_weight_of_a_backward_that_failed_does_not_count(rank, set_to_none):
    whole, alone = failing_chain(), chain()
    ddp = dist.DistributedDataParallel(whole)
    for step in range(3):
        ddp.weight(2.0)
        with pytest.raises(ValueError, match="half-way"):
            ddp(batch(step + rank, ROWS), fail=True).sum().backward()
        for model in (whole, alone):
            model.zero_grad(set_to_none=set_to_none)
        ddp.weight(2.0)
        for model in (ddp, alone):
            model(batch(step + rank, ROWS)).square().sum().backward()
        assert_means(whole, alone)


@pytest.mark.ranks(2)
def test_after_a_backward_that_was_cut_short_the_module_can_be_wrapped_again(rank):
    whole, alone = chain(), chain()
    ddp = dist.DistributedDataParallel(whole, bucket_cap_mb=1e-6)
    for step in range(3):
        ddp(batch(step, ROWS)).sum().backward()
    fails = whole[0].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ddp(batch(0, ROWS)).sum().backward()
    fails.remove()
    with pytest.raises(dist.DistError, match="Wrap the module again"):
        ddp(batch(0, ROWS))
    again = dist.DistributedDataParallel(whole)
    for step in range(3):
        for model in (again, alone):
            model.zero_grad()
            model(batch(step + rank, ROWS)).square().sum().backward()
        assert_means(whole, alone)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("engine", [BoardEngine, CallEngine])
def test_weights_of_parameters_of_several_types(rank, engine):
    ddp = dist.DistributedDataParallel(make("mixed"))  # one of them is complex
    if engine is CallEngine:
        ddp.reducer.change_engine(lambda group, buckets, timeout_s: CallEngine(group))
    alone = make("mixed")
    for step in range(3):
        ddp.zero_grad()
        alone.zero_grad()
        ddp.weight(1.0 + rank)
        x = batch(step, 3)
        ddp(x[rank : 1 + 2 * rank]).square().mean().backward()  # a row on rank 0, two on rank 1
        alone(x).square().mean().backward()
        for p, q in zip(ddp.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.ranks(2)
def test_backward_of_what_is_no_output_of_the_wrapper(rank):
    group = dist.new_group([0, 1])
    ddp = dist.DistributedDataParallel(chain(), process_group=group)
    alone = chain()
    for _ in range(3):
        ddp(batch(0, ROWS)).sum().backward()
        for model in (ddp.module, alone):
            model.zero_grad()
            model(batch(rank, ROWS)).square().sum().backward()
        assert_means(ddp.module, alone)
    dist.destroy_process_group(group)
    for model in (ddp.module, alone):  # what the wrapper leaves behind is an ordinary module
        model.zero_grad()
        model(batch(rank, ROWS)).square().sum().backward()
    torch.testing.assert_close(
        [p.grad for p in ddp.parameters()], [p.grad for p in alone.parameters()]
    )


@pytest.mark.ranks(2)
def test_a_buffer_that_grew_on_one_rank_is_not_filled_with_something(rank):
    model = nn.Linear(6, 2)
    model.register_buffer("seen", torch.ones(2))
    ddp = dist.DistributedDataParallel(model)
    ddp(batch(rank, ROWS)).sum().backward()
    if rank == 1:
        model.seen = torch.ones(3)
    with pytest.raises(dist.MismatchError, match="a rank alone goes to the module"):
        ddp(batch(rank, ROWS))
    assert model.seen.tolist() == [1.0] * (2 + rank)
