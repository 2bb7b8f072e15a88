"""``DistributedDataParallel``: the wrapper with torch's name, arguments and attributes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn

from gradsync.ddp.comm_hooks.hook import CommHook
from gradsync.ddp.comm_hooks.register import builtin_hook
from gradsync.ddp.options import DDPOptions, bucket_limits, buffer_choices, check_devices
from gradsync.ddp.reducer import Reducer
from gradsync.ddp.replica import Replica, named_parameters
from gradsync.ddp.tensors_in import map_tensors
from gradsync.errors import UsageError
from gradsync.group.group import ProcessGroup
from gradsync.group.world import default_group, resolve

__all__ = ["DistributedDataParallel"]

Batch = TypeVar("Batch")


class DistributedDataParallel(nn.Module):
    """Trains copies of a module on several ranks: gradients are averaged during backward.

    Every rank must construct it, with the same module. Parameters need not all be used.

    Args:
        module: what to train; rank 0's parameters and buffers are copied to all ranks.
        device_ids: for a module on one accelerator, that device: inputs are moved there.
        output_device: where outputs are; ``device_ids[0]`` unless given.
        dim: accepted for compatibility.
        broadcast_buffers: False: buffers are synchronised neither at first nor in forward.
        init_sync: False: neither compare the ranks' parameters nor copy rank 0's.
        process_group: the ranks; all of them unless given.
        bucket_cap_mb: MiB of gradients that travel together (25, the first 1).
        find_unused_parameters: accepted; unused parameters need no flag.
        check_reduction: accepted for compatibility.
        gradient_as_bucket_view: accepted; gradients always live in the buckets.
        static_graph: accepted; how often each gradient arrives is learned in the first backward.
        skip_all_reduce_unused_params: accepted.
        bucket_cap_mb_list: MiB of the first, second, ... bucket; the last repeats.
        batched_grad_copy: accepted; gradients are always brought in by the bucket.
        forward_sync_buffers: whether rank 0's buffers are copied to all ranks before each forward.
        strict: raise when a parameter gets no gradient, instead of completing the reduction.

    >>> import torch, gradsync
    >>> gradsync.init_process_group()
    >>> ddp = gradsync.DistributedDataParallel(torch.nn.Linear(2, 1))
    >>> ddp(torch.ones(4, 2)).sum().backward()
    >>> ddp.module.weight.grad
    tensor([[4., 4.]])
    >>> gradsync.destroy_process_group()
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        strict: bool = False,
    ) -> None:
        super().__init__()
        if check_reduction:
            warnings.warn("check_reduction is ignored", FutureWarning, stacklevel=2)
        ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        params = [param for _, param in named_parameters(module, ignored)]
        self.device_ids, self.output_device = check_devices(params, device_ids, output_device)
        init_buffers, forward_buffers = buffer_choices(broadcast_buffers, forward_sync_buffers)
        options = DDPOptions(
            limits=bucket_limits(bucket_cap_mb, bucket_cap_mb_list),
            init_sync=init_sync,
            init_sync_buffers=init_buffers,
            forward_sync_buffers=forward_buffers,
            strict=strict,
        )
        self.dim = dim
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.module = module
        self._replica = Replica(module, resolve(process_group), options)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; its backward will synchronise, unless in ``no_sync()``."""
        replica = self._replica
        replica.before_forward()
        if self.device_ids is not None:
            target = self.device_ids[0]
            inputs, kwargs = map_tensors(lambda t: t.to(target), (inputs, kwargs))
        output = self.module(*inputs, **kwargs)
        replica.after_forward(output)
        return output

    def no_sync(self) -> AbstractContextManager[None]:
        """Let the backwards of forwards in this block accumulate on this rank only."""
        return self._replica.no_sync()

    def accumulate(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield ``batches``; only the backward of the last one is synchronised.

        ::

            for inputs, labels in ddp.accumulate(micro_batches):
                loss(ddp(inputs), labels).backward()
            optimizer.step()
        """
        return self._replica.accumulate(batches)

    def weight(self, weight: float) -> None:
        """Give this rank's next backward a weight: the result is the weighted mean over ranks.

        With accumulation, call it before each backward: the mean is over the micro-batches of all
        ranks. Pass the number of samples or tokens that the loss is the mean of.
        """
        self._replica.weight(weight)

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Average buckets by ``hook(state, bucket)``, which returns a future of the result."""
        self._replica.register_comm_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self._replica.register_comm_hook(self.process_group, builtin_hook(comm_hook_type))

    # -- what torch users look at -----------------------------------------------------------------

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks that gradients are averaged over."""
        return self._replica.group

    @property
    def reducer(self) -> Reducer:
        """What averages the gradients."""
        return self._replica.reducer

    @property
    def device(self) -> torch.device:
        """Where the first parameter is."""
        return next(self.module.parameters()).device

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the backward of the next forward will synchronise."""
        return self._replica.sync_gradients

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._replica.sync_gradients = value

    @property
    def require_forward_param_sync(self) -> bool:
        """Whether the next forward synchronises buffers."""
        return self._replica.sync_buffers_next

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether buffers are synchronised in forward at all."""
        return self._replica.options.forward_sync_buffers

    @property
    def broadcast_buffers(self) -> bool:
        """The same, by its old name."""
        return self.forward_sync_buffers

    @property
    def bucket_bytes_cap(self) -> int:
        """Bytes of gradients that travel together."""
        return self._replica.options.cap_bytes

    @property
    def parameters_to_ignore(self) -> frozenset[str]:
        """Names of parameters and buffers that are left alone."""
        return self._replica.ignored

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        """The buffers that are synchronised."""
        return list(self._replica.buffer_sync.named().values())

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        return [param for _, param in named_parameters(self.module, self.parameters_to_ignore)]

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self.reducer.has_rebuilt

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, names: Iterable[str]
    ) -> None:
        """Leave these parameters and buffers alone; call it before wrapping."""
        module._ddp_params_and_buffers_to_ignore = list(names)  # type: ignore[assignment]

    # -- copies -----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not default_group():
            raise UsageError(
                "only a DistributedDataParallel on the default group can be pickled or copied; "
                "take its .module"
            )
        state = dict(self.__dict__)
        replica = state.pop("_replica")
        state["_saved"] = (replica.options, replica.ignored)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        options, ignored = state.pop("_saved")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._replica = Replica(self.module, resolve(None), options, ignored)
