"""What torch asks of any process group besides collectives: names, limits, its end, its devices."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

from gradsync.errors import DistError, UsageError
from gradsync.group.group import ProcessGroup
from gradsync.torch_backend.arguments import Wanted
from gradsync.torch_backend.buckets import Buckets
from gradsync.torch_backend.cpu import CpuBackend
from gradsync.torch_backend.failures import torch_error
from gradsync.torch_backend.flight import open_recorder
from gradsync.torch_backend.forming import form
from gradsync.torch_backend.pass_end import PassEnd
from gradsync.torch_backend.register import NAME
from gradsync.torch_backend.work import Done, InFlight, Several, Tensors, TorchWork

__all__ = ["Caller"]

_CPU = torch.device("cpu")

# torch's stub has fewer forms of the calls than torch has.
_TorchGroup: Any = c10d.ProcessGroup


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a class handles its own operations: a fake tensor, say, has no memory."""
    return bool(torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python))


class Caller(_TorchGroup):  # type: ignore[misc]
    """The part of ``TorchProcessGroup`` that its collectives use."""

    def __init__(self, group: ProcessGroup, store: Any, timeout: timedelta) -> None:
        # Of torch's constructors only this one makes an object whose methods C++ finds.
        super().__init__(group.rank(), group.size())
        self.group = group
        """The group of gradsync that carries the calls out."""
        # Programs that were not written for shared memory may resize their storages.
        group.leave_tensors_private()
        self._store = store
        self._timeout = timeout
        self._new_timeout: timedelta | None = None
        self._calls = 0
        self._coalesced: list[TorchWork] | None = None
        self._name = self._description = ""
        self._recorder = open_recorder(group)
        self._pass_end = PassEnd()
        self._buckets = Buckets(group)
        self._has_other_devices = False
        self._register_backend(_CPU, _TorchGroup.BackendType.CUSTOM, None)

    def add_device(self, device: str, kind: Any, backend: Any) -> None:
        """Let ``backend`` of torch's serve tensors of another device."""
        self._register_backend(torch.device(device), kind, backend)
        self._has_other_devices = True

    # -- the way down -----------------------------------------------------------------------------

    def _elsewhere(self, tensor: torch.Tensor | None) -> bool:
        """Return whether a tensor is torch's to deal with: of another device, or without data."""
        if tensor is None:
            return False
        if tensor.is_cpu:
            return type(tensor) is not torch.Tensor and _is_wrapper(tensor)
        return self._has_other_devices or tensor.is_meta

    def _call(self, name: str, wanted: Wanted, outputs: Tensors, *arguments: Any) -> TorchWork:
        """Carry out, or start, the group's operation of this name."""
        self._calls += 1
        if _profiler_enabled():
            with record_function(f"{NAME}:{name}"):
                work = self._submit(name, wanted, outputs, arguments)
        else:
            work = self._submit(name, wanted, outputs, arguments)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _submit(
        self, name: str, wanted: Wanted, outputs: Tensors, arguments: tuple[Any, ...]
    ) -> TorchWork:
        # None is the limit that the group was made with, and the group's quickest way.
        limit = self._new_timeout if wanted.timeout is None else wanted.timeout
        recorder = self._recorder
        entry: Any = None
        if recorder is not None:
            own = self._timeout if limit is None else limit
            entry = recorder.begin(name, own.total_seconds(), outputs, arguments)
        try:
            if wanted.asynchronous:
                started = getattr(self.group, name + "_async")(*arguments, timeout=limit)
                if recorder is None:
                    return InFlight(started, outputs)
                return InFlight(started, outputs, partial(recorder.end_well, entry, started))
            getattr(self.group, name)(*arguments, timeout=limit)
        except DistError as error:
            raise torch_error(error) from error
        if recorder is not None:
            recorder.end(entry)
        return Done(outputs)

    @staticmethod
    def _several(outputs: Tensors, works: list[TorchWork]) -> TorchWork:
        return works[0] if len(works) == 1 else Several(works, outputs)

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type != "cpu":
            super()._start_coalescing(device)
        else:
            self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> TorchWork:
        if device.type != "cpu":
            ended: TorchWork = super()._end_coalescing(device)
            return ended
        works, self._coalesced = self._coalesced or [], None
        return Several(works, [tensor for work in works for tensor in work.result()])

    # -- names ------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        """Return "gradsync"."""
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name that torch gave the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Take the name that torch gives the group."""
        self._name = name
        if self._recorder is not None:
            self._recorder.name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return what the group is for."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Take what the group is for."""
        self._description = description
        if self._recorder is not None:
            self._recorder.description = description

    def get_group_store(self) -> Any:
        """Return the store that the ranks of this group share."""
        return self._store

    def _get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type == "cpu":
            return CpuBackend(self)  # made anew: kept here, it would keep the group alive
        return super()._get_backend(device)

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def _set_sequence_number_for_group(self) -> None:
        pass  # gradsync's calls are numbered from the start, on every rank alike

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        try:
            self.group.barrier()
        except DistError as error:
            raise torch_error(error) from error

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> Caller | None:
        """Form a group of some ranks of this one, all of which call this; others get None.

        torch's own method would look for a backend that it made itself, and crash.
        """
        ranks = sorted(new_ranks)
        if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.size())):
            raise UsageError(f"split_group takes different ranks of its group, got {new_ranks}")
        if self._has_other_devices:
            raise UsageError("split_group knows CPUs only here; use torch.distributed.new_group")
        if self.rank() not in ranks:
            return None
        name = group_name or f"{self._name}:split:{ranks}"
        store = c10d.PrefixStore(f"{name}/", self._store)
        limit = timeout or self._timeout
        place = ranks.index(self.rank()), len(ranks)
        world_ranks = tuple(self.group.members.world_rank(rank) for rank in ranks)
        try:
            group = form(
                store, *place, limit, name=name, world_ranks=world_ranks, parent=self.group
            )
        except DistError as error:
            raise torch_error(error) from error
        made = type(self)(group, store, limit)
        made.setGroupName(name)
        made.setGroupDesc(group_desc or f"{self._description}:split")
        return made

    # -- limits and the end -----------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of calls that have none of their own."""
        self._timeout = self._new_timeout = timeout
        super().set_timeout(timeout)

    def abort(self) -> None:
        """Make every present and later call of every rank of the group fail."""
        self.group.abort("torch.distributed aborted the group")
        if self._has_other_devices:
            super().abort()

    def shutdown(self) -> None:
        """Leave the group for good."""
        self.group.close()
        if self._has_other_devices:
            super().shutdown()
