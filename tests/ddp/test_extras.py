"""Buffers, replicate, mixed precision, optimizers in backward, figures, other groups, compile."""

import copy
import pickle

import pytest
import torch
from models import ROWS, ConvNorm, batch, make, train
from torch import nn

import gradsync as dist
from gradsync.ddp.buffers import BufferHookLocation
from gradsync.ddp.mixed_precision import MixedPrecision
from gradsync.testing import assert_same_on_all_ranks


class Counting(nn.Module):
    """Its buffers are whatever this rank last wrote to them."""

    def __init__(self, rank):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.register_buffer("mine", torch.tensor([float(rank)]))
        self.register_buffer("count", torch.tensor(rank))

    def forward(self, x):
        self.seen = (self.mine[0].item(), self.count.item())
        return x * self.w


@pytest.mark.ranks(2)
def test_buffers_are_rank_0s_before_forward(rank):
    def steps(ddp):
        found = []
        for step in range(5):
            ddp.module.mine.fill_(10 * step + rank)
            with ddp.no_sync() if step == 1 else torch.enable_grad():
                out = ddp(torch.ones(1))
            found.append(ddp.module.seen[0] - 10 * step)
            if step != 3:
                out.backward()
            else:
                with torch.no_grad():
                    ddp.eval()(torch.ones(1))
                    ddp.train()
        return found

    # The forward after one without synchronisation sees its own, as in torch.
    assert steps(dist.DistributedDataParallel(Counting(rank))) == [0, 0, rank, 0, 0]
    off = dist.DistributedDataParallel(Counting(rank), forward_sync_buffers=False)
    assert off.module.count.item() == 0
    assert steps(off) == [rank] * 5
    assert not off.broadcast_buffers
    never = Counting(rank)
    dist.DistributedDataParallel(never, broadcast_buffers=False)
    assert never.count.item() == rank
    ignoring = Counting(rank)
    dist.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["mine"])
    assert steps(dist.DistributedDataParallel(ignoring)) == [rank] * 5
    assert ignoring.count.item() == 0


@pytest.mark.ranks(2)
def test_buffers_are_found_wherever_they_have_gone(rank):
    """What they travel in is kept from forward to forward, and is made anew when they move."""
    model = Counting(rank)
    ddp = dist.DistributedDataParallel(model)

    def are_synchronised():
        model.mine.fill_(5 + rank)
        ddp(torch.ones(1))
        return model.mine.tolist() == [5.0] * model.mine.numel() and model.mine.dtype == wanted

    wanted = torch.float32
    assert are_synchronised()
    assert are_synchronised()
    model.mine = torch.zeros(1)  # another tensor
    assert are_synchronised()
    model.mine.data = torch.zeros(3)  # the same one, elsewhere
    assert are_synchronised()
    model.mine.resize_(2)  # smaller, at the same place
    assert are_synchronised()
    base = torch.zeros(8)
    for view in (base[::2], base[:4]):  # of one size, at one place
        model.mine = view
        assert are_synchronised()
    wanted = torch.float64
    model.double()
    assert are_synchronised()
    model.register_buffer("large", torch.zeros(1 << 19))  # too much to keep a second time
    for value in (rank, rank + 2):
        model.large.fill_(value)
        assert are_synchronised()
        assert model.large.unique().tolist() == [value - rank]


@pytest.mark.ranks(2)
def test_buffers_of_a_model_that_was_tried_before_it_trains(rank):
    ddp = dist.DistributedDataParallel(Counting(rank))
    for mode in (torch.inference_mode, torch.enable_grad, torch.inference_mode):
        ddp.module.mine.fill_(5 + rank)
        with mode():
            ddp(torch.ones(1))
        assert ddp.module.mine.tolist() == [5.0]


