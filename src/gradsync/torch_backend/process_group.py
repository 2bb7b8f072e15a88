"""``TorchProcessGroup``: torch's interface of a process group on top of one of gradsync's.

Python code that calls a method gets ours at once; C++ code (DDP's reducer, functional collectives)
comes through torch's trampoline, which knows the operations that those need. Tensors of other
devices go to the backends that torch has for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from gradsync.group.compiling import keep_compiler_out
from gradsync.torch_backend.arguments import Wanted, flat, listed, nested, only, reduce_op
from gradsync.torch_backend.caller import Caller
from gradsync.torch_backend.monitored import monitored_barrier
from gradsync.torch_backend.pass_end import is_reducer
from gradsync.torch_backend.work import Done, InFlight, Several, TorchWork

__all__ = ["TorchProcessGroup"]

Tensor = torch.Tensor
Some = Tensor | Sequence[Tensor]
Lists = Sequence[Any]


class TorchProcessGroup(Caller):
    """A process group of torch's whose CPU tensors gradsync takes care of."""

    # -- one tensor for all -----------------------------------------------------------------------

    def allreduce(self, tensors: Some, *given: Any, **named: Any) -> TorchWork:
        """Combine a tensor over the ranks."""
        tensor = only(tensors, "all_reduce")
        if self._elsewhere(tensor):
            return super().allreduce([tensor], *given, **named)
        wanted = Wanted(*given, **named)
        of_reducer = wanted.asynchronous and is_reducer(1)
        if of_reducer:
            self._buckets.share(tensor)
        work = self._call("all_reduce", wanted, [tensor], tensor, reduce_op(wanted.op))
        if of_reducer:
            self._pass_end.note(work)
        return work

    def allreduce_coalesced(self, tensors: Sequence[Tensor], *given: Any) -> TorchWork:
        """Combine several tensors over the ranks."""
        found = listed(tensors)
        if found and self._elsewhere(found[0]):
            return super().allreduce_coalesced(found, *given)
        wanted = Wanted(*given)
        op = reduce_op(wanted.op)
        return self._several(
            found, [self._call("all_reduce", wanted, [each], each, op) for each in found]
        )

    def broadcast(self, tensors: Some, *given: Any, **named: Any) -> TorchWork:
        """Overwrite a tensor with that of one rank."""
        tensor = only(tensors, "broadcast")
        if self._elsewhere(tensor):
            return super().broadcast([tensor], *given, **named)
        wanted = Wanted(*given, **named)
        return self._call("broadcast", wanted, [tensor], tensor, wanted.root)

    def reduce(self, tensors: Some, *given: Any, **named: Any) -> TorchWork:
        """Combine a tensor over the ranks for one of them."""
        tensor = only(tensors, "reduce")
        if self._elsewhere(tensor):
            return super().reduce([tensor], *given, **named)
        wanted = Wanted(*given, **named)
        op = reduce_op(wanted.op)
        return self._call("reduce", wanted, [tensor], tensor, wanted.root, op)

    def barrier(self, *given: Any, **named: Any) -> TorchWork:
        """Wait until every rank has come here."""
        device = getattr(given[0], "device", None) if given else None
        if self._has_other_devices and device is not None and device.type != "cpu":
            return super().barrier(*given, **named)
        return self._call("barrier", Wanted(*given, **named), [])

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait until every rank has come here; the error names who has not."""
        limit = self._timeout if timeout is None else timeout
        monitored_barrier(self.group, limit, wait_all_ranks)

    # -- gathering and handing out ----------------------------------------------------------------

    def allgather(self, outputs: Lists, inputs: Some, *given: Any, **named: Any) -> TorchWork:
        """Bring the ranks' tensors to every rank."""
        tensor = only(inputs, "all_gather")
        if self._elsewhere(tensor):
            return super().allgather(outputs, inputs, *given, **named)
        into = nested(outputs)
        return self._call("all_gather", Wanted(*given, **named), into, into, tensor)

    def all_gather_single(self, output: Tensor, tensor: Tensor, *given: Any) -> TorchWork:
        """Bring the ranks' tensors to every rank, into one."""
        output, tensor = listed((output, tensor))
        if self._elsewhere(tensor):
            return super()._allgather_base(output, tensor, *given)
        return self._all_gather_single(output, tensor, Wanted(*given))

    _allgather_base = all_gather_single

    def allgather_coalesced(self, outputs: Lists, inputs: Sequence[Tensor], *given: Any) -> Any:
        """Bring several tensors of each rank to every rank."""
        found = listed(inputs)
        if found and self._elsewhere(found[0]):
            return super().allgather_coalesced(outputs, found, *given)
        wanted = Wanted(*given)
        # One list for each rank, with one entry for each tensor.
        turned = [listed(into) for into in zip(*outputs, strict=True)]
        works = [
            self._call("all_gather", wanted, into, into, tensor)
            for into, tensor in zip(turned, found, strict=True)
        ]
        return Several(works, outputs)  # its future's value has the caller's form

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *given: Any
    ) -> TorchWork:
        """Bring several tensors of each rank to every rank, each into one."""
        into, found = listed(outputs), listed(inputs)
        if found and self._elsewhere(found[0]):
            return super().all_gather_single_coalesced(into, found, *given)
        wanted = Wanted(*given)
        pairs = zip(into, found, strict=True)
        return self._several(into, [self._all_gather_single(*pair, wanted) for pair in pairs])

    def gather(self, outputs: Lists, inputs: Some, *given: Any, **named: Any) -> TorchWork:
        """Bring the ranks' tensors to one rank."""
        tensor = only(inputs, "gather")
        if self._elsewhere(tensor):
            return super().gather(outputs, inputs, *given, **named)
        wanted = Wanted(*given, **named)
        into = nested(outputs)
        return self._call("gather", wanted, into, tensor, into or None, wanted.root)

    def scatter(self, outputs: Some, inputs: Lists, *given: Any, **named: Any) -> TorchWork:
        """Hand the tensors of one rank out."""
        tensor = only(outputs, "scatter")
        if self._elsewhere(tensor):
            return super().scatter(outputs, inputs, *given, **named)
        wanted = Wanted(*given, **named)
        pieces = nested(inputs)
        return self._call("scatter", wanted, [tensor], tensor, pieces or None, wanted.root)

    # -- combining and handing out ----------------------------------------------------------------

    def reduce_scatter(self, outputs: Some, inputs: Lists, *given: Any, **named: Any) -> TorchWork:
        """Combine lists of tensors over the ranks; each gets its entry."""
        tensor = only(outputs, "reduce_scatter")
        if self._elsewhere(tensor):
            return super().reduce_scatter(outputs, inputs, *given, **named)
        wanted = Wanted(*given, **named)
        op = reduce_op(wanted.op)
        return self._call("reduce_scatter", wanted, [tensor], tensor, nested(inputs), op)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, *given: Any) -> TorchWork:
        """Combine a tensor over the ranks; each gets its part."""
        output, tensor = listed((output, tensor))
        if self._elsewhere(tensor):
            return super()._reduce_scatter_base(output, tensor, *given)
        return self._reduce_scatter_single(output, tensor, Wanted(*given))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *given: Any
    ) -> TorchWork:
        """Combine several tensors over the ranks; each gets its part of each."""
        into, found = listed(outputs), listed(inputs)
        if found and self._elsewhere(found[0]):
            return super().reduce_scatter_single_coalesced(into, found, *given)
        wanted = Wanted(*given)
        pairs = zip(into, found, strict=True)
        return self._several(into, [self._reduce_scatter_single(*pair, wanted) for pair in pairs])

    # -- exchanging -------------------------------------------------------------------------------

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *given: Any
    ) -> TorchWork:
        """Send a tensor to each rank and get one from each."""
        into, found = listed(outputs), listed(inputs)
        if found and self._elsewhere(found[0]):
            return super().alltoall(into, found, *given)
        return self._call("all_to_all", Wanted(*given), into, into, found)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        *given: Any,
    ) -> TorchWork:
        """Send a part of a tensor to each rank and get one from each."""
        output, tensor = listed((output, tensor))
        splits = list(output_splits), list(input_splits)
        if self._elsewhere(tensor):
            return super().all_to_all_single(output, tensor, *splits, *given)
        sizes = splits[0] or None, splits[1] or None
        wanted = Wanted(*given)
        return self._call("all_to_all_single", wanted, [output], output, tensor, *sizes)

    def send(self, tensors: Some, to: int, tag: int = 0) -> TorchWork:
        """Send a tensor to one rank."""
        tensor = only(tensors, "send")
        if self._elsewhere(tensor):
            return super().send([tensor], to, tag)
        return self._call("send", Wanted(), [tensor], tensor, to, tag)

    def recv(self, tensors: Some, source: int, tag: int = 0) -> TorchWork:
        """Receive a tensor from one rank."""
        tensor = only(tensors, "recv")
        if self._elsewhere(tensor):
            return super().recv([tensor], source, tag)
        return self._call("recv", Wanted(), [tensor], tensor, source, tag)

    def recv_anysource(self, tensors: Some, tag: int = 0) -> TorchWork:
        """Receive a tensor from whoever sends one first."""
        tensor = only(tensors, "recv")
        if self._elsewhere(tensor):
            return super().recv_anysource([tensor], tag)
        return self._call("recv", Wanted(), [tensor], tensor, None, tag)

    # -- shared parts -----------------------------------------------------------------------------

    def _all_gather_single(self, output: Tensor, tensor: Tensor, wanted: Wanted) -> TorchWork:
        return self._call("all_gather_single", wanted, [output], *flat(output, tensor))

    def _reduce_scatter_single(self, output: Tensor, tensor: Tensor, wanted: Wanted) -> TorchWork:
        op = reduce_op(wanted.op)
        return self._call("reduce_scatter_single", wanted, [output], *flat(output, tensor), op)


# Older torch knows these by other names only. Where it knows both, C++ asks for either, so with
# both overridden torch's own method would come back to ours, for ever.
for _new, _old in (
    ("all_to_all_single", "alltoall_base"),
    ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
):
    if not hasattr(torch.distributed.ProcessGroup, _new):
        setattr(TorchProcessGroup, _old, getattr(TorchProcessGroup, _new))

for _each in (TorchProcessGroup, Caller, Done, InFlight, Several):
    keep_compiler_out(vars(_each))
