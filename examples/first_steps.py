"""First steps: a model trained on two ranks, each with half of every batch.

Run it with ``gradsync run -n 2 examples/first_steps.py``.
"""

import torch
from torch import nn

import gradsync as dist


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # weights differ, until rank 0's are copied to all
    ddp = dist.DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(0)  # the same batches on every rank
    for step in range(300):
        x = torch.rand(64, 2, generator=data)
        target = x[:, :1] * x[:, 1:]  # learn to multiply
        share = slice(rank * 64 // size, (rank + 1) * 64 // size)
        loss = (ddp(x[share]) - target[share]).square().mean()
        optimizer.zero_grad()
        loss.backward()  # gradients are the mean over all ranks when this returns
        optimizer.step()
        if rank == 0 and step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
