"""Mixed precision: forward and backward in one type, averaging in another, weights in full.

Parameters are cast as part of the graph, so gradients reach the full-precision parameters by
themselves, and the module in between never sees them. It works on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from gradsync.ddp.comm_hooks.cast import cast_and_average
from gradsync.ddp.comm_hooks.hook import CommHook
from gradsync.ddp.sparse import sparse_parameters
from gradsync.ddp.tensors_in import map_tensors
from gradsync.errors import UsageError

__all__ = ["Caster", "MixedPrecision", "as_mixed_precision"]


@dataclass(frozen=True)
class MixedPrecision:
    """Which types to use; None leaves things as they are.

    Args:
        param_dtype: of parameters, and so of the computation.
        reduce_dtype: in which gradients are averaged; ``param_dtype`` unless given.
        buffer_dtype: of floating-point buffers.
        cast_root_forward_inputs: whether inputs are cast to ``param_dtype``.
        keep_low_precision_grads: leave ``grad`` in the type it was averaged in.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_root_forward_inputs: bool = True
    keep_low_precision_grads: bool = False


def as_mixed_precision(value: Any) -> MixedPrecision:
    """Return ``value``, or what one of torch's classes for the same says."""
    if isinstance(value, MixedPrecision):
        return value
    if not all(hasattr(value, name) for name in ("param_dtype", "reduce_dtype", "buffer_dtype")):
        raise UsageError(
            f"mixed_precision is a MixedPrecision, got {type(value).__name__}: {value!r}"
        )
    fields = MixedPrecision.__dataclass_fields__
    return MixedPrecision(**{n: getattr(value, n) for n in fields if hasattr(value, n)})


class Caster:
    """Runs a module in another precision."""

    def __init__(
        self, module: nn.Module, precision: MixedPrecision, ignored: frozenset[str]
    ) -> None:
        self._module = module
        self._precision = precision
        self._ignored = ignored
        self._sparse = sparse_parameters(module)
        for name, buffer in module.named_buffers():
            if precision.buffer_dtype and buffer.is_floating_point() and name not in ignored:
                buffer.data = buffer.to(precision.buffer_dtype)

    def __call__(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module on cast parameters and inputs."""
        dtype = self._precision.param_dtype
        if dtype is None:
            return self._module(*inputs, **kwargs)
        if self._precision.cast_root_forward_inputs:
            inputs, kwargs = map_tensors(_casting(dtype), (inputs, kwargs))
        named = self._module.named_parameters()
        cast, sparse = _casting(dtype), self._sparse
        params = {
            n: _CastSparse.cast(p, dtype) if id(p) in sparse else cast(p)
            for n, p in named
            if n not in self._ignored
        }
        return functional_call(self._module, params, inputs, kwargs)

    def comm_hook(self) -> CommHook | None:
        """Return the hook that averages in the reduction's type, None for that of the weights."""
        dtype = self._precision.reduce_dtype or self._precision.param_dtype
        return None if dtype is None else cast_and_average(dtype)

    def on_finish(self, params: list[nn.Parameter]) -> Callable[[], None] | None:
        """Return what leaves gradients in low precision, if that is wanted."""
        dtype = self._precision.reduce_dtype or self._precision.param_dtype
        if dtype is None or not self._precision.keep_low_precision_grads:
            return None

        def keep_low() -> None:
            for param in params:
                if param.grad is not None:
                    # A gradient of another type than its parameter's comes in by the back door.
                    low = param.grad.to(dtype)
                    param.grad = torch.empty_like(param)
                    param.grad.data = low

        return keep_low


class _CastSparse(torch.autograd.Function):
    """The same for a parameter with sparse gradients, which torch cannot cast back."""

    @classmethod
    def cast(cls, param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the parameter in another type."""
        cast: Any = cls.apply
        result: torch.Tensor = cast(param, dtype)
        return result

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = param.dtype
        return param.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.to(ctx.dtype), None


def _casting(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
