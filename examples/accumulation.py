"""Accumulation: several small batches a step, of different sizes, and the mean over all samples.

Run it with ``gradsync run -n 2 examples/accumulation.py``.
"""

import torch
from torch import nn

import gradsync as dist


def main() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)
    alone = nn.Linear(4, 1)
    ddp = dist.DistributedDataParallel(nn.Linear(4, 1))
    alone.load_state_dict(ddp.module.state_dict())

    # Rank 0 has batches of 2 and 3 samples, rank 1 of 5 and 1, and so on.
    sizes = [(2 + 3 * r, 3 if r == 0 else 1) for r in range(dist.get_world_size())]
    samples = torch.randn(sum(map(sum, sizes)), 4)
    start = sum(map(sum, sizes[:rank]))
    mine = samples[start : start + sum(sizes[rank])].split(sizes[rank])

    for batch in ddp.accumulate(mine):  # only the last backward communicates
        ddp.weight(len(batch))  # this batch counts for as many samples as it has
        ddp(batch).square().mean().backward()

    alone(samples).square().mean().backward()
    difference = (ddp.module.weight.grad - alone.weight.grad).abs().max().item()
    print(f"rank {rank}: differs from one process on all samples by {difference:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
