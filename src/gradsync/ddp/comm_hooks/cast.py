"""Half the bytes: gradients travel as float16 or bfloat16, by themselves or around another hook."""

from __future__ import annotations

from typing import Any

import torch

from gradsync.ddp.comm_hooks.allreduce import mean
from gradsync.ddp.comm_hooks.hook import CommHook, GradBucket
from gradsync.group.group import ProcessGroup

__all__ = [
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "cast_and_average",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
]

Future = torch.futures.Future


def fp16_compress_hook(state: ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the bucket as float16."""
    return _averaged_as(torch.float16, state, bucket)


def bf16_compress_hook(state: ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the bucket as bfloat16."""
    return _averaged_as(torch.bfloat16, state, bucket)


def fp16_compress_wrapper(hook: CommHook) -> CommHook:
    """Return a hook that gives ``hook`` the gradients as float16 and casts its result back."""
    return _around(hook, torch.float16)


def bf16_compress_wrapper(hook: CommHook) -> CommHook:
    """Return a hook that gives ``hook`` the gradients as bfloat16 and casts its result back."""
    return _around(hook, torch.bfloat16)


def cast_and_average(dtype: torch.dtype) -> CommHook:
    """Return a hook that averages buckets as ``dtype``, whatever they are in."""

    def hook(state: ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
        return _averaged_as(dtype, state, bucket)

    return hook


def _averaged_as(
    dtype: torch.dtype, group: ProcessGroup | None, bucket: GradBucket
) -> Future[torch.Tensor]:
    buffer = bucket.buffer()
    if buffer.dtype == dtype:
        return mean(group, buffer)
    return mean(group, buffer.to(dtype)).then(lambda done: buffer.copy_(done.value()))


def _around(hook: CommHook, dtype: torch.dtype) -> CommHook:
    def wrapped(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        buffer = bucket.buffer()
        bucket.set_buffer(buffer.to(dtype))
        return hook(state, bucket).then(lambda done: buffer.copy_(done.value()))

    wrapped.__qualname__ = f"{dtype}:{getattr(hook, '__qualname__', hook)}".replace("torch.", "")
    return wrapped
