"""The weight of a rank's gradients in the mean, right under accumulation too.

Autograd adds each micro-batch's gradient to ``param.grad`` as it is. To make the sum a weighted
one, what is there already is scaled before the next backward: ``grad`` holds the weighted sum in
units of the last weight. A weight of zero throws that backward's gradient away, even if it is NaN.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import torch

from gradsync.errors import UsageError

__all__ = ["PassWeight", "is_zero"]


class PassWeight:
    """What a rank's gradients count for in the pass to come."""

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        self._params = params
        self.default: float | None = None
        """What a backward counts for that was given no weight; None: the plain mean."""
        self._next: float | None = None
        self._spent = False
        self._is_repeated = False
        self._sum = 0.0
        self._unit = 0.0
        self._kept: list[torch.Tensor | None] | None = None
        self._old: list[weakref.ref[torch.Tensor]] = []
        """Gradients, not zero, that were there before the first weight of this accumulation."""

    def set(self, weight: float, unseen: list[torch.Tensor]) -> None:
        """Give the next backward a weight; ``unseen`` are the gradients accumulated before it."""
        if not (math.isfinite(weight) and weight >= 0):
            raise UsageError(f"a weight is a finite number that is not negative, got {weight}")
        # One that is not zero ends the search, so this seldom looks at more than one.
        if all(map(is_zero, unseen)):
            self.end()  # they were dropped without having been synchronised
            grads = (param.grad for param in self._params if param.requires_grad)
            self._old = [weakref.ref(g) for g in grads if g is not None and not is_zero(g)]
        elif {id(old()) for old in self._old}.intersection(map(id, unseen)):
            raise UsageError(
                "gradients of an earlier step were there when this accumulation began, and would "
                "be weighted like its own; call zero_grad() before the first weight() of an "
                "accumulation"
            )
        elif self._next is None:
            raise UsageError(
                "a backward without a weight came before in this accumulation; "
                "call weight() before each one"
            )
        if not self._spent:
            self._sum -= self._next or 0.0  # given twice before one backward
        self._next, self._spent = float(weight), False
        self._sum += weight
        self._kept = None
        if weight == 0:
            self._kept = [None if p.grad is None else p.grad.clone() for p in self._params]
            return
        if self._unit and unseen:
            torch._foreach_mul_(unseen, self._unit / weight)
        self._unit = weight

    def begin(self) -> None:
        """Note that a pass has begun; it may turn out to accumulate nothing."""
        self._is_repeated = self._spent
        self._spent = self._next is not None

    def unspend(self) -> None:
        """Take that back: nothing was accumulated."""
        self._spent = self._is_repeated

    def check(self) -> None:
        """Raise if this pass, which has accumulated something, was given no weight of its own."""
        if self._is_repeated:
            raise UsageError(
                "weight() was called for an earlier backward of this accumulation, but not for "
                "this one; call it before each"
            )

    def accumulated(self, number: int) -> None:
        """Note a gradient that was accumulated without being synchronised."""
        if self._next is not None:
            self._spent = True
            if self._kept is not None:
                self._params[number].grad = self._kept[number]

    @property
    def is_plain(self) -> bool:
        """Whether gradients go out as they are, with the same weight as everybody's."""
        return self._next is None and self.default is None

    @property
    def discards(self) -> bool:
        """Whether this backward's gradients count for nothing."""
        return self._kept is not None

    def discard(self, numbers: Sequence[int]) -> None:
        """Take a weightless backward's gradients away again."""
        if self._kept is not None:
            for number in numbers:
                self._params[number].grad = self._kept[number]

    def apply(self, flat: torch.Tensor) -> float | None:
        """Turn units into a mean, in place; return the rank's weight, None if it was given none."""
        if self._next is None:
            return self.default
        if self._unit and self._unit != self._sum:
            flat.mul_(self._unit / self._sum)
        return self._sum

    def end(self) -> None:
        """Forget everything: the gradients have been synchronised."""
        self._next, self._spent, self._sum, self._unit = None, False, 0.0, 0.0
        self._is_repeated = False
        self._kept = None
        self._old = []


def is_zero(grad: torch.Tensor) -> bool:
    """Return whether there is nothing but zeros in a gradient."""
    values = grad._values() if grad.is_sparse else grad
    return not values.any()
