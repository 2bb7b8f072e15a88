"""Uneven data: ranks with different numbers of batches, and no hang at the end of the epoch.

Run it with ``gradsync run -n 2 examples/uneven_data.py``.
"""

import torch
from torch import nn

import gradsync as dist


def main() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    ddp = dist.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    batches = torch.randn(5 + 3 * rank, 8, 4)  # 5 on rank 0, 8 on rank 1, ...
    with ddp.join(divide_by_initial_world_size=False):  # the mean over those that still have some
        for batch in batches:
            optimizer.zero_grad()
            ddp(batch).square().mean().backward()
            optimizer.step()
    total = ddp.module.weight.sum().item()
    print(f"rank {rank}: {len(batches)} batches, sum of the weights {total:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
