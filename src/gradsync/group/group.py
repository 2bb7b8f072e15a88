"""``ProcessGroup``: the ranks that do things together, and the one door to the backend below."""

from __future__ import annotations

import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

import torch

from gradsync.backends.backend import Backend
from gradsync.backends.call import Call
from gradsync.backends.lane import CLOSED_LANE, open_lane
from gradsync.backends.work import Work
from gradsync.base.deadline import Timeout, limit_of
from gradsync.errors import UsageError
from gradsync.group.adopting import adopt, leave_private
from gradsync.group.barriers import Barriers
from gradsync.group.board import BucketBoard
from gradsync.group.capture import Capture
from gradsync.group.coalescing import Coalescing
from gradsync.group.exchanging import Exchanging
from gradsync.group.hooks import Hooks
from gradsync.group.members import Members
from gradsync.group.pickling import Pickling
from gradsync.group.sharing import Sharing

__all__ = ["ProcessGroup"]


class ProcessGroup(Coalescing, Exchanging, Pickling, Sharing, Barriers):
    """Ranks that call collectives together.

    Every rank must make the same calls in the same order. A call that cannot be carried out raises
    a ``DistBackendError`` that names the rank at fault.
    """

    def __init__(
        self,
        backend: Backend,
        members: Members,
        *,
        timeout_s: float,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._backend: Backend | None = backend
        self.members = members
        self.group_name = members.name
        self.group_desc = members.description
        self._rank = members.rank
        self._size = len(members.ranks)
        self.backend_config = f"cpu:{backend.name}"
        """Which backend serves which kind of device."""
        self.parent: weakref.ref[ProcessGroup] | None = None
        """The world of a sub-group."""
        self._on_close = on_close
        self._owner = os.getpid()
        self.hooks = Hooks()
        self._capture: Capture | None = None
        self._adopts = True
        self._to_fill = set()
        self.set_timeout(timeout_s)
        self.children: list[ProcessGroup] = []
        """Sub-groups, when this is a world."""
        self.made: defaultdict[tuple[int, ...], int] = defaultdict(int)
        """Sub-groups made so far, for names that were never used: under () those that all ranks
        know of, under their ranks those that only their members do."""

    def rank(self) -> int:
        """Return the caller's rank in this group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def name(self) -> str:
        """Return the name of the backend that carries the calls out."""
        return self.backend.name

    @property
    def timeout_s(self) -> float:
        """How long a call may take unless it says otherwise."""
        return self._timeout_s

    def set_timeout(self, timeout: Timeout) -> None:
        """Set how long calls may take from now on, unless they say otherwise; zero for no limit."""
        self._timeout_s = limit_of(timeout)
        self._open_lane()

    def leave_tensors_private(self) -> None:
        """Do not move tensors that are reduced again and again into shared memory."""
        self._adopts = False
        self._open_lane()

    @property
    def capture(self) -> Capture | None:
        """Where an open ``coalescing_manager`` puts the calls that it puts off."""
        return self._capture

    @capture.setter
    def capture(self, capture: Capture | None) -> None:
        self._capture = capture
        self._open_lane()

    def _open_lane(self) -> None:
        """Open the lane, unless calls are put off: they must not slip by on it."""
        if self._capture is not None or self._backend is None:
            self._lane = CLOSED_LANE
            return
        observers = (self.hooks.before, self.hooks.after)
        adopting = partial(adopt, self._backend) if self._adopts else leave_private
        self._lane = open_lane(self._backend, self._timeout_s, observers, adopting, torch.Tensor)

    @property
    def backend(self) -> Backend:
        """The engine below; raises when the group has been destroyed."""
        if self._backend is None:
            raise UsageError(f"the group {self.group_name!r} has been destroyed")
        return self._backend

    def is_closed(self) -> bool:
        """Return whether the group has been destroyed."""
        return self._backend is None

    # -- the waist --------------------------------------------------------------------------------

    def submit(self, call: Call) -> Work:
        """Hand a call to the backend, with the hooks around it."""
        backend = self._backend
        if backend is None:
            backend = self.backend
        hooks = self.hooks
        if hooks.before:
            hooks.run(hooks.before, call)
        work = backend.submit(call)
        if hooks.after:
            work.on_done(lambda: hooks.run(hooks.after, call))
        return work

    # -- gradients --------------------------------------------------------------------------------

    def bucket_board(
        self,
        buckets: Sequence[torch.Tensor],
        parts: Sequence[int],
        timeout: Timeout | None = None,
    ) -> BucketBoard:
        """Set up a board for gradient buckets made by ``shared_empty``; a collective.

        ``parts`` says how many parameters each bucket holds.
        """
        return BucketBoard(self.backend, self.hooks, buckets, parts, self._limit(timeout))

    # -- end of life ------------------------------------------------------------------------------

    def abort(self, reason: str = "abort() was called") -> None:
        """Make every present and later call of every rank of the group fail."""
        self.backend.abort(reason)

    def leave(self, note: str = "") -> None:
        """Tell the other ranks that this one is going, and why if something went wrong."""
        for child in self.children:
            child.leave(note)
        if self._backend is not None:
            self._backend.leave(note)

    def close(self) -> None:
        """Leave the group and give its memory back; the object is of no use afterwards."""
        for child in reversed(self.children):
            child.close()
        self.children.clear()
        try:
            if self._backend is not None:
                self._backend.close()
        finally:  # Ctrl-C cuts it short, and the group is gone all the same
            self._backend = None
            self._lane = CLOSED_LANE
            on_close, self._on_close = self._on_close, None
            # A forked child that ends must not give its parent's place away.
            if on_close is not None and os.getpid() == self._owner:
                on_close()

    def shutdown(self) -> None:
        """Do the same, by torch's name."""
        self.close()

    def _limit(self, timeout: Timeout | None) -> float:
        return self._timeout_s if timeout is None else limit_of(timeout)

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.group_name!r} rank {self._rank} of {self._size}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ProcessGroup cannot be pickled or copied")
