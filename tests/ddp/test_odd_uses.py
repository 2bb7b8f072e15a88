"""What users do to a module after wrapping it, and what must not come in the way of the mean."""

import contextlib
import copy

import pytest
import torch
from models import ROWS, batch, chain
from torch import nn

import gradsync as dist
from gradsync.ddp.engine import CallEngine
from gradsync.ddp.mixed_precision import MixedPrecision
from gradsync.testing import assert_same_on_all_ranks


def step(wrapped, rank, seed=0):
    """Return the means that the gradients of a backward must be, after having done it."""
    module = getattr(wrapped, "module", wrapped)
    alone = copy.deepcopy(module)
    alone.zero_grad()
    x = batch(10 * seed + rank, ROWS)
    alone(x).square().sum().backward()
    wrapped(x).square().sum().backward()
    means = []
    for param in alone.parameters():
        mean = param.grad.clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        means.append(mean)
    return means


def assert_mean(wrapped, rank, seed=0):
    wrapped.zero_grad()
    means = step(wrapped, rank, seed)
    for param, mean in zip(wrapped.parameters(), means, strict=True):
        torch.testing.assert_close(param.grad, mean)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("to_none", [True, False])
def test_module_is_moved_to_torchs_shared_memory(rank, to_none):
    wrapped = dist.DistributedDataParallel(chain())
    for seed in range(3):
        assert_mean(wrapped, rank, seed)
    wrapped.module.share_memory()  # with the gradients there are
    for seed in range(3):
        wrapped.zero_grad(set_to_none=to_none)
        means = step(wrapped, rank, seed)
        for param, mean in zip(wrapped.parameters(), means, strict=True):
            torch.testing.assert_close(param.grad, mean)


@pytest.mark.ranks(2, may_leave=["environment"])  # the compiler's
def test_compiled_module_is_replicated(rank):
    model = dist.replicate(torch.compile(chain(), backend="eager"))
    for seed in range(3):
        model.zero_grad()
        model(batch(10 * seed + rank, ROWS)).square().sum().backward()
        for param in model.parameters():
            assert_same_on_all_ranks(param.grad)
    torch.compiler.reset()


