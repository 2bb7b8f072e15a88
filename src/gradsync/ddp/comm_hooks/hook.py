"""What a communication hook is given, and the engine that runs one.

A hook is ``hook(state, bucket) -> Future[Tensor]``: it is called when a bucket is full, in bucket
order on every rank, and replaces the whole averaging, division included.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, get_origin

import torch

from gradsync.base.dtypes import ReduceOp
from gradsync.ddp.bucket import Bucket
from gradsync.errors import UsageError
from gradsync.group.group import ProcessGroup

__all__ = ["CommHook", "GradBucket", "HookEngine", "check_hook"]

CommHook: TypeAlias = Callable[[Any, "GradBucket"], "torch.futures.Future[torch.Tensor]"]


class GradBucket:
    """A bucket as a communication hook sees it."""

    def __init__(self, bucket: Bucket, is_last: bool) -> None:
        self._bucket = bucket
        self._is_last = is_last
        self._buffer = bucket.flat

    def index(self) -> int:
        """Return which bucket this is; they are reduced in this order."""
        return self._bucket.index

    def buffer(self) -> torch.Tensor:
        """Return the gradients as one flat tensor."""
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Make ``tensor`` the buffer for the rest of a chain of hooks."""
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients one by one: places in the buffer."""
        found, offset = [], 0
        for param in self._bucket.params:
            found.append(self._buffer[offset : offset + param.numel()].view(param.shape))
            offset += param.numel()
        return found

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, in the order of the gradients."""
        return list(self._bucket.params)

    def is_last(self) -> bool:
        """Return whether no other bucket follows in this backward."""
        return self._is_last


class HookEngine:
    """Averages buckets by a user's hook; one small call at the end says what nobody used."""

    def __init__(
        self, group: ProcessGroup, buckets: Sequence[Bucket], hook: CommHook, state: Any
    ) -> None:
        self._group = group
        self._buckets = buckets
        self._hook = hook
        self._state = state
        self._futures: list[tuple[Bucket, Any]] = []
        self._used = {bucket.index: bytes([1] * len(bucket.params)) for bucket in buckets}
        self._nobody: dict[int, list[int]] = {}
        self._share: float | None = None

    def lend(self, bucket: Bucket) -> bool:
        """Refuse: a hook sees all of the bucket."""
        return False

    def launch(self, bucket: Bucket, missing: bytes | None, weight: float | None) -> None:
        """Call the hook."""
        if weight is not None:
            # Scaled so that the plain mean, which the hook takes, is the weighted one.
            if self._share is None:
                total = torch.tensor([weight], dtype=torch.float64)
                self._group.all_reduce(total, ReduceOp.AVG)
                self._share = weight / (float(total) or 1.0)
            bucket.flat.mul_(self._share)
        count = len(bucket.params)
        self._used[bucket.index] = bytes(1 - m for m in missing or bytes(count))
        future = self._hook(self._state, GradBucket(bucket, bucket is self._buckets[-1]))
        if not isinstance(future, torch._C.Future):  # what then() returns is no more than that
            raise UsageError(
                f"a communication hook returns a torch.futures.Future, got {type(future).__name__}"
            )
        self._futures.append((bucket, future))

    def poll(self) -> None:
        """Do nothing: what the hook began makes progress by itself."""

    def finish(self) -> None:
        """Wait for the hooks' futures in their order and bring the results into the buckets."""
        futures, self._futures = self._futures, []
        self._share = None
        for bucket, future in futures:
            _bring_home(bucket, future.wait())
        used = torch.tensor([u for b in self._buckets for u in self._used[b.index]])
        if used.numel():
            used = used.to(torch.uint8)
            self._group.all_reduce(used, ReduceOp.MAX)
        flags, at = used.tolist(), 0
        for bucket in self._buckets:
            own = flags[at : at + len(bucket.params)]
            self._nobody[bucket.index] = [k for k, someone in enumerate(own) if not someone]
            at += len(bucket.params)

    def missing_everywhere(self, bucket: Bucket) -> Sequence[int]:
        """Return what the call at the end said."""
        return self._nobody[bucket.index]


def _bring_home(bucket: Bucket, value: Any) -> None:
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]  # what Work.get_future() gives
    if not isinstance(value, torch.Tensor):
        raise UsageError(
            f"a communication hook's future holds a tensor, got {type(value).__name__}"
        )
    if value.numel() != bucket.flat.numel():
        raise UsageError(
            f"a communication hook's tensor has as many elements as the bucket "
            f"({bucket.flat.numel()}), got {value.numel()}"
        )
    if value.data_ptr() != bucket.flat.data_ptr() or value.dtype != bucket.flat.dtype:
        bucket.flat.copy_(value.reshape(-1))


def check_hook(hook: Any) -> None:
    """Raise unless ``hook`` can be called as one, and its annotations, if any, say so too."""
    if not callable(hook):
        raise TypeError(f"a communication hook is a function, got {type(hook).__name__}: {hook!r}")
    try:
        signature = inspect.signature(hook, eval_str=True)
    except (AttributeError, NameError, TypeError, ValueError):  # annotations that mean nothing here
        return
    parameters = list(signature.parameters.values())
    empty = inspect.Parameter.empty
    if len(parameters) >= 2:
        given = parameters[1].annotation
        if given is not empty and getattr(given, "__name__", given) != "GradBucket":
            raise UsageError(f"a communication hook's bucket is a GradBucket, not {given}")
    returned = signature.return_annotation
    kind: Any = get_origin(returned) or returned
    if returned is not empty and not (isinstance(kind, type) and issubclass(kind, torch._C.Future)):
        raise UsageError(f"a communication hook returns a Future of a tensor, not {returned}")
