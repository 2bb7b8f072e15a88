"""torch's ways to train on several ranks, unchanged, give on gradsync what they give on Gloo."""

import os
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from beside_gloo import assert_same_as_on_gloo, run_on
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recomputed

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    # Work that nobody waits for stays registered in torch, and keeps Gloo's sockets open.
    pytest.mark.ranks(2, group=False, may_leave=["environment", "socket"]),
]

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def batch(rank, step):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def train(net, optimizer, rank, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        net(batch(rank, step)).square().mean().backward()
        optimizer.step()


def weights(net):
    found = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    return [p.detach().clone() for p in found]


def ddp(rank, size):
    out = []
    for options in ({}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005}):
        net = DistributedDataParallel(model(), **options)
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), rank)
        out += weights(net)
    hooked = DistributedDataParallel(model())
    hooked.register_comm_hook(
        None,
        lambda _, bucket: (
            dist.all_reduce(bucket.buffer(), async_op=True)
            .get_future()
            .then(lambda done: done.value()[0] / size)
        ),
    )
    train(hooked, torch.optim.SGD(hooked.parameters(), lr=0.1), rank)
    partial = DistributedDataParallel(
        nn.ModuleList([model(), model()]), find_unused_parameters=True
    )
    partial.module.forward = lambda x: partial.module[0](x)
    train(partial, torch.optim.SGD(partial.parameters(), lr=0.1), rank)
    return [*out, *weights(hooked), *weights(partial)]


def has_shared_pages(tensor):
    middle = tensor.data_ptr() + tensor.nbytes // 2
    with open("/proc/self/maps") as file:
        for line in file:
            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
            if begin <= middle < end:
                return "gradsync-arena" in line
    raise AssertionError("not mapped at all")


def ddp_with_buckets_worth_moving(rank, size):
    out = []
    for as_view in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8192), nn.ReLU(), nn.Linear(8192, 8))
        net = DistributedDataParallel(net, gradient_as_bucket_view=as_view)
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), rank, steps=4)
        out += weights(net)
        if dist.get_backend() == "gradsync":
            assert has_shared_pages(net.module[2].weight.grad) == as_view
    return out


def gradients_that_others_know_of(rank, size):
    net = DistributedDataParallel(nn.Linear(64, 1024, bias=False), gradient_as_bucket_view=True)
    weight = net.module.weight
    seen = []

    def step(value):
        net.zero_grad(set_to_none=False)
        net(torch.full((1, 64), float(value))).sum().backward()
        seen.append(weight.grad[0, 0].clone())

    for value in (1, 2, 3):
        step(value)
    array = weight.grad.numpy()
    step(4)
    junk = [torch.full((64, 1024), 777.0) for _ in range(3)]
    assert array[0, 0] == 4
    array *= 0.5
    seen.append(weight.grad[0, 0].clone())
    assert all((each == 777).all() for each in junk)
    child = os.fork()
    if child == 0:
        weight.grad.fill_(-5)
        os._exit(0)
    os.waitpid(child, 0)
    assert (weight.grad == 2).all()
    step(5)

    early = DistributedDataParallel(nn.Linear(64, 1024, bias=False), gradient_as_bucket_view=True)
    for value in range(4):
        early.zero_grad(set_to_none=False)
        early(torch.full((1, 64), float(value))).sum().backward()
        array = early.module.weight.grad.numpy()  # from the first one on
        assert array[0, 0] == value
    return seen


def ddp_with_hooks_that_wait_in_callbacks(rank, size):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

    net = DistributedDataParallel(model())
    state = power_sgd.PowerSGDState(
        None, 1, start_powerSGD_iter=2, min_compression_rate=0.5, warm_start=True
    )
    net.register_comm_hook(state, power_sgd.powerSGD_hook)
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), rank, steps=4)
    return weights(net)


def compiled_ddp(rank, size):
    net = DistributedDataParallel(nn.Sequential(model(), nn.BatchNorm1d(8)))
    compiled = torch.compile(net, backend="eager")
    train(compiled, torch.optim.SGD(net.parameters(), lr=0.1), rank)
    torch.compiler.reset()
    return weights(net)