def weighted_mean(module, rank, weight):
    """Return the gradients of a backward of this rank alone, as a weighted mean over ranks."""
    alone = copy.deepcopy(module)
    alone.zero_grad()
    alone(batch(rank, ROWS)).square().sum().backward()
    total = torch.tensor(float(weight))
    dist.all_reduce(total)
    means = []
    for param in alone.parameters():
        if param.grad is not None:
            mean = param.grad * weight / total
            dist.all_reduce(mean)
            means.append(mean)
    return means


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["to None", "to zero", "a frozen part keeps its own"])
def test_weights_of_an_accumulation_that_was_dropped_do_not_count(rank, how):
    wrapped = dist.DistributedDataParallel(chain())
    module = wrapped.module
    assert_mean(wrapped, rank)
    if how == "a frozen part keeps its own":
        module[0].requires_grad_(False)
    trained = [param for param in module.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    old = [p.grad.clone() for p in module.parameters() if not p.requires_grad]
    optimizer.zero_grad()
    with wrapped.no_sync():
        wrapped.weight(5.0 + rank)
        (wrapped(batch(rank, ROWS)).sum() * float("nan")).backward()
    optimizer.zero_grad(set_to_none=how != "to zero")
    wrapped.weight(1.0 + rank)
    wrapped(batch(rank, ROWS)).square().sum().backward()
    for param, mean in zip(trained, weighted_mean(module, rank, 1.0 + rank), strict=True):
        torch.testing.assert_close(param.grad, mean)
    left = [p.grad for p in module.parameters() if not p.requires_grad]
    for now, before in zip(left, old, strict=True):
        torch.testing.assert_close(now, before, rtol=0, atol=0)


@pytest.mark.ranks(2)
def test_weighted_accumulation_of_sparse_gradients(rank):
    model = nn.Embedding(8, 2, sparse=True)
    wrapped = dist.DistributedDataParallel(model)
    for last in (False, True):
        wrapped.require_backward_grad_sync = last
        wrapped.weight(2.0 + rank)
        wrapped(torch.tensor([1])).sum().backward()
    torch.testing.assert_close(model.weight.grad.to_dense()[1], torch.ones(2))


@pytest.mark.ranks(2)
def test_buffers_of_a_part_that_was_replaced_are_kept_the_same(rank):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
    wrapped = dist.DistributedDataParallel(model)
    model[1] = nn.BatchNorm1d(4, affine=False)
    for seed in range(3):
        wrapped(torch.randn(8, 4) + seed + rank).sum().backward()
    wrapped(torch.zeros(8, 4))
    with torch.no_grad():
        model[1].eval()
        wrapped(torch.zeros(8, 4))  # has rank 0's before it runs
    assert_same_on_all_ranks(model[1].running_mean)


@pytest.mark.ranks(2)
def test_parameters_are_swapped_for_others(rank):
    wrapped = dist.DistributedDataParallel(chain())
    assert_mean(wrapped, rank)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        wrapped.zero_grad()
        wrapped.load_state_dict(copy.deepcopy(wrapped.state_dict()))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    for seed in range(3):
        assert_mean(wrapped, rank, seed)


class Prompt(nn.Module):
    """Returns its own parameter."""

    def __init__(self):
        super().__init__()
        self.prompt = nn.Parameter(torch.ones(3))

    def forward(self):
        return self.prompt


@pytest.mark.ranks(2)
def test_module_that_returns_its_parameter_heeds_no_sync(rank):
    wrapped = dist.DistributedDataParallel(Prompt())
    prompt = wrapped.module.prompt
    (wrapped() * (rank + 1)).sum().backward()
    assert prompt.grad.tolist() == [1.5] * 3
    prompt.grad = None
    with wrapped.no_sync():
        (wrapped() * (rank + 1)).sum().backward()
    assert prompt.grad.tolist() == [rank + 1.0] * 3


@pytest.mark.ranks(2)
def test_module_that_returns_its_parameter_outlives_the_group(rank):
    group = dist.new_group()
    model = Prompt()
    wrapped = dist.DistributedDataParallel(model, process_group=group)
    (wrapped() * (rank + 1)).sum().backward()
    model.prompt.grad = None
    dist.barrier()
    dist.destroy_process_group(group)
    (model() * (rank + 1)).sum().backward()
    assert model.prompt.grad.tolist() == [rank + 1.0] * 3


@pytest.mark.ranks(2)
def test_one_rank_alone_evaluates_a_copy_with_buffers(rank):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    wrapped = dist.DistributedDataParallel(model)
    if rank == 0:
        kept = copy.deepcopy(wrapped).eval()
        with torch.no_grad():
            kept(torch.ones(2, 4))
    wrapped(torch.randn(8, 4)).sum().backward()
    assert_same_on_all_ranks(model[0].weight.grad)


@pytest.mark.ranks(2)
def test_weight_may_follow_derivatives_of_the_same_micro_batch(rank):
    wrapped = dist.DistributedDataParallel(chain())
    for last in (False, True):
        x = batch(rank, ROWS).requires_grad_()
        wrapped.require_backward_grad_sync = last
        loss = wrapped(x).square().sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        wrapped.weight(1.0 + rank)
        (loss + slope.square().sum()).backward()
    for param in wrapped.parameters():
        assert_same_on_all_ranks(param.grad)


@pytest.mark.ranks(2)
def test_backward_without_a_weight_after_one_with_is_refused(rank):
    wrapped = dist.DistributedDataParallel(chain())
    with wrapped.no_sync():
        wrapped.weight(1.0)
        wrapped(batch(rank, ROWS)).sum().backward()
    with pytest.raises(dist.UsageError, match="call it before each"):
        wrapped(batch(rank, ROWS)).sum().backward()


@pytest.mark.ranks(2)
def test_functional_derivatives_make_no_calls(rank):
    wrapped = dist.DistributedDataParallel(chain())
    for seed in range(3):
        assert_mean(wrapped, rank, seed)
        params = {name: p.detach() for name, p in wrapped.named_parameters()}
        x = batch(rank, ROWS)

        def loss(values, x=x):
            return torch.func.functional_call(wrapped, values, (x,)).square().sum()

        if rank == 0:  # nobody else takes part
            found = torch.func.grad(loss)(params)
            alone = copy.deepcopy(wrapped.module)
            alone.zero_grad()
            alone(x).square().sum().backward()
            for name, param in alone.named_parameters():
                torch.testing.assert_close(found[f"module.{name}"], param.grad)


@pytest.mark.ranks(2)
def test_backward_that_counts_for_nothing_is_not_an_unused_parameter(rank):
    wrapped = dist.DistributedDataParallel(chain(), strict=True)
    for _ in range(3):
        wrapped.zero_grad()
        wrapped.weight(float(rank))  # that of rank 0 counts for nothing
        wrapped(batch(rank, ROWS)).sum().backward()
        for param in wrapped.parameters():
            assert_same_on_all_ranks(param.grad)


@pytest.mark.ranks(2)
def test_sparse_gradients_under_mixed_precision(rank):
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2))
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrapped = dist.DistributedDataParallel(model, mixed_precision=precision)
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(torch.tensor([rank, 3])).float().square().sum().backward()
        gradient = model[0].weight.grad
        assert gradient.is_sparse
        assert gradient.dtype == torch.float32
        rows = gradient.coalesce()
        assert rows.indices().tolist() == [[0, 1, 3]]
        assert_same_on_all_ranks(rows.values())


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, both):
        return self.a(x) + (self.b(x) if both else 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_parameter_that_one_rank_never_uses_is_averaged_for_ever(rank, dtype):
    ddp = dist.DistributedDataParallel(Branches().to(dtype))
    ddp.reducer.change_engine(lambda group, buckets, timeout_s: CallEngine(group))
    for _ in range(200 if dtype is torch.float32 else 40):
        ddp.zero_grad()
        ddp(torch.ones(2, 4, dtype=dtype), both=rank == 0).sum().backward()
        assert ddp.module.b.weight.grad is not None
    assert_same_on_all_ranks(ddp.module.b.weight.grad)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("cap", [None, 0])
@pytest.mark.parametrize("when", ["before forward", "before backward", "in place of another"])
def test_what_hooks_behind_ours_make_of_gradients_is_averaged(rank, cap, when):
    def scale(param):
        param.grad.mul_(rank + 1.0)

    ddp = dist.DistributedDataParallel(chain(), bucket_cap_mb=cap)
    alone = copy.deepcopy(ddp.module)
    handles = []
    for step in range(4):
        ddp.zero_grad()
        if when != "before backward":
            for handle in handles if when == "in place of another" else ():
                handle.remove()
            handles = [p.register_post_accumulate_grad_hook(scale) for p in ddp.parameters()]
        loss = ddp(batch(step, ROWS)).sum()
        if when == "before backward":
            handles = [p.register_post_accumulate_grad_hook(scale) for p in ddp.parameters()]
        loss.backward()
        if when != "in place of another":
            for handle in handles:
                handle.remove()
        alone.zero_grad()
        alone(batch(step, ROWS)).sum().backward()
        for ours, own in zip(ddp.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, own.grad * 1.5)


@pytest.mark.ranks(2)
def test_layer_that_is_added_after_wrapping_is_an_error(rank):
    ddp = dist.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4)))
    ddp.module.append(nn.ReLU())
    ddp(torch.ones(1, 4)).sum().backward()
    ddp.module.append(nn.Linear(4, 4))
    with torch.no_grad():
        ddp(torch.ones(1, 4))  # nothing is to be averaged
    for _ in range(2):
        with pytest.raises(dist.UsageError, match=r"did not have when it was wrapped.*2\.weight"):
            ddp(torch.ones(1, 4)).sum().backward()
    ddp.module[2].requires_grad_(False)
    ddp(torch.ones(1, 4)).sum().backward()
    ddp.module[2].requires_grad_(True)
    with pytest.raises(dist.UsageError, match=r"did not have when it was wrapped.*2\.weight"):
        ddp(torch.ones(1, 4)).sum().backward()


