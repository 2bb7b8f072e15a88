"""Futures of calls in flight, as torch knows them.

A future's callbacks run where its call was carried out, often in the group's only worker. One that
waits for a later call would wait for itself, if waiting were all it did: a wait here carries the
call out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Outcome"]

_Base: Any = torch.futures.Future


class Outcome(_Base):  # type: ignore[misc]
    """A future of what a call leads to; ``finish`` waits for the call and raises its error."""

    def __init__(self, finish: Callable[[], object]) -> None:
        super().__init__()
        self._finish = finish

    def wait(self) -> Any:
        """Carry the call out, or wait until others have, and return the value."""
        if not self.done():
            try:
                self._finish()
            except RuntimeError:
                pass  # the future has it, too
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Outcome:
        """Return a future of ``callback(self)``, which is carried out once the call is."""
        follower = Outcome(self._finish)

        def follow(_: object) -> None:
            try:
                value = callback(self)
            except RuntimeError as error:
                follower.fail(error)
            except Exception as error:
                follower.fail(_as_torch_has_it(error))
            else:
                follower.set_result(value)

        self.add_done_callback(follow)
        return follower

    def fail(self, error: BaseException) -> None:
        """Let every reader get an error."""

        def raise_it(_: object) -> None:
            raise error

        self._set_unwrap_func(raise_it)
        self.set_result(_Refusal(error))


def _as_torch_has_it(error: Exception) -> RuntimeError:
    found = RuntimeError(f"the callback of a future raised {type(error).__name__}: {error}")
    found.__cause__ = error
    return found


class _Refusal:
    """The value of a future whose call failed, for readers in C++, who do not look for an error.

    They ask Python for the tensors inside, which is done by pickling; that raises the error. Those
    who wait for a hook in Python take the value for a tensor, and then name it: its name raises.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._error

    def __str__(self) -> str:
        raise self._error
