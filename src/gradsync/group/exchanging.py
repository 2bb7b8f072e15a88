"""Collectives in which every rank sends something to every other."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import torch

from gradsync.backends.call import NO_BUFFER, Call
from gradsync.backends.ops import ALL_TO_ALL
from gradsync.backends.work import Work
from gradsync.base.deadline import Timeout
from gradsync.errors import UsageError
from gradsync.group.buffers import (
    check_dtypes,
    check_list,
    output_view,
    parts,
    view,
)
from gradsync.group.caller import Caller
from gradsync.group.work import Prepared

__all__ = ["Exchanging"]


class Exchanging(Caller):
    """all_to_all, with lists of tensors or with parts of one."""

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        timeout: Timeout | None = None,
    ) -> None:
        """Send ``inputs[r]`` to rank ``r`` and fill ``outputs[r]`` with what comes from it.

        Shapes are free, as long as each rank expects as many elements as are sent to it.
        """
        if timeout is None and self._lane.all_to_all(outputs, inputs):
            return
        self._carry_out(self._all_to_all(outputs, inputs, timeout))

    def all_to_all_async(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        timeout: Timeout | None = None,
    ) -> Work:
        """Start ``all_to_all`` and return its handle."""
        return self._start(self._all_to_all(outputs, inputs, timeout))

    def _all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        timeout: Timeout | None,
    ) -> Prepared:
        check_list(outputs, self._size, "all_to_all", "outputs")
        check_list(inputs, self._size, "all_to_all", "inputs")
        given = tuple([view(tensor, "all_to_all") for tensor in inputs])
        check_dtypes(inputs, inputs[0].dtype, "all_to_all")
        check_dtypes(outputs, inputs[0].dtype, "all_to_all")
        into = tuple([output_view(tensor, "all_to_all") for tensor in outputs])
        own = self._rank
        self._check_own("all_to_all", inputs[own].numel(), outputs[own].numel())
        call = Call(ALL_TO_ALL, NO_BUFFER, self._limit(timeout), inputs=given, outputs=into)
        return Prepared(call, list(outputs), tuple(zip(outputs, into, strict=True)))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        timeout: Timeout | None = None,
    ) -> None:
        """Send the r-th part of ``tensor`` to rank ``r``, and fill ``output`` with what comes.

        The parts are along dimension 0, in rank order: as many rows as the splits say, or equal
        ones.
        """
        even = output_splits is None and input_splits is None
        if even and timeout is None and self._lane.all_to_all_single(output, tensor):
            return
        self._carry_out(
            self._all_to_all_single(output, tensor, output_splits, input_splits, timeout)
        )

    def all_to_all_single_async(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        timeout: Timeout | None = None,
    ) -> Work:
        """Start ``all_to_all_single`` and return its handle."""
        return self._start(
            self._all_to_all_single(output, tensor, output_splits, input_splits, timeout)
        )

    def _all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        timeout: Timeout | None,
    ) -> Prepared:
        name = "all_to_all_single"
        given = view(tensor, name)
        whole = output_view(output, name)
        check_dtypes((output,), tensor.dtype, name)
        if output.shape[1:] != tensor.shape[1:]:
            raise UsageError(
                f"{name}: the tensors may differ in dimension 0 only, but the output has the shape "
                f"{tuple(output.shape)}, the input {tuple(tensor.shape)}"
            )
        received = self._part_counts("output", output, output_splits)
        sent = self._part_counts("input", tensor, input_splits)
        self._check_own(name, sent[self._rank], received[self._rank])
        width = tensor.element_size()
        call = Call(
            ALL_TO_ALL,
            NO_BUFFER,
            self._limit(timeout),
            inputs=parts(given, sent, width),
            outputs=parts(whole, received, width),
        )
        return Prepared(call, [output], ((output, whole),))

    def _check_own(self, name: str, sent: int, received: int) -> None:
        if sent != received:
            raise UsageError(
                f"{name}: rank {self._rank} gives itself {sent} elements and expects {received} "
                "of itself"
            )

    def _part_counts(
        self, what: str, tensor: torch.Tensor, splits: Sequence[int] | None
    ) -> list[int]:
        """Return how many elements each rank's part has."""
        if tensor.dim() == 0:
            raise UsageError(f"all_to_all_single: the {what} has no dimension to cut")
        rows, size = tensor.shape[0], self._size
        given = [] if splits is None else list(splits)
        if not given:
            if rows % size:
                raise UsageError(
                    f"all_to_all_single: {rows} rows of the {what} cannot be cut into {size} equal "
                    f"parts; give {what}_splits"
                )
            return [tensor.numel() // size] * size
        if any(not hasattr(count, "__index__") for count in given):
            raise TypeError(f"all_to_all_single: {what}_splits are ints, got {splits!r}")
        counts = [index(count) for count in given]
        if len(counts) != size or min(counts) < 0 or sum(counts) != rows:
            raise UsageError(
                f"all_to_all_single: {what}_splits must be {size} numbers, none negative, that add "
                f"up to the {rows} rows of the {what}, got {counts}"
            )
        row = tensor.numel() // rows if rows else 0
        return [count * row for count in counts]
