"""``DistributedDataParallel``: the wrapper with torch's name, arguments and attributes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn

from gradsync.ddp.buffers import BufferHook, BufferHookLocation
from gradsync.ddp.comm_hooks.hook import CommHook
from gradsync.ddp.comm_hooks.register import builtin_hook
from gradsync.ddp.compiling import ActiveInCompiler
from gradsync.ddp.figures import logging_data
from gradsync.ddp.in_backward import step_optimizer
from gradsync.ddp.join import Join, Joinable, JoinHook
from gradsync.ddp.mesh import choose_group
from gradsync.ddp.mixed_precision import Caster, as_mixed_precision
from gradsync.ddp.options import DDPOptions, bucket_limits, buffer_choices, check_devices
from gradsync.ddp.reducer import Reducer
from gradsync.ddp.replica import Replica, named_parameters
from gradsync.ddp.shadow import ReplicaJoinHook, announce_iteration
from gradsync.ddp.tensors_in import map_tensors
from gradsync.errors import UsageError
from gradsync.group.compiling import skip_in_compiler
from gradsync.group.group import ProcessGroup
from gradsync.group.world import default_group, resolve

__all__ = ["DistributedDataParallel"]

Batch = TypeVar("Batch")


class DistributedDataParallel(nn.Module, Joinable):
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
        bucket_cap_mb: MiB of gradients that travel together (1 in shared memory, else 25).
        find_unused_parameters: accepted; unused parameters need no flag.
        check_reduction: accepted for compatibility.
        gradient_as_bucket_view: accepted; gradients always live in the buckets.
        static_graph: accepted; how often each gradient arrives is learned in the first backward.
        delay_all_reduce_named_params: accepted, with ``param_to_hook_all_reduce``; all
            gradients are averaged by the end of backward in any case.
        mixed_precision: a ``MixedPrecision``.
        device_mesh: a mesh of one dimension, instead of ``process_group``.
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
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        strict: bool = False,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            raise UsageError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce come together"
            )
        group = choose_group(process_group, device_mesh)
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
        self.mixed_precision = mixed_precision
        self._start(group, options, ignored)

    def _start(
        self,
        group: ProcessGroup,
        options: DDPOptions,
        ignored: frozenset[str],
        is_copy: bool = False,
    ) -> None:
        replica = self._replica = Replica(self.module, group, options, ignored, is_copy)
        self._active = ActiveInCompiler(options.cap_bytes)
        self._caster = None
        if self.mixed_precision is not None:
            precision = as_mixed_precision(self.mixed_precision)
            self._caster = caster = Caster(self.module, precision, replica.ignored)
            self._average_in_precision()
            keep_low = caster.on_finish(replica.reducer.params)
            if keep_low is not None:
                replica.reducer.on_finish.append(keep_low)

    def _average_in_precision(self) -> None:
        hook = None if self._caster is None else self._caster.comm_hook()
        if hook is not None:
            self._replica.use_engine_of(self.process_group, hook)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; its backward will synchronise, unless in ``no_sync()``."""
        replica = self._replica
        if self._join_config.enable:
            Join.notify_join_context(self)
            replica.before_forward(announce_iteration(replica))
        else:
            replica.before_forward()
        if self.device_ids is not None:
            target = self.device_ids[0]
            inputs, kwargs = map_tensors(lambda t: t.to(target), (inputs, kwargs))
        with self._active:
            caster = self._caster
            output = caster(inputs, kwargs) if caster else self.module(*inputs, **kwargs)
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

    def _register_fused_optim(
        self, optim: type[torch.optim.Optimizer], *args: Any, optim_params: Any = None, **kw: Any
    ) -> None:
        """Step an optimizer of this class at the end of each synchronised backward."""
        params = self.reducer.params if optim_params is None else optim_params
        self.reducer.on_finish.append(step_optimizer(optim(params, *args, **kw)))

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Any,
        comm_hook_location: BufferHookLocation = BufferHookLocation.POST_FORWARD,
    ) -> None:
        """Synchronise buffers by ``hook(state, {name: buffer})``; futures are awaited."""
        if not callable(hook):
            raise TypeError(f"a buffer hook is a function, got {type(hook).__name__}")
        location = BufferHookLocation[comm_hook_location.name]
        self._replica.buffer_sync.hook = BufferHook(hook, state, location)

    def _update_process_group(self, new_process_group: ProcessGroup) -> None:
        """Go on with the ranks of another group."""
        self._replica.change_group(new_process_group)
        self._average_in_precision()

    # -- uneven inputs ----------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context for a loop in which ranks may run out of batches earlier than others.

        Gradients are divided by the number of all ranks, or by that of those with batches left.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what a rank without inputs does; made by ``Join``."""
        return ReplicaJoinHook(self._replica, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """Where the first parameter is."""
        return self.device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The ranks."""
        return self.process_group

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

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return figures of this module's training, under torch's names."""
        return logging_data(
            self._replica,
            device_ids=", ".join(map(str, self.device_ids or ())),
            output_device=-1 if self.output_device is None else str(self.output_device),
            find_unused_parameters=int(self.find_unused_parameters),
            gradient_as_bucket_view=1,
            static_graph=int(self.static_graph),
            join_uneven_inputs=int(self._join_config.enable),
        )

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Accept how often times are taken; here it is always."""
        if sample_rate < 1:
            raise UsageError(f"a sample rate is a number of iterations, got {sample_rate}")

    def _set_static_graph(self) -> None:
        """Accept that the graph does not change; nothing depends on it."""
        self.static_graph = True

    def _check_reducer_finalized(self) -> None:
        """Raise if the last backward was cut short."""
        self.reducer.check()

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
        del state["_caster"], state["_active"]
        state["_saved"] = (replica.options, replica.ignored)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        options, ignored = state.pop("_saved")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._start(resolve(None), options, ignored, is_copy=True)


skip_in_compiler(DistributedDataParallel.forward)
