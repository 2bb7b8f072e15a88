import pytest, torch
import gradsync as dist
from torch import nn
from gradsync.testing import assert_same_on_all_ranks

@pytest.mark.ranks(2, backend=["shm","threads"])
def test_matches_one_process(rank, world_size):
    torch.manual_seed(0)
    make = lambda: nn.Sequential(nn.Linear(8,16), nn.ReLU(), nn.Linear(16,4))
    model = make(); alone = make(); alone.load_state_dict(model.state_dict())
    ddp = dist.DistributedDataParallel(model)
    o1 = torch.optim.SGD(ddp.parameters(), lr=.1); o2 = torch.optim.SGD(alone.parameters(), lr=.1)
    for step in range(4):
        g = torch.Generator().manual_seed(step)
        x = torch.randn(4*world_size, 8, generator=g)
        o1.zero_grad(); o2.zero_grad()
        ddp(x[rank*4:rank*4+4]).square().mean().backward()
        alone(x).square().mean().backward()
        for a,b in zip(model.parameters(), alone.parameters()):
            torch.testing.assert_close(a.grad,b.grad)
        o1.step(); o2.step()
    for p in model.parameters(): assert_same_on_all_ranks(p)
