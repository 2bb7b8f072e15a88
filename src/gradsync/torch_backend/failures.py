"""From gradsync's errors to torch's: same message, the original as the cause."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from gradsync.errors import (
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    RendezvousError,
    UsageError,
)

__all__ = ["torch_error"]

# The first that fits: a lost connection to a store is a network error before it is a store error.
_KINDS: tuple[tuple[type[DistError], Any], ...] = (
    (DistBackendError, dist.DistBackendError),
    (RendezvousError, dist.DistBackendError),
    (DistNetworkError, dist.DistNetworkError),
    (DistStoreError, dist.DistStoreError),
)


def torch_error(error: BaseException) -> BaseException:
    """Return the error as torch's users expect it.

    A mistake in the arguments stays what it is: a ``ValueError`` and a ``RuntimeError`` at once,
    which is what torch raises for some and for others.

    >>> torch_error(DistNetworkError("refused"))
    DistNetworkError('refused')
    >>> torch_error(UsageError("no rank 7")).__class__.__name__
    'UsageError'
    """
    if isinstance(error, UsageError):
        return error
    for ours, theirs in _KINDS:
        if isinstance(error, ours):
            translated: BaseException = theirs(str(error))
            translated.__cause__ = error
            return translated
    return error
