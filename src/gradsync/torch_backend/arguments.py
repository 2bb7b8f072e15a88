"""What torch's callers pass, brought into one form.

torch's own functions pass lists and an options object; its ``ProcessGroup`` also takes a single
tensor with the options spelled out, and so do programs that call it directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradsync.base.dtypes import ReduceOp
from gradsync.errors import UsageError

__all__ = ["Wanted", "flat", "listed", "nested", "only", "reduce_op"]

_REDUCE_OPS = {
    getattr(dist.ReduceOp, op.name): op for op in ReduceOp if op is not ReduceOp.PREMUL_SUM
}


class Wanted:
    """The options of a call.

    >>> Wanted(dist.ReduceOp.MAX, timedelta(seconds=3)).timeout
    datetime.timedelta(seconds=3)
    """

    __slots__ = ("asynchronous", "op", "root", "timeout")

    def __init__(self, *given: Any, **named: Any) -> None:
        self.timeout: timedelta | None = None  # the group's own
        self.asynchronous = True
        self.op: Any = None
        self.root = 0
        for value in (*given, *named.values()) if named else given:
            if hasattr(value, "asyncOp"):
                self._read(value)
            elif isinstance(value, timedelta):
                self.timeout = value
            elif isinstance(value, int):
                self.root = value
            elif value is not None:
                self.op = value

    def _read(self, options: Any) -> None:
        limit: timedelta = options.timeout
        if limit.days >= 0:  # -1 ms: not set
            self.timeout = limit
        self.asynchronous = options.asyncOp
        self.op = getattr(options, "reduceOp", None)
        self.root = getattr(options, "rootRank", 0)


def reduce_op(op: Any) -> Any:
    """Return gradsync's name of one of torch's reductions; a scaled sum stays what it is.

    >>> reduce_op(dist.ReduceOp.MAX)
    <ReduceOp.MAX: 4>
    """
    return ReduceOp.SUM if op is None else _REDUCE_OPS.get(getattr(op, "op", op), op)


def listed(tensors: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a list of tensors, also of a single one."""
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
    return [tensor if type(tensor) is torch.Tensor else _plain(tensor) for tensor in tensors]


def nested(lists: Sequence[Any]) -> list[torch.Tensor]:
    """Return the only list of a list of lists, or the list itself; empty for neither."""
    if lists and not isinstance(lists[0], torch.Tensor):
        if len(lists) != 1:
            raise UsageError(f"a rank has one device here, got lists for {len(lists)}")
        lists = lists[0]
    return listed(lists)


def only(tensors: torch.Tensor | Sequence[torch.Tensor], op_name: str) -> torch.Tensor:
    """Return the only tensor of a list."""
    if type(tensors) is list and len(tensors) == 1 and type(tensors[0]) is torch.Tensor:
        return tensors[0]
    found = listed(tensors)
    if len(found) != 1:
        raise UsageError(f"{op_name} takes one tensor of each rank, got {len(found)}")
    return found[0]


def flat(output: torch.Tensor, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both as vectors, unless the output has gaps: torch leaves shapes to its callers.

    >>> [each.shape for each in flat(torch.ones(4, 3), torch.ones(3, 2).t())]
    [torch.Size([12]), torch.Size([6])]
    """
    if not output.is_contiguous():
        return output, tensor
    return output.view(-1), tensor.reshape(-1)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose memory is meant, also for a result that is still on its way."""
    finish = getattr(tensor, "trigger_wait", None)
    return tensor if finish is None else finish()
