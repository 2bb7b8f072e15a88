"""Optimizers that step as soon as gradients are averaged, at the end of backward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["step_attached_optimizers", "step_optimizer"]

# Where torch keeps the handles of the hooks that step each parameter by itself.
_TORCH = "torch.distributed.optim.apply_optimizer_in_backward"


def step_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return what steps ``optimizer`` at the end of each synchronised backward."""

    def step() -> None:
        optimizer.step()

    return step


def step_attached_optimizers(
    params: Iterable[torch.nn.Parameter],
) -> Callable[[], None] | None:
    """Take over the optimizers that torch's ``_apply_optimizer_in_backward`` attached.

    Returns what steps them with the averaged gradients, which are dropped afterwards; None when
    there are none.
    """
    attached = [param for param in params if hasattr(param, "_in_backward_optimizers")]
    if not attached:
        return None
    module: Any = sys.modules.get(_TORCH)
    handles = {} if module is None else module.param_to_optim_hook_handle_map
    for param in attached:
        for handle in handles.get(param, ()):
            handle.remove()

    def step() -> None:
        for param in attached:
            if param.grad is None:
                continue
            for optimizer in param._in_backward_optimizers:
                optimizer.step()
            param.grad = None

    return step
