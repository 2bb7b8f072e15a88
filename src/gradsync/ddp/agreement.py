"""All ranks use the same bucket plan: rank 0's, as each may have seen another order."""

from __future__ import annotations

import torch

from gradsync.ddp.planner import BucketPlan
from gradsync.group.group import ProcessGroup

__all__ = ["plan_of_rank_0"]


def plan_of_rank_0(group: ProcessGroup, plan: BucketPlan) -> BucketPlan:
    """Return the plan that rank 0 has given."""
    numbers = [x for bucket in plan for x in (len(bucket), *bucket)]
    length = torch.tensor([len(numbers)])
    group.broadcast(length, 0)
    own = group.rank() == 0
    values = torch.tensor(numbers) if own else torch.empty(int(length), dtype=torch.int64)
    group.broadcast(values, 0)
    return _unflatten([int(n) for n in values])


def _unflatten(numbers: list[int]) -> BucketPlan:
    buckets, at = [], 0
    while at < len(numbers):
        count = numbers[at]
        buckets.append(tuple(numbers[at + 1 : at + 1 + count]))
        at += 1 + count
    return tuple(buckets)