@pytest.mark.ranks(2)
def test_buffer_hooks(rank, group):
    def average(state, buffers):
        state.append(sorted(buffers))
        if location is BufferHookLocation.PRE_FORWARD:
            return group.all_reduce(buffers["mine"], dist.ReduceOp.AVG)
        work = group.all_reduce_async(buffers["mine"], dist.ReduceOp.AVG)
        return [work.get_future()]

    for location in BufferHookLocation:
        ddp, calls = dist.DistributedDataParallel(Counting(rank)), []
        ddp._register_buffer_comm_hook(calls, average, location)
        ddp.module.mine.fill_(rank)
        ddp(torch.ones(1)).backward()
        assert ddp.module.mine.item() == 0.5
        assert calls == [["count", "mine"]]
        before = location is BufferHookLocation.PRE_FORWARD
        assert ddp.module.seen[0] == (0.5 if before else rank)

    def halve(_, buffers):
        buffers["1.running_mean"].div_(2)

    norm = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    ddp = dist.DistributedDataParallel(norm)
    ddp._register_buffer_comm_hook(None, halve)
    out = ddp(batch(0, ROWS))
    half = norm[1].running_mean.clone()
    out.sum().backward()  # what batch norm has saved for it may change
    assert half.abs().sum() > 0
    torch.testing.assert_close(norm[1].running_mean, half)


@pytest.mark.ranks(2)
def test_replicate_leaves_the_module_what_it_is(rank):
    for name in ("plain", "unused", "conv"):
        model, whole = make(name, seed=1 + rank), make(name)
        kind, keys = type(model), set(model.state_dict())
        assert dist.replicate(model) is model
        assert type(model) is kind
        assert set(model.state_dict()) == keys
        rows = 2 * ROWS
        train(whole, whole.parameters(), rows, slice(None))
        train(model, model.parameters(), rows, slice(rank * ROWS, (rank + 1) * ROWS))
        for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
            assert_same_on_all_ranks(ours.detach())
    with pytest.raises(dist.UsageError, match="replicated already"):
        dist.replicate(model)
    # Copies are modules of their own: one rank may use them alone.
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        if rank == 0:
            twin(batch(0, 2)).sum().backward()
        with pytest.raises(dist.UsageError, match="not replicated"):
            dist.replica_of(twin)
    model.zero_grad()
    for k in dist.replica_of(model).accumulate(range(2)):
        model(batch(k + rank, 2)).sum().backward()
    assert_same_on_all_ranks(model.head.weight.grad)


@pytest.mark.ranks(2)
def test_mixed_precision(rank):
    for kwargs in ({}, {"reduce_dtype": torch.float32}, {"keep_low_precision_grads": True}):
        precision = MixedPrecision(
            param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16, **kwargs
        )
        ddp = dist.DistributedDataParallel(ConvNorm(), mixed_precision=precision)
        whole = copy.deepcopy(ddp.module).float()
        x = batch(0, 2 * ROWS)
        whole(x).square().mean().backward()
        for _ in range(3):
            ddp.zero_grad()
            out = ddp(x[rank * ROWS :][:ROWS])
            assert out.dtype == torch.bfloat16
            out.float().square().mean().backward()
        assert ddp.module.norm.running_mean.dtype == torch.bfloat16
        low = "keep_low_precision_grads" in kwargs
        for ours, theirs in zip(ddp.parameters(), whole.parameters(), strict=True):
            assert ours.dtype == torch.float32
            assert ours.grad.dtype == (torch.bfloat16 if low else torch.float32)
            torch.testing.assert_close(ours.grad.float(), theirs.grad, rtol=0.1, atol=0.02)
            assert_same_on_all_ranks(ours.grad)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.ranks(2, may_leave=["environment"])
def test_optimizers_that_step_in_backward(rank):
    from torch.distributed.optim import _apply_optimizer_in_backward

    whole = make("plain")
    optim = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    fused = dist.DistributedDataParallel(make("plain"))
    fused._register_fused_optim(torch.optim.SGD, lr=0.1, momentum=0.9)
    attached = make("plain")
    _apply_optimizer_in_backward(
        torch.optim.SGD, attached.parameters(), {"lr": 0.1, "momentum": 0.9}
    )
    wrapped = dist.DistributedDataParallel(attached)
    for step in range(4):
        x = batch(step, 2 * ROWS)
        optim.zero_grad()
        whole(x).square().mean().backward()
        optim.step()
        for ddp in (fused, wrapped):
            ddp.zero_grad()
            ddp(x[rank * ROWS :][:ROWS]).square().mean().backward()
    for model in (fused.module, attached):
        for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert all(p.grad is None for p in attached.parameters())