@pytest.mark.ranks(2)
def test_parameters_of_another_module_may_stand_in_for_a_call(rank):
    ddp = dist.DistributedDataParallel(nn.Linear(4, 1))
    others = {name: nn.Parameter(torch.ones_like(p)) for name, p in ddp.named_parameters()}
    torch.func.functional_call(ddp, others, (torch.ones(1, 4),)).sum().backward()
    assert others["module.weight"].grad.tolist() == [[1.0] * 4]
    ddp(torch.full((1, 4), rank + 1.0)).sum().backward()
    assert ddp.module.weight.grad.tolist() == [[1.5] * 4]


@pytest.mark.ranks(2)
def test_accumulation_that_is_left_early_or_begins_with_old_gradients_is_told(rank):
    ddp = dist.DistributedDataParallel(nn.Linear(4, 1))

    def leave_early():
        for x in ddp.accumulate([torch.ones(1, 4)] * 3):
            ddp(x).sum().backward()
            break

    with pytest.warns(UserWarning, match="left before its last batch"):
        leave_early()
    ddp.zero_grad()
    for x in ddp.accumulate([torch.ones(1, 4)] * 2):
        ddp(x).sum().backward()
    ddp.weight(1)
    ddp(x).sum().backward()  # one backward on top of an old gradient is right
    torch.testing.assert_close(ddp.module.bias.grad, torch.full((1,), 3.0))
    with ddp.no_sync():
        ddp.weight(1)
        ddp(x).sum().backward()
    with pytest.raises(dist.UsageError, match="call zero_grad"):
        ddp.weight(1)


