"""Handles as torch knows them, for calls that are done, in flight, or several in one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch._C import _distributed_c10d as c10d

from gradsync.backends.work import Work
from gradsync.errors import DistError
from gradsync.group.future import Outcome
from gradsync.torch_backend.failures import torch_error

__all__ = ["Done", "InFlight", "Several", "Tensors", "TorchWork"]

Tensors = Sequence[torch.Tensor]
TorchWork: TypeAlias = Any
"""A ``Work`` of torch's, ours or that of another backend."""

_Base: Any = c10d.Work


class Done(_Base):  # type: ignore[misc]
    """A call that was carried out while it was submitted."""

    def __init__(self, outputs: Tensors) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True; raise what went wrong."""
        return True

    def is_completed(self) -> bool:
        """Return whether the call is over, well or badly."""
        return True

    def is_success(self) -> bool:
        """Return whether the call is over and went well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return what went wrong, if something did."""
        return None

    def result(self) -> Tensors:
        """Return the output tensors."""
        return self._outputs

    def synchronize(self) -> None:
        """Wait, which is all that this can mean on a CPU."""
        self.wait()

    def source_rank(self) -> int:
        """Return where a message came from; only receives know."""
        raise RuntimeError("only a receive from any source knows its source rank")

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> torch.futures.Future[Tensors]:
        """Return a future of the output tensors."""
        future: torch.futures.Future[Tensors] = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class InFlight(Done):
    """A call that a worker carries out."""

    def __init__(
        self, work: Work, outputs: Tensors, on_done: Callable[[], object] | None = None
    ) -> None:
        super().__init__(outputs)
        self._work = work
        self._on_done = on_done
        if on_done is not None:
            work.on_done(on_done)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the call is done and return True; raise what went wrong."""
        try:
            # torch's zero stands for no limit of its own.
            self._work.wait(timeout or None)
        except DistError as error:
            raise torch_error(error) from error
        if self._on_done is not None:
            self._on_done()  # a waiter may come back before those who are told
        return True

    def is_completed(self) -> bool:
        """Return whether the call is over, well or badly."""
        return self._work.is_completed()

    def exception(self) -> BaseException | None:
        """Return what went wrong, if something did."""
        error = self._work.exception()
        return None if error is None else torch_error(error)

    def source_rank(self) -> int:
        """Return the rank in the group that a message came from."""
        return self._work.source_rank()

    def get_future(self) -> torch.futures.Future[Tensors]:
        """Return a future of the output tensors, or of the error."""
        future = Outcome(self.wait)

        def resolve() -> None:
            error = self.exception()
            if error is None:
                self._work.wait()  # brings results home into tensors with gaps
                future.set_result(self._outputs)
            else:
                future.fail(error)

        self._work.on_done(resolve)
        return future


class Several(Done):
    """Calls that torch asked for as one."""

    def __init__(self, works: Sequence[TorchWork], outputs: Tensors) -> None:
        super().__init__(outputs)
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until all are done and return True; raise what went wrong first."""
        for work in self._works:
            work.wait(timeout or timedelta(0))
        return True

    def is_completed(self) -> bool:
        """Return whether all are over."""
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        """Return what went wrong first."""
        return next((error for work in self._works if (error := work.exception())), None)

    def get_future(self) -> torch.futures.Future[Tensors]:
        """Return a future of the output tensors of all, or of the first error."""
        future = Outcome(self._finish)
        parts = torch.futures.collect_all([work.get_future() for work in self._works])

        def resolve(_: object) -> None:
            error = self.exception()
            if error is None:
                future.set_result(self._outputs)
            else:
                future.fail(error)

        parts.add_done_callback(resolve)
        return future

    def _finish(self) -> None:
        for work in self._works:
            with contextlib.suppress(RuntimeError):  # others may still be on their way
                work.wait()
