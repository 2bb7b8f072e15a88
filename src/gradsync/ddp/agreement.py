"""All ranks use the same bucket plan: rank 0's, as each may have seen another order.

Where a rank finds the others at another call, ``explaining`` says what that may come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gradsync.ddp.planner import BucketPlan
from gradsync.errors import MismatchError
from gradsync.group.group import ProcessGroup

__all__ = ["WHILE_AVERAGING", "WHILE_COPYING_BUFFERS", "explaining", "plan_of_rank_0"]

WHILE_AVERAGING = (
    "This rank was averaging gradients, or planning their buckets. A rank that made another call "
    "may have frozen or converted parameters that the others have not, or have run a forward or a "
    "backward that they did not."
)
WHILE_COPYING_BUFFERS = (
    "This rank was copying buffers before a forward. All ranks must run the same forwards, in "
    "evaluation too; one that is for a rank alone goes to the module, not to the wrapper."
)


@contextmanager
def explaining(hint: str) -> Iterator[None]:
    """Add what a user may not guess to an error that tells of different calls on the ranks."""
    try:
        yield
    except MismatchError as error:
        error.args = (f"{error}\n{hint}",)
        raise


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