@pytest.mark.ranks(2)
def test_old_gradients_that_are_dropped_or_frozen_are_no_part_of_an_accumulation(rank):
    ddp = dist.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    x = torch.full((1, 4), rank + 1.0)

    def accumulate(drop):
        for weight in (1.0, 3.0):
            ddp.weight(weight)
            drop()
            drop = bool
            with ddp.no_sync() if weight == 1 else contextlib.nullcontext():
                ddp(weight * x).sum().backward()
        return ddp.module[1].bias.grad.item(), ddp.module[1].weight.grad.clone()

    for _ in range(2):  # dropped after the first weight, too
        first = accumulate(ddp.zero_grad)
    ddp.module[0].requires_grad_(False)  # with a gradient that nobody drops
    ddp.module[1].zero_grad()
    again = accumulate(bool)
    torch.testing.assert_close(again, first)
    assert first[0] == 1.0


@pytest.mark.ranks(2)
def test_words_about_weights_are_those_of_the_mistake_at_hand(rank):
    ddp = dist.DistributedDataParallel(nn.Linear(4, 1))
    x = torch.ones(1, 4)
    ddp(x).sum().backward()
    ddp.weight(1)
    ddp(x).sum().backward()  # on top of an old one
    ddp.zero_grad()
    with ddp.no_sync():
        ddp(x).sum().backward()
    with pytest.raises(dist.UsageError, match="without a weight came before"):
        ddp.weight(1)


@pytest.mark.ranks(2)
def test_accumulation_whose_gradients_are_dropped_may_be_left(rank, recwarn):
    ddp = dist.DistributedDataParallel(nn.Linear(4, 1))
    for x in ddp.accumulate([torch.ones(1, 4)] * 3):
        ddp(x).sum().backward()
        ddp.zero_grad(set_to_none=False)
        break
    assert not recwarn.list


@pytest.mark.ranks(2)
def test_torchs_own_class_says_which_precision(rank):
    from torch.nn.parallel.distributed import _MixedPrecision

    half = _MixedPrecision(param_dtype=torch.bfloat16)
    ddp = dist.DistributedDataParallel(nn.Linear(4, 1), mixed_precision=half)
    assert ddp(torch.ones(1, 4)).dtype is torch.bfloat16