@pytest.mark.ranks(2)
def test_figures(rank):
    ddp = dist.DistributedDataParallel(make("unused"), find_unused_parameters=True)
    ddp._set_ddp_runtime_logging_sample_rate(2)
    with pytest.raises(ValueError, match="sample rate"):
        ddp._set_ddp_runtime_logging_sample_rate(0)
    before = ddp._get_ddp_logging_data()
    assert before["module_name"] == "Unused"
    assert (before["rank"], before["world_size"], before["iteration"]) == (rank, 2, 0)
    assert before["num_parameter_tensors"] == 4
    assert before["total_parameter_size_bytes"] == 4 * 2 * 28
    assert "avg_backward_comm_time" not in before
    for _ in range(3):
        ddp(batch(0, 2)).sum().backward()
    data = ddp._get_ddp_logging_data()
    assert data["iteration"] == 3
    assert data["unused_parameters"] == "never.weight, never.bias"
    assert data["unused_parameter_size"] == 4 * 28
    assert data["can_set_static_graph"] == data["has_rebuilt_buckets"] == 1
    for name in ("forward_compute_time", "backward_compute_time", "backward_comm_time"):
        assert data[f"avg_{name}"] > 0
        assert data[name] > 0
    assert ddp._has_rebuilt_buckets
    assert ddp.bucket_bytes_cap == 25 << 20


@pytest.mark.ranks(4)
def test_other_groups(rank):
    halves = dist.new_group([0, 1]), dist.new_group([2, 3])
    group = halves[rank // 2]
    ddp = dist.DistributedDataParallel(nn.Linear(1, 1), process_group=group)
    x = torch.tensor([[float(rank)]])
    for expected in ([0.5, 2.5][rank // 2],) * 3:
        ddp.zero_grad()
        ddp(x).sum().backward()
        assert ddp.module.weight.grad.item() == expected
    ddp._update_process_group(dist.group.WORLD)
    for _ in range(3):
        ddp.zero_grad()
        ddp(x).sum().backward()
        assert ddp.module.weight.grad.item() == 1.5

    class Mesh:
        ndim, mesh = 1, torch.tensor([0, 1] if rank < 2 else [2, 3])

        def get_group(self, dim):
            return None

    assert dist.DistributedDataParallel(nn.Linear(1, 1), device_mesh=Mesh()).process_group is group
    with pytest.raises(RuntimeError, match="not both"):
        dist.DistributedDataParallel(nn.Linear(1, 1), process_group=group, device_mesh=Mesh())
    linear = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="come together"):
        dist.DistributedDataParallel(linear, param_to_hook_all_reduce=linear.bias)


class Wide(nn.Module):
    """Buckets of more than the mebibyte that the compiler's first one has."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(600, 600) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


@pytest.mark.ranks(2, may_leave=["environment"])
def test_compiled_before_and_after_wrapping(rank):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def wrap(model):
        return dist.DistributedDataParallel(model, bucket_cap_mb=1)

    x = torch.randn(2, 600, generator=torch.Generator().manual_seed(rank))
    base, found = Wide(), []
    for order in ("eager", "DDP(compiled)", "compiled(DDP)"):
        model = copy.deepcopy(base)
        for p in model.parameters():
            dist.broadcast(p.data, 0)
        graphs.clear()
        torch._dynamo.reset()
        if order == "compiled(DDP)":
            run = torch.compile(wrap(model), backend=backend)
        else:
            run = wrap(torch.compile(model, backend=backend) if order != "eager" else model)
        for _ in range(3):
            model.zero_grad()
            run(x).square().mean().backward()
        found.append([p.grad.clone() for p in model.parameters()])
        assert len(graphs) == (0 if order == "eager" else 3), order  # cut where buckets end
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])
    torch._dynamo.reset()
