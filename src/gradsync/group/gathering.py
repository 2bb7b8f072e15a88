"""Collectives that bring the ranks' tensors together or hand them out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradsync.backends.call import Buffer, Call
from gradsync.backends.ops import ALL_GATHER, BROADCAST, GATHER, SCATTER
from gradsync.backends.work import Work
from gradsync.base.deadline import Timeout
from gradsync.base.dtypes import ReduceOp
from gradsync.errors import UsageError
from gradsync.group.buffers import (
    check_dtypes,
    check_list,
    check_shapes,
    output_view,
    parts,
    view,
)
from gradsync.group.caller import Caller
from gradsync.group.work import Prepared

__all__ = ["Gathering"]


class Gathering(Caller):
    """broadcast, all_gather, gather and scatter; ranks are ranks of the group."""

    def broadcast(self, tensor: torch.Tensor, root: int, timeout: Timeout | None = None) -> None:
        """Overwrite ``tensor`` with that of rank ``root`` of this group."""
        if timeout is None and self._lane.broadcast(tensor, root):
            return
        self._carry_out(self._broadcast(tensor, root, timeout))

    def broadcast_async(
        self, tensor: torch.Tensor, root: int, timeout: Timeout | None = None
    ) -> Work:
        """Start ``broadcast`` and return its handle."""
        return self._start(self._broadcast(tensor, root, timeout))

    def _broadcast(self, tensor: torch.Tensor, root: int, timeout: Timeout | None) -> Prepared:
        self._check_root("broadcast", root)
        buffer = output_view(tensor, "broadcast")
        call = Call(BROADCAST, buffer, self._limit(timeout), ReduceOp.SUM, root)
        return Prepared(call, [tensor], ((tensor, buffer),))

    def all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        timeout: Timeout | None = None,
    ) -> None:
        """Fill ``outputs[r]`` with the tensor of rank ``r``.

        The ranks' tensors may differ in shape; ``outputs[r]`` has that of rank ``r``. ``tensor``
        may be this rank's own entry of ``outputs``.
        """
        if timeout is None and self._lane.all_gather(outputs, tensor):
            return
        self._carry_out(self._all_gather(outputs, tensor, timeout))

    def all_gather_async(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        timeout: Timeout | None = None,
    ) -> Work:
        """Start ``all_gather`` and return its handle."""
        return self._start(self._all_gather(outputs, tensor, timeout))

    def _all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        timeout: Timeout | None,
    ) -> Prepared:
        buffer = view(tensor, "all_gather")
        check_list(outputs, self._size, "all_gather", "outputs")
        check_dtypes(outputs, tensor.dtype, "all_gather")
        own = outputs[self._rank]
        if own.shape != tensor.shape:
            raise UsageError(
                f"all_gather: the output of rank {self._rank}, this one, has the shape "
                f"{tuple(own.shape)}, its tensor {tuple(tensor.shape)}"
            )
        into = tuple([output_view(output, "all_gather") for output in outputs])
        call = Call(ALL_GATHER, buffer, self._limit(timeout), outputs=into)
        return Prepared(call, list(outputs), tuple(zip(outputs, into, strict=True)))

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, timeout: Timeout | None = None
    ) -> None:
        """Fill ``output`` with the ranks' tensors one after the other along dimension 0.

        ``tensor`` may be this rank's own part of ``output``.
        """
        if timeout is None and self._lane.all_gather_single(output, tensor):
            return
        self._carry_out(self._all_gather_single(output, tensor, timeout))

    def all_gather_single_async(
        self, output: torch.Tensor, tensor: torch.Tensor, timeout: Timeout | None = None
    ) -> Work:
        """Start ``all_gather_single`` and return its handle."""
        return self._start(self._all_gather_single(output, tensor, timeout))

    def _all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, timeout: Timeout | None
    ) -> Prepared:
        self.check_stacked("all_gather_single", output, tensor, ("the output", "the input"))
        buffer = view(tensor, "all_gather_single")
        whole = output_view(output, "all_gather_single")
        into = parts(whole, [buffer.numel] * self._size, tensor.element_size())
        call = Call(ALL_GATHER, buffer, self._limit(timeout), outputs=into)
        return Prepared(call, [output], ((output, whole),))

    def gather(
        self,
        tensor: torch.Tensor,
        outputs: Sequence[torch.Tensor] | None,
        root: int,
        timeout: Timeout | None = None,
    ) -> None:
        """Fill ``outputs[r]`` of rank ``root`` with the tensor of rank ``r``.

        The other ranks give no outputs.
        """
        if timeout is None and self._lane.gather(tensor, outputs, root):
            return
        self._carry_out(self._gather(tensor, outputs, root, timeout))

    def gather_async(
        self,
        tensor: torch.Tensor,
        outputs: Sequence[torch.Tensor] | None,
        root: int,
        timeout: Timeout | None = None,
    ) -> Work:
        """Start ``gather`` and return its handle."""
        return self._start(self._gather(tensor, outputs, root, timeout))

    def _gather(
        self,
        tensor: torch.Tensor,
        outputs: Sequence[torch.Tensor] | None,
        root: int,
        timeout: Timeout | None,
    ) -> Prepared:
        self._check_root("gather", root)
        buffer = view(tensor, "gather")
        into: tuple[Buffer, ...] = ()
        if self._belongs_to_root("gather", "outputs", outputs, root):
            assert outputs is not None
            check_list(outputs, self._size, "gather", "outputs")
            check_dtypes(outputs, tensor.dtype, "gather")
            check_shapes(outputs, tensor.shape, "gather")
            into = tuple([output_view(output, "gather") for output in outputs])
        limit = self._limit(timeout)
        call = Call(GATHER, buffer, limit, ReduceOp.SUM, root, outputs=into)
        filled = list(outputs or ())
        return Prepared(call, filled, tuple(zip(filled, into, strict=True)))

    def scatter(
        self,
        tensor: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        root: int,
        timeout: Timeout | None = None,
    ) -> None:
        """Fill ``tensor`` of rank ``r`` with ``inputs[r]`` of rank ``root``.

        The other ranks give no inputs.
        """
        if timeout is None and self._lane.scatter(tensor, inputs, root):
            return
        self._carry_out(self._scatter(tensor, inputs, root, timeout))

    def scatter_async(
        self,
        tensor: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        root: int,
        timeout: Timeout | None = None,
    ) -> Work:
        """Start ``scatter`` and return its handle."""
        return self._start(self._scatter(tensor, inputs, root, timeout))

    def _scatter(
        self,
        tensor: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        root: int,
        timeout: Timeout | None,
    ) -> Prepared:
        self._check_root("scatter", root)
        buffer = output_view(tensor, "scatter")
        given: tuple[Buffer, ...] = ()
        if self._belongs_to_root("scatter", "inputs", inputs, root):
            assert inputs is not None
            check_list(inputs, self._size, "scatter", "inputs")
            check_dtypes(inputs, tensor.dtype, "scatter")
            check_shapes(inputs, tensor.shape, "scatter")
            given = tuple([view(piece, "scatter") for piece in inputs])
        limit = self._limit(timeout)
        call = Call(SCATTER, buffer, limit, ReduceOp.SUM, root, inputs=given)
        return Prepared(call, [tensor], ((tensor, buffer),))

    def _belongs_to_root(self, op_name: str, what: str, given: object, root: int) -> bool:
        """Return whether this rank is the root; raise when it gave a list and is not, or not."""
        is_root = self._rank == root
        if is_root and given is None:
            raise UsageError(f"{op_name}: rank {root} is the root and must give {what}")
        if not is_root and given:
            raise UsageError(
                f"{op_name}: only the root, rank {root}, gives {what}; this is rank {self._rank}"
            )
        return is_root
