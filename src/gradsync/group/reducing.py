"""Collectives that combine the ranks' tensors: the result goes to all, to one, or in pieces."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradsync.backends.call import Call
from gradsync.backends.ops import ALL_REDUCE, REDUCE, REDUCE_SCATTER
from gradsync.backends.work import DoneWork, Work
from gradsync.base.deadline import Timeout
from gradsync.base.dtypes import ReduceOp
from gradsync.group.buffers import (
    check_dtypes,
    check_list,
    check_shapes,
    output_view,
    parts,
    view,
)
from gradsync.group.gathering import Gathering
from gradsync.group.reductions import Reduction, find_reduction, scaled
from gradsync.group.sparse import all_reduce_sparse, is_sparse
from gradsync.group.work import GroupWork, Prepared

__all__ = ["Reducing"]


class Reducing(Gathering):
    """all_reduce, reduce and reduce_scatter; ranks are ranks of the group."""

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: Reduction = ReduceOp.SUM,
        timeout: Timeout | None = None,
    ) -> None:
        """Combine the ranks' tensors element by element; every rank gets the result in place."""
        if timeout is None and self._lane.all_reduce(tensor, op):
            return
        if is_sparse(tensor):
            all_reduce_sparse(self, tensor, op, timeout)
            return
        self._carry_out(self._all_reduce(tensor, op, timeout))

    def all_reduce_async(
        self,
        tensor: torch.Tensor,
        op: Reduction = ReduceOp.SUM,
        timeout: Timeout | None = None,
    ) -> Work:
        """Start ``all_reduce`` and return its handle; sparse tensors are reduced before."""
        if is_sparse(tensor):
            all_reduce_sparse(self, tensor, op, timeout)
            return GroupWork(DoneWork([]), [tensor], ())
        return self._start(self._all_reduce(tensor, op, timeout))

    def _all_reduce(self, tensor: torch.Tensor, op: Reduction, timeout: Timeout | None) -> Prepared:
        buffer = output_view(tensor, "all_reduce")
        kind, factor = find_reduction(op)
        if factor is not None:
            buffer = view(scaled(tensor, factor, "all_reduce"), "all_reduce")
        call = Call(ALL_REDUCE, buffer, self._limit(timeout), kind)
        return Prepared(call, [tensor], ((tensor, buffer),))

    def reduce(
        self,
        tensor: torch.Tensor,
        root: int,
        op: Reduction = ReduceOp.SUM,
        timeout: Timeout | None = None,
    ) -> None:
        """Combine the ranks' tensors; rank ``root`` gets the result, others keep theirs."""
        if timeout is None and self._lane.reduce(tensor, root, op):
            return
        self._carry_out(self._reduce(tensor, root, op, timeout))

    def reduce_async(
        self,
        tensor: torch.Tensor,
        root: int,
        op: Reduction = ReduceOp.SUM,
        timeout: Timeout | None = None,
    ) -> Work:
        """Start ``reduce`` and return its handle."""
        return self._start(self._reduce(tensor, root, op, timeout))

    def _reduce(
        self,
        tensor: torch.Tensor,
        root: int,
        op: Reduction,
        timeout: Timeout | None,
    ) -> Prepared:
        self._check_root("reduce", root)
        buffer = view(tensor, "reduce")
        kind, factor = find_reduction(op)
        if factor is not None:
            buffer = view(scaled(tensor, factor, "reduce"), "reduce")
        call = Call(REDUCE, buffer, self._limit(timeout), kind, root)
        return Prepared(call, [tensor], ((tensor, buffer),) if self._rank == root else ())

    def reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: Reduction = ReduceOp.SUM,
        timeout: Timeout | None = None,
    ) -> None:
        """Combine the ranks' ``inputs`` one by one; rank ``r`` gets the result of ``inputs[r]``.

        They may differ in shape from each other, but not from rank to rank. ``output`` may be this
        rank's own entry of ``inputs``; the inputs are not written to otherwise.
        """
        if timeout is None and self._lane.reduce_scatter(output, inputs, op):
            return
        self._carry_out(self._reduce_scatter(output, inputs, op, timeout))

    def reduce_scatter_async(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: Reduction = ReduceOp.SUM,
        timeout: Timeout | None = None,
    ) -> Work:
        """Start ``reduce_scatter`` and return its handle."""
        return self._start(self._reduce_scatter(output, inputs, op, timeout))

    def _reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: Reduction,
        timeout: Timeout | None,
    ) -> Prepared:
        check_list(inputs, self._size, "reduce_scatter", "inputs")
        buffer = output_view(output, "reduce_scatter")
        check_dtypes(inputs, output.dtype, "reduce_scatter")
        check_shapes(inputs[self._rank : self._rank + 1], output.shape, "reduce_scatter")
        kind, factor = find_reduction(op)
        if factor is not None:
            inputs = [scaled(piece, factor, "reduce_scatter") for piece in inputs]
        given = tuple([view(piece, "reduce_scatter") for piece in inputs])
        limit = self._limit(timeout)
        call = Call(REDUCE_SCATTER, buffer, limit, kind, inputs=given)
        return Prepared(call, [output], ((output, buffer),))

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        op: Reduction = ReduceOp.SUM,
        timeout: Timeout | None = None,
    ) -> None:
        """Combine the ranks' tensors; each rank gets its part of the result along dimension 0.

        ``output`` may be this rank's own part of ``tensor``.
        """
        if timeout is None and self._lane.reduce_scatter_single(output, tensor, op):
            return
        self._carry_out(self._reduce_scatter_single(output, tensor, op, timeout))

    def reduce_scatter_single_async(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        op: Reduction = ReduceOp.SUM,
        timeout: Timeout | None = None,
    ) -> Work:
        """Start ``reduce_scatter_single`` and return its handle."""
        return self._start(self._reduce_scatter_single(output, tensor, op, timeout))

    def _reduce_scatter_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        op: Reduction,
        timeout: Timeout | None,
    ) -> Prepared:
        self.check_stacked("reduce_scatter_single", tensor, output, ("the input", "the output"))
        buffer = output_view(output, "reduce_scatter_single")
        kind, factor = find_reduction(op)
        if factor is not None:
            tensor = scaled(tensor, factor, "reduce_scatter_single")
        whole = view(tensor, "reduce_scatter_single")
        given = parts(whole, [buffer.numel] * self._size, tensor.element_size())
        limit = self._limit(timeout)
        call = Call(REDUCE_SCATTER, buffer, limit, kind, inputs=given)
        return Prepared(call, [output], ((output, buffer),))