class Checkpointed(nn.Module):
    """The backward of the layer in the middle is a pass of its own inside of the others'."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        first, middle, last = self.layers
        return last(recomputed(middle, first(x), use_reentrant=True))


def ddp_of_reentrant_checkpoints(rank, size):
    net = DistributedDataParallel(Checkpointed(), bucket_cap_mb=0.0001)
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), rank)
    return weights(net)


def embedding_with_sparse_gradients(rank, size):
    net = DistributedDataParallel(nn.Embedding(10, 4, sparse=True))
    for step in range(2):
        net(torch.tensor([rank, step + 3])).sum().backward()
    return [net.module.weight.grad.to_dense()]


def fsdp2(rank, size):
    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    train(net, optimizer, rank)
    net.set_allocate_memory_from_process_group_for_comm(True)  # shared memory on gradsync
    train(net, optimizer, rank)
    return weights(net)


def tensor_parallelism(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    net = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), 0)
    rows = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0)])
    return [*weights(net), rows.redistribute(mesh, [Shard(1)]).to_local(), rows.sum().full_tensor()]


def pipeline(rank, size):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    parts = [model()[:2], model()[2:]]
    stage = PipelineStage(parts[rank], rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, goal: (out - goal).square().mean())
    data = batch(0, 0)
    if rank == 0:
        schedule.step(data)
    else:
        schedule.step(target=data)
    return [p.grad for p in parts[rank].parameters()]


def zero_redundancy(rank, size):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

    net = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.1)
    train(net, optimizer, rank)
    return weights(net)


@pytest.mark.parametrize(
    "program",
    [
        ddp,
        compiled_ddp,
        ddp_of_reentrant_checkpoints,
        ddp_with_buckets_worth_moving,
        gradients_that_others_know_of,
        embedding_with_sparse_gradients,
        fsdp2,
        tensor_parallelism,
        pipeline,
        zero_redundancy,
    ],
    ids=lambda program: program.__name__,
)
def test_training_equals_that_on_gloo(store, rank, world_size, program):
    assert_same_as_on_gloo(store, rank, world_size, program, **CLOSE)


def test_hooks_may_wait_in_callbacks(store, rank, world_size):
    # Not beside Gloo, whose threads abort the process now and then when these callbacks go.
    found = run_on("gradsync", store, rank, world_size, ddp_with_hooks_that_wait_in_callbacks)
    store.set(f"weights {rank}", pickle.dumps([tensor.tolist() for tensor in found]))
    assert store.get("weights 0") == store.get("weights 1")
    torch.manual_seed(0)
    assert not torch.equal(found[0], weights(model())[0])


def test_checkpoint_written_on_gloo_is_read_on_gradsync_and_back(
    store, rank, world_size, shared, tmp_path
):
    folder = shared(lambda: str(tmp_path))

    def trained():
        net = fully_shard(model())
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), rank)
        return net

    def written(rank, size):
        net = trained()
        checkpoint.save({"net": net.state_dict()}, checkpoint_id=f"{folder}/{dist.get_backend()}")
        return weights(net)

    def read(rank, size):
        net = fully_shard(model())
        state = {"net": net.state_dict()}
        other = {"gloo": "gradsync", "gradsync": "gloo"}[dist.get_backend()]
        checkpoint.load(state, checkpoint_id=f"{folder}/{other}")
        net.load_state_dict(state["net"])
        return weights(net)

    expected = [run_on(name, store, rank, world_size, written) for name in ("gloo", "gradsync")]
    found = [run_on(name, store, rank, world_size, read) for name in ("gradsync", "gloo")]
    torch.testing.assert_close(found, expected, **CLOSE)


def test_only_the_reducers_own_calls_are_waited_for_at_the_end_of_backward(
    rank, world_size, store, monkeypatch
):
    from gradsync.torch_backend.pass_end import PassEnd

    noted = []
    note = PassEnd.note
    monkeypatch.setattr(PassEnd, "note", lambda self, work: (noted.append(work), note(self, work)))

    def program(rank, size):
        net = DistributedDataParallel(model())
        net(batch(rank, 0)).sum().backward()
        by_reducer = len(noted)
        # What a hook starts may well be for a call that another rank makes after its backward.
        started = []
        param = nn.Parameter(torch.ones(3))
        param.register_hook(lambda grad: started.append(dist.all_reduce(grad * 1, async_op=True)))
        if rank == 0:
            param.sum().backward()
            dist.barrier()
        else:
            dist.all_reduce(torch.ones(3))
            dist.barrier()
        for work in started:
            work.wait()
        return by_reducer, len(noted) - by_reducer

    assert run_on("gradsync", store, rank, world_size, program) == (1, 0)
