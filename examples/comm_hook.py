"""A communication hook: gradients travel as bfloat16, and a hook of one's own measures them.

Run it with ``gradsync run -n 2 examples/comm_hook.py``.
"""

import torch
from torch import nn

import gradsync as dist
from gradsync.ddp.comm_hooks import allreduce_hook, bf16_compress_wrapper


def counting(state: dict[str, int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Count the bytes that would travel, then average as usual."""
    buffer = bucket.buffer()
    state["bytes"] += buffer.numel() * buffer.element_size()
    return allreduce_hook(None, bucket)


def main() -> None:
    dist.init_process_group()
    ddp = dist.DistributedDataParallel(nn.Linear(512, 512))
    state = {"bytes": 0}
    ddp.register_comm_hook(state, bf16_compress_wrapper(counting))  # hooks compose
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.randn(8, 512)).square().mean().backward()
    gradients = sum(p.numel() * p.element_size() for p in ddp.parameters())
    if dist.get_rank() == 0:
        print(f"{3 * gradients} bytes of gradients travelled as {state['bytes']}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
