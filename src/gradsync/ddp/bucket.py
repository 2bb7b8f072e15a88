"""``Bucket``: gradients that travel together, in one flat piece of memory.

``param.grad`` is (or becomes, when the bucket is filled) a tensor on a slice of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, TypeAlias

import torch
from torch.utils.dlpack import from_dlpack

from gradsync.errors import UsageError

_NONES = repeat(None)
_requires_grad = attrgetter("requires_grad")
_address = torch.Tensor.data_ptr

__all__ = ["Allocate", "Bucket", "gradient_dtype", "slice_like"]

Allocate: TypeAlias = Callable[[int, torch.dtype], torch.Tensor]
"""Makes flat memory: (number of elements, dtype) -> tensor."""


class Bucket:
    """The gradients of some parameters, side by side.

    ``tail`` has one more element for each parameter, behind the gradients: there an engine sends
    along which of them were used.
    """

    def __init__(
        self,
        index: int,
        numbers: Sequence[int],
        params: Sequence[torch.nn.Parameter],
        allocate: Allocate,
    ) -> None:
        self.index = index
        self.numbers = tuple(numbers)
        self.params = list(params)
        count = sum(param.numel() for param in params)
        self.whole = allocate(count + len(self.params), gradient_dtype(params[0]))
        self.flat = self.whole[:count]
        self.tail = self.whole[count:]
        self.tail.fill_(1)
        self.views: list[torch.Tensor] = []
        self._make_views()
        self._kept: dict[int, tuple[torch.Tensor | None, torch.Tensor | None]] = {}

    def _make_views(self) -> None:
        # On a storage of their own: module.share_memory() moves that of each gradient it finds, and
        # engines know where this bucket is.
        own = from_dlpack(self.whole.view(torch.uint8)).view(self.whole.dtype)
        views, offset = [], 0
        for param in self.params:
            views.append(slice_like(own, offset, getattr(param, "local", param)))
            offset += param.numel()
        self.views = views
        self._pairs = list(zip(self.params, views, strict=True))
        self._is_plain = all(view.is_contiguous() for view in views)
        self._places = list(map(_address, views))

    def _stay_in_place(self) -> None:
        """Make new views if someone has moved one.

        As do ``param.grad.data = ...``, ``module.to()`` and ``module.share_memory()``.
        """
        if list(map(_address, self.views)) != self._places:
            self._make_views()

    def fill(self) -> bytes | None:
        """Bring the gradients in, all of them having arrived; return which had none after all."""
        self._stay_in_place()
        params, views = self.params, self.views
        grads = [param.grad for param in params]
        if any(map(is_, grads, _NONES)):  # autograd was given an undefined gradient
            return self.fill_partly(bytes(grad is None for grad in grads))
        if not any(map(is_, grads, views)):  # the usual case: all were set to None before
            _bring_in(views, grads)
            self.take_over()
            return None
        moved = [k for k, grad in enumerate(grads) if grad is not views[k]]
        if moved:
            _bring_in([views[k] for k in moved], [grads[k] for k in moved])
            for k in moved:
                params[k].grad = views[k]
        return None

    def to_lend(self) -> list[torch.Tensor] | None:
        """Return the gradients if none is in the bucket yet and all lie as they would in it."""
        self._stay_in_place()
        grads: list[Any] = [param.grad for param in self.params]
        if not self._is_plain or any(map(is_, grads, _NONES)) or any(map(is_, grads, self.views)):
            return None
        return None if any(map(_requires_grad, grads)) else grads

    def take_over(self) -> None:
        """Make the bucket hold the parameters' gradients: they were lent to whoever fills it."""
        for param, view in self._pairs:
            param.grad = view

    def fill_partly(self, missing: bytes) -> bytes:
        """Bring in what there is; ``missing`` has a 1 for each parameter without a gradient.

        An old gradient of such a parameter takes part like the others': where another rank has a
        new one, that came on top of the same old one.
        """
        self._stay_in_place()
        views, grads = [], []
        for position, (param, view) in enumerate(self._pairs):
            grad = param.grad
            if missing[position]:
                kept = grad.clone() if grad is view else None
                self._kept[position] = (grad, kept)
            if grad is None:
                view.zero_()
            elif grad is not view:
                views.append(view)
                grads.append(grad)
            if not missing[position]:
                param.grad = view
        if grads:
            _bring_in(views, grads)
        return missing

    def unused_here(self) -> list[int]:
        """Return the positions that had no gradient on this rank."""
        return list(self._kept)

    def settle(self, missing_everywhere: Sequence[int]) -> None:
        """Give parameters without a gradient here what the others found, or their own back."""
        for position, (grad, kept) in self._kept.items():
            param, view = self._pairs[position]
            if position not in missing_everywhere:
                param.grad = view
            elif kept is not None:
                view.copy_(kept)
            else:
                param.grad = grad
        self._kept.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of gradients."""
        return self.flat.numel() * self.flat.element_size()


def _bring_in(views: list[torch.Tensor], grads: list[Any]) -> None:
    if any(map(_requires_grad, grads)):
        raise UsageError(
            "backward(create_graph=True) through a replicated module is not supported: the higher "
            "derivatives would not be synchronised. Take the first derivatives with "
            "torch.autograd.grad(..., create_graph=True), then call backward()."
        )
    try:
        torch._foreach_copy_(views, grads)
    except RuntimeError:
        if not any(grad.is_sparse for grad in grads):
            raise
        # Made by a function: no module says beforehand that this gradient is sparse.
        torch._foreach_copy_(views, [g.to_dense() if g.is_sparse else g for g in grads])


def gradient_dtype(param: Any) -> torch.dtype:
    """Return the type of a parameter's gradient: the parameter's, unless the user has chosen."""
    chosen: torch.dtype | None = getattr(param, "grad_dtype", None)  # torch 2.10
    return chosen or param.dtype


def slice_like(flat: torch.Tensor, offset: int, param: torch.Tensor) -> torch.Tensor:
    """Return a tensor of ``param``'s shape and layout on the elements of ``flat`` at ``offset``.

    It is not a view as autograd understands it, so ``detach_()`` works on it as on any gradient.
    """
    like = torch.empty_like(param, device="meta", memory_format=torch.contiguous_format)
    strides = param.stride() if _is_dense(param) else like.stride()
    start = flat.storage_offset() + offset
    view = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return view.set_(flat.untyped_storage(), start, param.shape, strides)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill a piece of memory without gaps, in whatever order."""
    expected = 1
    places = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(place for place in places if place[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True
