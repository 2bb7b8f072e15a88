"""``Arrivals``: the hooks that autograd calls, and what they count.

The hot path of training: a hook of the usual kind touches two lists and returns. What it cannot
decide alone (its bucket is full, no pass is open, it ran before) it hands to the reducer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Protocol, TypeAlias

import torch

from gradsync.errors import UsageError

__all__ = ["Arrivals", "Listener"]

# Between two gradients smaller than this there is no time to reduce anything worth a look.
_POLL_ELEMENTS = 1 << 16

# Which backward is running: a re-entrant checkpoint begins another one inside.
_current_task: Callable[[], int] = torch._C._current_graph_task_id

_identity = attrgetter("_cdata")

Hook: TypeAlias = Callable[[Any], None]


class Listener(Protocol):
    """What the hooks call when they cannot decide alone."""

    def try_open(self) -> bool:
        """Return whether a pass is open, opening one if that is due."""

    def bucket_full(self) -> None:
        """Take note that a bucket has all its gradients."""

    def accumulated(self, number: int) -> None:
        """Take note of a gradient outside of any pass."""

    def came_again(self, number: int, index: int) -> None:
        """Take note of a gradient that had been counted already."""

    def progress(self) -> None:
        """Use the moment to move communication along."""


class Arrivals:
    """Counts gradients in: by parameter, and down by bucket.

    Between passes every bucket's count is zero, so that the first gradient of a pass makes it
    negative and is noticed without another test on the hot path.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        count = len(params)
        self._params = params
        self._none = bytes(count)
        self._handles: list[Any] = []
        self._hooks: list[Any] = []
        self._hook_count = 0
        self._hook_ids: dict[int, int] = {}
        self._identities: list[int] = []
        self._sizes: list[int] = []
        self.fired = bytearray(count)
        """1 for each parameter whose gradient has arrived in this pass."""
        self.dirty = bytearray(count)
        """1 for each parameter with a gradient that the other ranks have not seen."""
        self.remaining: list[int] = []
        self.runs = [1] * count
        """How often each parameter's hook runs in a backward; learned in the first one."""
        self._to_run = [1] * count
        self.order: list[int] = []
        """The parameters in the order of arrival, while learning."""
        self.learning = True
        self._task = -1
        self._nested = False
        self._forwards = 0
        self._versions: list[int] | None = None

    # -- a pass -----------------------------------------------------------------------------------

    def learn(self) -> None:
        """Learn from the next pass in which order gradients arrive, and how often."""
        self.learning = True
        self.order.clear()

    def begin(self, hold: bool, forwards: int) -> None:
        """Make the counts ready for a pass; with ``hold``, no bucket is full before its end.

        ``forwards`` are waiting for their backward, and this one may be theirs, too. In re-entrant
        checkpoints, gradients then come more often than they did when there were fewer.
        """
        if self.learning:
            self._task, self._nested, self._forwards = _current_task(), False, forwards
        elif self._nested and forwards > self._forwards:
            hold = True
        # One more than will ever come.
        extra = 1 if self.learning or hold else 0
        self.remaining[:] = [size + extra for size in self._sizes]
        self.fired[:] = self._none
        if self.learning:
            self.order.clear()
            self.runs[:] = [1] * len(self.runs)
        self._to_run[:] = self.runs
        others = self._count_hooks() > len(self._handles)
        self._versions = [param._version for param in self._params] if others else None

    def check_untouched(self, names: Sequence[str]) -> None:
        """Raise if others' hooks have changed parameters in this pass: before the mean is known."""
        if self._versions is None:
            return
        states = zip(names, self._params, self._versions, strict=True)
        changed = [name for name, param, version in states if param._version != version]
        if changed:
            raise UsageError(
                f"hooks have changed parameters during backward: {', '.join(changed)}. An optimizer"
                " that steps in register_post_accumulate_grad_hook() sees the gradients of this "
                "rank alone, and the ranks diverge. Step after backward, or leave the optimizer to "
                "the wrapper: ddp._register_fused_optim(torch.optim.SGD, lr=0.1)."
            )

    def end(self) -> None:
        """Go back to the state between passes."""
        self.remaining[:] = [0] * len(self._sizes)
        self.fired[:] = self._none

    def any(self) -> bool:
        """Return whether a gradient has arrived in this pass."""
        return 1 in self.fired or self._to_run != self.runs

    def missing(self, numbers: Sequence[int]) -> bytes | None:
        """Return a 1 for each parameter without a new gradient, None if there are none."""
        fired, dirty = self.fired, self.dirty
        params = self._params
        found = bytes(not (fired[n] or (dirty[n] and params[n].grad is not None)) for n in numbers)
        return found if 1 in found else None

    def note_gradients(self, numbers: Iterable[int]) -> None:
        """Note the gradients that there are without our having seen them come."""
        for number in numbers:
            self.dirty[number] = self._params[number].grad is not None

    def unseen(self) -> list[torch.Tensor]:
        """Return the gradients that the other ranks have not seen."""
        grads = (param.grad for param, dirty in zip(self._params, self.dirty, strict=True) if dirty)
        return [grad for grad in grads if grad is not None]

    # -- hooks ------------------------------------------------------------------------------------

    def install(
        self, listener: Listener, buckets: Sequence[Sequence[int]], others: Sequence[int]
    ) -> None:
        """Put a hook on each parameter: of ``buckets``, and ``others`` that are in none."""
        self.remove()
        self._sizes = [len(bucket) for bucket in buckets]
        self.remaining[:] = [0] * len(buckets)
        # The hooks live as long as the parameters do and must not keep the reducer alive.
        proxy = weakref.proxy(listener)
        for index, bucket in enumerate(buckets):
            for number in bucket:
                self._hook(number, self._in_bucket(proxy, number, index))
        for number in others:
            self._hook(number, self._alone(proxy, number))
        params: Sequence[Any] = self._params
        tables = [param._post_accumulate_grad_hooks for param in params]
        self._hooks = [table for table in tables if table is not None]
        self._hook_count = self._count_hooks()
        self._anchor()

    def _count_hooks(self) -> int:
        return sum(map(len, self._hooks))

    def are_last(self) -> bool:
        """Return whether our hooks are there, and none behind them: it may change what was sent."""
        same = list(map(_identity, self._params)) == self._identities
        return same and self._count_hooks() == self._hook_count

    def _is_followed(self, number: int) -> bool:
        """Return whether a hook that runs behind ours may still change this gradient."""
        hooks: Any = self._params[number]._post_accumulate_grad_hooks
        return bool(hooks) and next(reversed(hooks)) != self._hook_ids[number]

    def _anchor(self) -> None:
        """Tell autograd of the tables of hooks that torch.utils.swap_tensors() has cut loose."""
        identities = list(map(_identity, self._params))
        params: Sequence[Any] = self._params
        for param, now, before in zip(params, identities, self._identities, strict=False):
            if now != before:
                whole = getattr(param, "_param", param)
                whole._post_accumulate_grad_hooks = whole._post_accumulate_grad_hooks
        self._identities = identities

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, number: int, hook: Hook) -> None:
        param: Any = self._params[number]
        if param.requires_grad:  # a frozen one only has an old gradient to send
            handle = param.register_post_accumulate_grad_hook(hook)
            self._handles.append(handle)
            self._hook_ids[number] = handle.id

    def _in_bucket(self, listener: Listener, number: int, index: int) -> Hook:
        fired, remaining = self.fired, self.remaining

        def on_grad(_: object) -> None:
            if fired[number]:
                listener.came_again(number, index)
                return
            fired[number] = 1
            left = remaining[index] - 1
            remaining[index] = left
            if left <= 0:
                unusual(left)

        def unusual(left: int) -> None:
            if left < 0:
                fired[number] = remaining[index] = 0
                if not listener.try_open():
                    self._keep(listener, number)
                    return
                fired[number] = 1
                remaining[index] -= 1
                if remaining[index] > 0:
                    return
            # What others do behind us is done when the next gradient comes, or at the end.
            if not self._is_followed(number):
                listener.bucket_full()

        def on_grad_of_large(param: object) -> None:
            on_grad(param)
            listener.progress()

        if self.learning:
            return self._learning(number, on_grad)
        if self.runs[number] > 1:
            return self._one_of_several(listener, number, on_grad)
        return on_grad_of_large if self._params[number].numel() >= _POLL_ELEMENTS else on_grad

    def _learning(self, number: int, on_grad: Hook) -> Hook:
        def hook(param: object) -> None:
            first = not self.fired[number]
            on_grad(param)
            self._nested |= _current_task() != self._task
            if first and self.fired[number]:
                self.order.append(number)
            elif not first:
                self.runs[number] += 1
                self._to_run[number] += 1

        return hook

    def _one_of_several(self, listener: Listener, number: int, on_grad: Hook) -> Hook:
        def hook(param: object) -> None:
            if not listener.try_open():
                self._keep(listener, number)
                return
            self.dirty[number] = 1
            self._to_run[number] -= 1
            if self._to_run[number] <= 0:
                on_grad(param)

        return hook

    def _alone(self, listener: Listener, number: int) -> Hook:
        def hook(_: object) -> None:
            if not listener.try_open():
                self._keep(listener, number)
                return
            if self.learning and not self.fired[number]:
                self.order.append(number)
            self.fired[number] = 1

        return hook

    def _keep(self, listener: Listener, number: int) -> None:
        self.dirty[number] = 1
        listener.accumulated(number)
