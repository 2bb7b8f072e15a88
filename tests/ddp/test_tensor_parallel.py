"""Tensor parallelism inside, data parallelism outside: parameters that are DTensors."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from gradsync import DistributedDataParallel
from gradsync.stores import to_torch


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.ranks(4, group=False, may_leave=["environment", "socket"])
def test_cut_up_parameters_are_averaged_over_the_other_dimension(store, rank, world_size):
    dist.init_process_group("gradsync", store=to_torch(store), rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net, alone = model(), model()
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if rank >= 2:  # the first replica's values count
        with torch.no_grad():
            net[2].bias.to_local().add_(1)
    ddp = DistributedDataParallel(net, device_mesh=mesh["dp"])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (ddp, alone)]
    half = slice(rank // 2 * 4, rank // 2 * 4 + 4)
    for step in range(6):
        data = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        for each, optimizer, rows in zip((ddp, alone), optimizers, (data[half], data), strict=True):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            each(rows).square().mean().backward()
            optimizer.step()
    for cut, whole in zip(net.parameters(), alone.parameters(), strict=True):
        assert isinstance(cut, DTensor)
        assert isinstance(cut.grad, DTensor)
        torch.testing.assert_close(cut.full_tensor(), whole.detach())
    dist.destroy_process_group()
