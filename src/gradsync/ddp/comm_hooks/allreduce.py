"""The plain average, as a hook: what happens without one, and a part for others."""

from __future__ import annotations

from typing import Any

import torch

from gradsync.base.dtypes import ReduceOp
from gradsync.ddp.comm_hooks.hook import GradBucket
from gradsync.group.group import ProcessGroup
from gradsync.group.world import resolve

__all__ = ["allreduce_hook", "mean", "noop_hook"]


def mean(group: ProcessGroup | None, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Start averaging ``tensor`` in place over the ranks of a group (all of them unless given)."""
    work: Any = resolve(group).all_reduce_async(tensor, ReduceOp.AVG)
    averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(_first)
    return averaged


def _first(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return done.value()[0]


def allreduce_hook(
    state: ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket over the ranks of ``state``, all of them if it is None."""
    return mean(state, bucket.buffer())


def noop_hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leave every rank its own gradients: for measurements, and for averaging elsewhere."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
