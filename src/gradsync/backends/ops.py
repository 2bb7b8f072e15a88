"""The table of operations: one row says what a call of it needs and which fields must agree.

Validation, the mismatch check and error messages read the row; adding an operation means a row
here, a method of ``ProcessGroup`` and an algorithm in ``native/algo``.
"""

from __future__ import annotations

from typing import NamedTuple

from gradsync.base.dtypes import DTYPE_NAMES, ReduceOp

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "ALL_TO_ALL",
    "BARRIER",
    "BROADCAST",
    "FINISH_BUCKETS",
    "GATHER",
    "OPS",
    "RECV",
    "REDUCE",
    "REDUCE_SCATTER",
    "SCATTER",
    "SEND",
    "TRANSFERS",
    "Op",
    "describe",
]


class Op(NamedTuple):
    """One operation; ``number`` is that of ``native/algo/algorithm.h``."""

    name: str
    number: int
    has_data: bool = True
    has_reduce: bool = False
    has_root: bool = False
    has_count: bool = True
    """Whether all ranks must give the same number of elements."""
    has_peer: bool = False
    """Whether it is between two ranks; only they call it, and nothing is announced."""


BARRIER = Op("barrier", 1, has_data=False)
BROADCAST = Op("broadcast", 2, has_root=True)
ALL_REDUCE = Op("all_reduce", 3, has_reduce=True)
REDUCE = Op("reduce", 4, has_reduce=True, has_root=True)
ALL_GATHER = Op("all_gather", 5)
GATHER = Op("gather", 6, has_root=True)
SCATTER = Op("scatter", 7, has_root=True)
REDUCE_SCATTER = Op("reduce_scatter", 8, has_reduce=True)
ALL_TO_ALL = Op("all_to_all", 9, has_count=False)
FINISH_BUCKETS = Op("finish_buckets", 10, has_data=False)

OPS = (
    BARRIER,
    BROADCAST,
    ALL_REDUCE,
    REDUCE,
    ALL_GATHER,
    GATHER,
    SCATTER,
    REDUCE_SCATTER,
    ALL_TO_ALL,
    FINISH_BUCKETS,
)

# Not announced, so their numbers are seen by observers only.
SEND = Op("send", 240, has_peer=True)
RECV = Op("recv", 241, has_peer=True)

TRANSFERS = (SEND, RECV)

_UNEVEN = 1 << 24
"""An all_gather or a reduce_scatter of pieces that differ in size; the count is their sum."""

_BY_NUMBER = {op.number: op for op in OPS}


def describe(what: int, count: int) -> str:
    """Say in words what a rank announced; ``what`` is packed as in ``native/algo/algorithm.h``.

    >>> describe(3 | 1 << 8 | 4 << 16, 10)
    'all_reduce(float32[10], MAX)'
    >>> describe(9 | 1 << 8, 0)
    'all_to_all(float32)'
    """
    op = _BY_NUMBER.get(what & 0xFF)
    if op is None:
        return "nothing yet"
    parts = []
    if op.has_data:
        size = f"{count} in uneven pieces" if what & _UNEVEN else count
        parts.append(DTYPE_NAMES[what >> 8 & 0xFF] + (f"[{size}]" if op.has_count else ""))
    if op.has_reduce:
        parts.append(ReduceOp(what >> 16 & 0xFF).name)
    if op.has_root:
        parts.append(f"root={what >> 32}")
    return f"{op.name}({', '.join(parts)})"
