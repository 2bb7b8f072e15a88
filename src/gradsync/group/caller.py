"""What the collectives of a group stand on: who we are, and the way to the backend."""

from __future__ import annotations

from functools import partial

import torch

from gradsync.backends.backend import Backend
from gradsync.backends.call import Call
from gradsync.backends.lane import Lane
from gradsync.backends.work import Work
from gradsync.base.deadline import Timeout
from gradsync.errors import UsageError
from gradsync.group.compiling import keep_compiler_out
from gradsync.group.in_flight import note_in_flight
from gradsync.group.overlaps import apart, kept
from gradsync.group.work import GroupWork, Prepared, bring_home

__all__ = ["Caller"]


class Caller:
    """The part of ``ProcessGroup`` that its families of collectives use."""

    _rank: int
    _size: int
    group_name: str
    _lane: Lane
    _to_fill: set[GroupWork]

    def __init_subclass__(cls) -> None:
        # Who one is may be asked in the middle of a compiled graph.
        keep_compiler_out(vars(cls), but=("rank", "size", "name"))

    @property
    def backend(self) -> Backend:
        """The engine below."""
        raise NotImplementedError

    def submit(self, call: Call) -> Work:
        """Hand a call to the backend."""
        raise NotImplementedError

    def _limit(self, timeout: Timeout | None) -> float:
        raise NotImplementedError

    def _carry_out(self, prepared: Prepared) -> None:
        self.submit(apart(prepared.call, self._rank))
        if prepared.copies:
            bring_home(prepared.copies)

    def _start(self, prepared: Prepared) -> Work:
        call = kept(apart(prepared.call, self._rank))
        work = self.submit(call._replace(asynchronous=True))
        handle = GroupWork(work, prepared.outputs, prepared.copies)
        if not call.op.has_peer:  # a message may wait for what comes after it
            note_in_flight(handle, prepared.outputs)
        if handle.is_to_fill():
            self._to_fill.add(handle)
            handle.on_done(partial(self._to_fill.discard, handle))
        return handle

    def _fill(self) -> None:
        """See to it that tensors with gaps hold the results of calls that are over."""
        for handle in tuple(self._to_fill):
            handle.is_completed()

    def _check_root(self, op_name: str, root: int) -> None:
        if not hasattr(root, "__index__"):
            raise TypeError(f"{op_name}: a rank is an int, got {type(root).__name__}: {root!r}")
        if not 0 <= root < self._size:
            raise UsageError(
                f"{op_name}: there is no rank {root} in the group {self.group_name!r} of "
                f"{self._size} ranks"
            )

    def check_stacked(
        self, op_name: str, whole: torch.Tensor, part: torch.Tensor, names: tuple[str, str]
    ) -> None:
        """Raise unless ``whole`` is the ranks' parts one after the other along dimension 0.

        A new dimension 0 with one entry for each rank is the same memory, so it will do too.
        """
        for tensor in (whole, part):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{op_name} needs a torch.Tensor, got {type(tensor).__name__}")
        if whole.dtype != part.dtype:
            raise UsageError(
                f"{op_name}: {names[0]} is of {whole.dtype}, {names[1]} of {part.dtype}"
            )
        stacked = (self._size, *part.shape)
        joined = (self._size * part.shape[0], *part.shape[1:]) if part.dim() else stacked
        if whole.shape not in (joined, stacked):
            raise UsageError(
                f"{op_name}: {names[0]} must have the shape {joined} (or {stacked}) when "
                f"{names[1]} has {tuple(part.shape)} and the group has {self._size} ranks, got "
                f"{tuple(whole.shape)}"
            )
