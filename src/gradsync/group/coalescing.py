"""Collectives of many tensors in few calls: small ones travel side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from gradsync.base.deadline import Timeout
from gradsync.base.dtypes import ReduceOp
from gradsync.errors import UsageError
from gradsync.group.buffers import check_shapes, check_writable
from gradsync.group.layouts import Layouts
from gradsync.group.packing import PACK_BYTES, check_tensors, joined, packs, spread
from gradsync.group.reducing import Reducing
from gradsync.group.reductions import Reduction
from gradsync.group.together import Step, Together

__all__ = ["Coalescing", "Tensors"]

Tensors = Sequence[torch.Tensor]


class Coalescing(Reducing):
    """Collectives that take lists of tensors; their dtypes may be mixed.

    Synchronous ones compare the ranks' lists before anything is sent; of asynchronous ones, tensors
    too large to be packed may be filled though lists differ.
    """

    def all_reduce_coalesced(
        self, tensors: Tensors, op: Reduction = ReduceOp.SUM, timeout: Timeout | None = None
    ) -> None:
        """Combine each of ``tensors`` over all ranks, in place.

        >>> import torch, gradsync
        >>> world = gradsync.create_world()
        >>> world.all_reduce_coalesced([torch.ones(2), torch.ones(3)])
        >>> world.close()
        """
        _carry_out(self._all_reduces(tensors, op, timeout))

    def all_reduce_coalesced_async(
        self, tensors: Tensors, op: Reduction = ReduceOp.SUM, timeout: Timeout | None = None
    ) -> Together:
        """Start ``all_reduce_coalesced`` and return its handle."""
        return Together(list(self._all_reduces(tensors, op, timeout)), list(tensors))

    def all_gather_coalesced(
        self, outputs: Sequence[Tensors], tensors: Tensors, timeout: Timeout | None = None
    ) -> None:
        """Fill ``outputs[r][i]`` with tensor ``i`` of rank ``r``."""
        _carry_out(self._all_gathers(outputs, tensors, timeout))

    def all_gather_coalesced_async(
        self, outputs: Sequence[Tensors], tensors: Tensors, timeout: Timeout | None = None
    ) -> Together:
        """Start ``all_gather_coalesced``; the handle's result has the outputs of rank 0 first."""
        steps = list(self._all_gathers(outputs, tensors, timeout))
        return Together(steps, [output for each in outputs for output in each])

    def all_gather_single_coalesced(
        self, outputs: Tensors, tensors: Tensors, timeout: Timeout | None = None
    ) -> None:
        """Do ``all_gather_single`` for each output and tensor."""
        _carry_out(self._all_gather_singles(outputs, tensors, timeout))

    def all_gather_single_coalesced_async(
        self, outputs: Tensors, tensors: Tensors, timeout: Timeout | None = None
    ) -> Together:
        """Start ``all_gather_single_coalesced`` and return its handle."""
        return Together(list(self._all_gather_singles(outputs, tensors, timeout)), list(outputs))

    def reduce_scatter_coalesced(
        self,
        outputs: Tensors,
        tensors: Tensors,
        op: Reduction = ReduceOp.SUM,
        timeout: Timeout | None = None,
    ) -> None:
        """Do ``reduce_scatter_single`` for each output and tensor."""
        _carry_out(self._reduce_scatters(outputs, tensors, op, timeout))

    def reduce_scatter_coalesced_async(
        self,
        outputs: Tensors,
        tensors: Tensors,
        op: Reduction = ReduceOp.SUM,
        timeout: Timeout | None = None,
    ) -> Together:
        """Start ``reduce_scatter_coalesced`` and return its handle."""
        steps = list(self._reduce_scatters(outputs, tensors, op, timeout))
        return Together(steps, list(outputs))

    def broadcast_coalesced(
        self,
        tensors: Tensors,
        root: int,
        buffer_bytes: int = PACK_BYTES,
        timeout: Timeout | None = None,
    ) -> None:
        """Overwrite ``tensors`` with those of rank ``root``, in buffers of that many bytes."""
        _carry_out(self._broadcasts(tensors, root, buffer_bytes, timeout))

    # -- the calls, each started when it is asked for ---------------------------------------------

    def _all_reduces(
        self, tensors: Tensors, op: Reduction, timeout: Timeout | None
    ) -> Iterator[Step]:
        name = "all_reduce_coalesced"
        _check(name, tensors)
        found = list(packs(tensors))
        yield from self._compare(name, tensors, found, timeout)
        for pack in found:
            chosen = [tensors[at] for at in pack]
            if len(pack) == 1:
                yield self.all_reduce_async(chosen[0], op, timeout), None
                continue
            flat = joined(chosen)
            yield self.all_reduce_async(flat, op, timeout), partial(spread, flat, chosen)

    def _all_gathers(
        self, outputs: Sequence[Tensors], tensors: Tensors, timeout: Timeout | None
    ) -> Iterator[Step]:
        name = "all_gather_coalesced"
        check_tensors(name, "the inputs", tensors)
        if not isinstance(outputs, list | tuple) or len(outputs) != self._size:
            raise UsageError(f"{name} needs a list of tensors for each of the {self._size} ranks")
        for each in outputs:
            _check(name, each, tensors)
            for output, tensor in zip(each, tensors, strict=True):
                check_shapes([output], tensor.shape, name)
        found = list(packs(tensors))
        yield from self._compare(name, tensors, found, timeout)
        for pack in found:
            flat = joined([tensors[at] for at in pack])
            rows = torch.empty(self._size, flat.numel(), dtype=flat.dtype)
            into = [[each[at] for at in pack] for each in outputs]
            work = self.all_gather_single_async(rows, flat.view(-1), timeout)
            yield work, partial(_spread_rows, rows, into)

    def _all_gather_singles(
        self, outputs: Tensors, tensors: Tensors, timeout: Timeout | None
    ) -> Iterator[Step]:
        name = "all_gather_single"
        _check(name, outputs, tensors)
        for output, tensor in zip(outputs, tensors, strict=True):
            self.check_stacked(name, output, tensor, ("an output", "its input"))
        found = list(packs(tensors))
        yield from self._compare(name, tensors, found, timeout)
        for pack in found:
            given, into = [tensors[at] for at in pack], [outputs[at] for at in pack]
            if len(pack) == 1:
                yield self.all_gather_single_async(into[0], given[0], timeout), None
                continue
            flat = joined(given)
            rows = torch.empty(self._size, flat.numel(), dtype=flat.dtype)
            work = self.all_gather_single_async(rows, flat.view(-1), timeout)
            yield work, partial(spread, rows, into, self._size)

    def _reduce_scatters(
        self, outputs: Tensors, tensors: Tensors, op: Reduction, timeout: Timeout | None
    ) -> Iterator[Step]:
        name = "reduce_scatter_coalesced"
        _check(name, outputs, tensors)
        for output, tensor in zip(outputs, tensors, strict=True):
            self.check_stacked(name, tensor, output, ("an input", "its output"))
        found = list(packs(outputs))
        yield from self._compare(name, outputs, found, timeout)
        for pack in found:
            given, into = [tensors[at] for at in pack], [outputs[at] for at in pack]
            if len(pack) == 1:
                yield self.reduce_scatter_single_async(into[0], given[0], op, timeout), None
                continue
            rows = joined(given, self._size)
            flat = torch.empty(rows.shape[1], dtype=rows.dtype)
            work = self.reduce_scatter_single_async(flat, rows, op, timeout)
            yield work, partial(spread, flat, into)

    def _broadcasts(
        self, tensors: Tensors, root: int, buffer_bytes: int, timeout: Timeout | None
    ) -> Iterator[Step]:
        name = "broadcast_coalesced"
        self._check_root(name, root)
        _check(name, tensors)
        found = list(packs(tensors, buffer_bytes))
        yield from self._compare(name, tensors, found, timeout)
        for pack in found:
            chosen = [tensors[at] for at in pack]
            if len(pack) == 1:
                yield self.broadcast_async(chosen[0], root, timeout), None
                continue
            flat = joined(chosen)
            yield self.broadcast_async(flat, root, timeout), partial(spread, flat, chosen)

    def _compare(
        self, name: str, tensors: Tensors, found: list[list[int]], timeout: Timeout | None
    ) -> Iterator[Step]:
        """Compare the ranks' lists if some of their tensors go together."""
        if self._size > 1 and any(len(pack) > 1 for pack in found):
            yield Layouts(self, name, tensors, timeout), None


def _carry_out(steps: Iterator[Step]) -> None:
    """Make calls one after the other: none before the ones before it have gone well."""
    for work, bring_home in steps:
        work.wait()
        if bring_home is not None:
            bring_home()


def _check(name: str, outputs: Tensors, inputs: Tensors | None = None) -> None:
    check_tensors(name, "the outputs", outputs)
    for tensor in outputs:
        check_writable(tensor, name)
    if inputs is None:
        return
    check_tensors(name, "the inputs", inputs)
    if len(inputs) != len(outputs):
        raise UsageError(f"{name}: {len(outputs)} outputs for {len(inputs)} inputs")


def _spread_rows(rows: torch.Tensor, outputs: Sequence[Tensors]) -> None:
    for row, into in zip(rows, outputs, strict=True):
        spread(row, into)
