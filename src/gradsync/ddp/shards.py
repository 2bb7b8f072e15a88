"""Parameters that tensor parallelism has cut up (torch's ``DTensor``): this rank's part of them.

Gradients are averaged over the ranks that hold the same part, so only that part is ever seen here.
What a cut-up tensor is, is told by its attributes: nothing of ``torch.distributed`` is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["LocalShard", "is_cut_up", "local_part"]


def is_cut_up(tensor: Any) -> bool:
    """Return whether a tensor is spread over the ranks of a mesh."""
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "placements")


def local_part(tensor: Any) -> torch.Tensor:
    """Return what this rank has of a tensor: all of it, unless it is cut up."""
    part: torch.Tensor = tensor._local_tensor if is_cut_up(tensor) else tensor
    return part


class LocalShard:
    """Stands for a cut-up parameter: a parameter in all that the reducer asks for."""

    def __init__(self, param: Any) -> None:
        self._param = param
        local = local_part(param)
        self.local = local
        self.shape, self.dtype, self.device = local.shape, local.dtype, local.device
        self.numel, self.element_size, self.stride = local.numel, local.element_size, local.stride
        self._view: torch.Tensor | None = None
        self._wrapped: Any = None

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter trains."""
        return bool(self._param.requires_grad)

    @property
    def grad(self) -> torch.Tensor | None:
        """This rank's part of the gradient."""
        grad = self._param.grad
        if grad is None:
            return None
        if grad is self._wrapped:
            return self._view
        if grad.placements != self._param.placements:
            # Autograd may leave sums to be taken later; what is averaged must be a gradient.
            grad = grad.redistribute(self._param.device_mesh, self._param.placements)
            self._param.grad = grad
        return local_part(grad)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None:
            self._param.grad = None
            return
        if value is not self._view:
            param = self._param
            self._view = value
            self._wrapped = type(param).from_local(
                value,
                param.device_mesh,
                param.placements,
                run_check=False,
                shape=param.shape,
                stride=param.stride(),
            )
        self._param.grad = self._wrapped

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> Any:
        """Call ``hook`` when the gradient has been accumulated."""
        return self._param.register_post_accumulate_grad_hook(hook)

    def __getattr__(self, name: str) -> Any:
        # What others have put on the parameter: optimizers that step in backward.
        return getattr(self._param, name)
