"""The whole exception tree of gradsync; imports nothing.

::

    DistError (RuntimeError)
    ├─ DistBackendError       a collective could not be carried out; the group is broken
    │  ├─ MismatchError       ranks asked for different things
    │  ├─ CollectiveTimeout   (also TimeoutError) who arrived, who did not
    │  ├─ PeerLostError       a rank is gone
    │  ├─ AbortedError        someone aborted the group: who and why
    │  └─ BackendUnavailable  not built, not installed or not usable here
    ├─ DistNetworkError       sockets and engines
    ├─ DistStoreError         a store operation failed
    │  ├─ StoreTimeout        (also TimeoutError) names the missing keys
    │  ├─ StoreConnectionError (also DistNetworkError) the server is gone or refused us
    │  └─ QueueEmptyError     non-blocking pop of an empty queue
    ├─ RendezvousError        could not form the group: expected, present, missing
    ├─ RankFailedError        a rank started by spawn or run ended with an error
    ├─ UsageError (also ValueError)  the caller's mistake, found before anything was sent
    └─ InternalError          a bug in gradsync
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AbortedError",
    "BackendUnavailable",
    "CollectiveTimeout",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "InternalError",
    "MismatchError",
    "PeerLostError",
    "QueueEmptyError",
    "RankFailedError",
    "RendezvousError",
    "StoreConnectionError",
    "StoreTimeout",
    "UsageError",
]


class DistError(RuntimeError):
    """Root of every error that gradsync raises on purpose."""


class DistBackendError(DistError):
    """A collective could not be carried out, and its group is broken.

    The attributes repeat what the message says, for programs that react to it.
    """

    def __init__(
        self,
        message: str,
        *,
        group: str = "",
        op: str = "",
        seq: int = 0,
        rank: int = -1,
        ranks: Sequence[int] = (),
        timeout_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.group = group
        self.op = op
        self.seq = seq
        self.rank = rank
        self.ranks = tuple(ranks)
        """The ranks at fault: lost, missing or different."""
        self.timeout_s = timeout_s

    def __copy__(self) -> DistBackendError:
        """Return the same error without a traceback."""
        twin = type(self)(*self.args)
        twin.__dict__.update(self.__dict__)
        return twin


class MismatchError(DistBackendError):
    """The ranks of a group asked for different things in the same call."""


class CollectiveTimeout(DistBackendError, TimeoutError):
    """Not every rank arrived before the deadline; ``ranks`` holds the missing ones."""


class PeerLostError(DistBackendError):
    """A rank of the group is gone; ``ranks`` holds the lost ones."""


class AbortedError(DistBackendError):
    """A rank aborted the group on purpose."""


class BackendUnavailable(DistBackendError):
    """The backend is not built, not installed, or cannot serve these ranks."""


class DistNetworkError(DistError):
    """A socket or an engine's transport failed; the original error is the cause."""


class DistStoreError(DistError):
    """A key-value store could not do what it was asked."""


class StoreTimeout(DistStoreError, TimeoutError):
    """The awaited keys did not appear in time; the message names the missing ones."""


class StoreConnectionError(DistStoreError, DistNetworkError):
    """The store's server is gone, refused us, or is not the one we knew."""


class QueueEmptyError(DistStoreError):
    """A non-blocking ``queue_pop`` found nothing."""


class RendezvousError(DistError):
    """The ranks of a job could not find each other; says who came and who is missing."""


class RankFailedError(DistError):
    """A rank started by ``spawn`` or ``gradsync run`` ended with an error.

    ``rank``, ``exit_code`` (negative for a signal) and ``traceback_text`` are of the first failure.
    """

    def __init__(
        self, message: str, *, rank: int = -1, exit_code: int = 0, traceback_text: str = ""
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
        self.traceback_text = traceback_text


class UsageError(DistError, ValueError):
    """The caller's mistake, found before anything was sent to anyone."""


class InternalError(DistError):
    """A bug in gradsync: please report it with this message."""
