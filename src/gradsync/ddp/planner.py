"""Which gradients travel together: pure functions from sizes and orders to a bucket plan.

No process group, no memory, no tensor: the same inputs give the same plan on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["BucketPlan", "TensorSpec", "assign", "plan_arrival", "plan_initial"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What planning needs to know of a parameter."""

    nbytes: int
    dtype: str
    device: str = "cpu"
    sparse: bool = False


BucketPlan = tuple[tuple[int, ...], ...]
"""Parameter numbers by bucket, in the order in which the buckets are reduced."""


def assign(
    tensors: Sequence[TensorSpec],
    limits: Sequence[int],
    order: Iterable[int] | None = None,
) -> tuple[list[list[int]], list[int]]:
    """Cut tensors into buckets of at least ``limits`` bytes; return them and each one's limit.

    Tensors are walked in ``order`` (their own unless given). Those of one dtype and device share
    buckets; a bucket is closed by the tensor that reaches its limit, and the next one of that kind
    has the next limit, the last limit repeating. A tensor with a sparse gradient is alone. Buckets
    come in the order of their first tensors, or, with ``order`` given, in that of their closing.

    >>> assign([TensorSpec(size, "float32") for size in (400, 800, 400, 200)], [400, 800])
    ([[0], [1], [2, 3]], [400, 800, 800])
    """
    if not limits:
        raise ValueError("assign needs at least one limit")
    closed: list[tuple[list[int], int]] = []
    opened: dict[tuple[str, str], list[int]] = {}
    filled: dict[tuple[str, str], int] = {}
    stage: dict[tuple[str, str], int] = {}
    for number in range(len(tensors)) if order is None else order:
        tensor = tensors[number]
        if tensor.sparse:
            closed.append(([number], 0))
            continue
        kind = (tensor.dtype, tensor.device)
        opened.setdefault(kind, []).append(number)
        filled[kind] = filled.get(kind, 0) + tensor.nbytes
        limit = limits[min(stage.get(kind, 0), len(limits) - 1)]
        if filled[kind] >= limit:
            closed.append((opened.pop(kind), limit))
            filled[kind] = 0
            stage[kind] = stage.get(kind, 0) + 1
    for kind, numbers in opened.items():
        closed.append((numbers, limits[min(stage.get(kind, 0), len(limits) - 1)]))
    if order is None:
        closed.sort(key=lambda bucket: min(bucket[0]))
    return [numbers for numbers, _ in closed], [limit for _, limit in closed]


def plan_initial(tensors: Sequence[TensorSpec], limits: Sequence[int]) -> BucketPlan:
    """Plan before anything is known: gradients are expected in reverse order of registration.

    >>> plan_initial([TensorSpec(400, "float32")] * 3, [400])
    ((2,), (1,), (0,))
    """
    numbers = range(len(tensors) - 1, -1, -1)
    return tuple(tuple(bucket) for bucket in assign(tensors, limits, numbers)[0])


def plan_arrival(
    tensors: Sequence[TensorSpec], limits: Sequence[int], arrived: Sequence[int]
) -> BucketPlan:
    """Plan in the order in which gradients arrived; those that did not arrive come last.

    >>> plan_arrival([TensorSpec(400, "float32")] * 3, [800], arrived=[1, 0])
    ((1, 0), (2,))
    """
    seen = set(arrived)
    order = [*arrived, *(n for n in range(len(tensors) - 1, -1, -1) if n not in seen)]
    return tuple(tuple(bucket) for bucket in assign(tensors, limits, order)[0])
