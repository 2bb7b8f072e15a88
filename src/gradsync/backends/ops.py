"""The table of operations: one row says what a call of it needs and which fields must agree.

Validation, the mismatch check and error messages read the row; adding an operation means a row
here, a method of ``ProcessGroup`` and an algorithm in ``native/algo``.
"""

from __future__ import annotations

from typing import NamedTuple

from gradsync.base.dtypes import DTYPE_NAMES, ReduceOp

__all__ = ["ALL_REDUCE", "BARRIER", "BROADCAST", "OPS", "Op", "describe"]


class Op(NamedTuple):
    """One operation; ``number`` is that of ``native/algo/algorithm.h``."""

    name: str
    number: int
    has_data: bool = True
    has_reduce: bool = False
    has_root: bool = False


BARRIER = Op("barrier", 1, has_data=False)
BROADCAST = Op("broadcast", 2, has_root=True)
ALL_REDUCE = Op("all_reduce", 3, has_reduce=True)

OPS = (BARRIER, BROADCAST, ALL_REDUCE)

_BY_NUMBER = {op.number: op for op in OPS}


def describe(what: int, count: int) -> str:
    """Say in words what a rank announced; ``what`` is packed as in ``native/algo/algorithm.h``.

    >>> describe(3 | 1 << 8 | 4 << 16, 10)
    'all_reduce(float32[10], MAX)'
    """
    op = _BY_NUMBER.get(what & 0xFF)
    if op is None:
        return "nothing yet"
    parts = []
    if op.has_data:
        parts.append(f"{DTYPE_NAMES[what >> 8 & 0xFF]}[{count}]")
    if op.has_reduce:
        parts.append(ReduceOp(what >> 16 & 0xFF).name)
    if op.has_root:
        parts.append(f"root={what >> 32}")
    return f"{op.name}({', '.join(parts)})"
