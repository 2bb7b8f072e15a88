"""``Capture``: calls that a block puts off, to be made together at its end."""

from __future__ import annotations

import threading
from typing import Any

from gradsync.backends.work import Work
from gradsync.base.dtypes import ReduceOp
from gradsync.errors import UsageError
from gradsync.group.reductions import find_reduction

__all__ = ["Capture"]


class Capture:
    """The calls of one thread, all of one kind and with one reduction."""

    def __init__(self) -> None:
        self.name = ""
        self.op: Any = None
        self._reduction: tuple[ReduceOp, Any] | None = None
        self.calls: list[tuple[Any, ...]] = []
        self._thread = threading.get_ident()

    def is_mine(self) -> bool:
        """Return whether the calling thread is the one whose calls are put off."""
        return threading.get_ident() == self._thread

    def add(self, name: str, arguments: tuple[Any, ...], op: Any, async_op: bool) -> Work | None:
        """Put a call off."""
        # By what it means: "sum", torch's SUM and ours are one.
        reduction = None if op is None else find_reduction(op)
        if self.calls and (name, reduction) != (self.name, self._reduction):
            raise UsageError(
                f"one coalescing_manager takes calls of one kind and one reduction: {name} with "
                f"{op!r} came after {self.name} with {self.op!r}"
            )
        self.name, self.op, self._reduction = name, op, reduction
        self.calls.append(arguments)
        return _PutOff() if async_op else None


class _PutOff(Work):
    """The handle of a call that has not been made yet; all that can be done with it is wrong."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return super().__getattribute__(name)
        raise UsageError(
            f"{name} of a call inside a coalescing_manager: it is made at the end of the block; "
            f"wait for the manager instead"
        )
