"""``Replica``: a module that is kept the same as its twins on the other ranks.

What ``DistributedDataParallel`` and ``replicate`` share: the first synchronisation, what happens
before and after each forward, and the choices of when gradients travel.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradsync.ddp.bucket import Bucket
from gradsync.ddp.buffers import BufferHookLocation, BufferSync
from gradsync.ddp.comm_hooks.hook import CommHook, HookEngine, check_hook
from gradsync.ddp.compiling import outside_of_compiler
from gradsync.ddp.in_backward import step_attached_optimizers
from gradsync.ddp.init_sync import verify_same
from gradsync.ddp.options import DDPOptions
from gradsync.ddp.parcel import broadcast_tensors
from gradsync.ddp.parts import Parts, Strangers
from gradsync.ddp.reducer import Reducer, ReducerOptions
from gradsync.ddp.shards import LocalShard, is_cut_up, local_part
from gradsync.ddp.sparse import sparse_parameters
from gradsync.ddp.tensors_in import tensors_in
from gradsync.ddp.weights import is_zero
from gradsync.errors import UsageError
from gradsync.group.group import ProcessGroup

__all__ = ["Replica", "named_parameters"]

Batch = TypeVar("Batch")

_IGNORED = "_ddp_params_and_buffers_to_ignore"


class Replica:
    """One rank's copy of a module, and the machinery that keeps the copies equal."""

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup,
        options: DDPOptions,
        ignored: Iterable[str] = (),
        is_copy: bool = False,
    ) -> None:
        self.module = module
        self.group = group
        self.options = options
        self.ignored = frozenset(ignored) | frozenset(getattr(module, _IGNORED, ()))
        self.sync_gradients = True
        self._is_new = True
        self._leaf_hook: RemovableHandle | None = None
        self.comm_hook_name: str | None = None
        self.sync_buffers_next = True
        self._parts = Parts(module)
        self.buffer_sync = BufferSync(self._parts, group, self.ignored)
        named = named_parameters(module, self.ignored)
        _check_parameters(named)
        if group.size() > 1:
            _check_batch_norm(module)
        # A copy meets its twins when it trains: it may be there on one rank only, to be kept.
        self._is_apart = is_copy
        if not is_copy:
            self._meet()
        self.reducer = self._make_reducer(named)
        if not is_copy:
            self.reducer.prepare()

    def _meet(self) -> None:
        """Make sure that all ranks hold the same model, with rank 0's values."""
        self._is_apart = False
        if self.options.init_sync:
            buffers = self.buffer_sync.named() if self.options.init_sync_buffers else {}
            verify_same(named_parameters(self.module, self.ignored), buffers, self.group)
            self.broadcast_state(buffers=self.options.init_sync_buffers)

    def prepare(self) -> None:
        """Get ready for a pass, with the others."""
        if self._is_apart:
            self._meet()
            self.reducer.arrivals.note_gradients(range(len(self.reducer.params)))
        self.reducer.prepare()

    def _make_reducer(self, named: list[tuple[str, nn.Parameter]]) -> Reducer:
        sparse = sparse_parameters(self.module)
        # A replica inside of this one synchronises its own parameters.
        inner = _synchronised_inside(self.module)
        own = [(name, param) for name, param in named if id(param) not in inner]
        limits, strict = self.options.limits, self.options.strict
        options = ReducerOptions(limits, strict, self.group.timeout_s)
        is_sparse = [id(param) in sparse for _, param in own]
        parts: list[Any] = [(n, LocalShard(p) if is_cut_up(p) else p) for n, p in own]
        known = {id(param) for _, param in named}
        find = partial(_find_strangers, self.module, self.ignored, known)
        strangers = Strangers(self._parts, find)
        reducer = Reducer(parts, self.group, options, is_sparse, strangers)
        reducer.on_finish.append(self.buffer_sync.wait)
        return reducer

    def broadcast_state(self, buffers: bool = True, root: int = 0) -> None:
        """Overwrite this rank's parameters and buffers with those of ``root``."""
        named = named_parameters(self.module, self.ignored)
        tensors: list[torch.Tensor] = [local_part(param) for _, param in named]
        if buffers:
            tensors += self.buffer_sync.named().values()
        broadcast_tensors(tensors, self.group, root)

    # -- around forward ---------------------------------------------------------------------------

    @outside_of_compiler
    def before_forward(self, buffers_of: int = 0) -> None:
        """Plan anew when that is due, and synchronise buffers with those of a rank."""
        if self._is_new:
            self._take_over_optimizers()
        syncs = self.sync_gradients and torch.is_grad_enabled() and not _in_transform()
        due = self.buffers_are_due()
        if syncs or due:
            self._parts.look()
        if syncs:
            self.reducer.check()
        # Buffers first: on a rank that accumulates, this is the forward before the one that plans.
        if due:
            self.buffer_sync.run(BufferHookLocation.PRE_FORWARD, buffers_of)
        if syncs:
            self.prepare()
            self.reducer.timing.note_forward()

    def buffers_are_due(self) -> bool:
        """Return whether the next forward synchronises buffers."""
        together = not self._is_apart
        return self.sync_buffers_next and self.options.forward_sync_buffers and together

    def _take_over_optimizers(self) -> None:
        self._is_new = False
        step = step_attached_optimizers(self.reducer.params)
        if step is not None:
            self.reducer.on_finish.append(step)

    @outside_of_compiler
    def after_forward(self, output: Any) -> None:
        """Decide whether the backward of ``output`` will synchronise: it travels with the graph."""
        if self.buffers_are_due():
            self.buffer_sync.run(BufferHookLocation.POST_FORWARD)
        if not torch.is_grad_enabled() or _in_transform():
            return
        if self._leaf_hook is not None:
            self._leaf_hook.remove()  # a leaf may be the same in each forward
            self._leaf_hook = None
        self.reducer.armed = self.sync_buffers_next = self.sync_gradients
        if not self.sync_gradients:
            return
        opened = self.reducer.forwards.begin(self.reducer.open)
        found: Any = (output,) if isinstance(output, torch.Tensor) else tensors_in(output)
        tensors = [tensor for tensor in found if tensor.requires_grad]
        results = [tensor for tensor in tensors if tensor.grad_fn is not None]
        for tensor in results:
            tensor.register_hook(opened)
        if tensors and not results:  # nothing to do here: torch.tensor(0.0, requires_grad=True)
            self._leaf_hook = tensors[0].register_hook(_opening(self.reducer))

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Average buckets by ``hook`` from now on; once only."""
        check_hook(hook)
        if self.comm_hook_name is not None:
            raise UsageError(f"the communication hook {self.comm_hook_name} is registered already")
        self.comm_hook_name = getattr(hook, "__qualname__", type(hook).__qualname__)
        self.use_engine_of(state, hook)

    def use_engine_of(self, state: Any, hook: CommHook) -> None:
        """Average buckets by a hook that is not the user's."""

        def make(group: ProcessGroup, buckets: Sequence[Bucket], _: float) -> HookEngine:
            return HookEngine(group, buckets, hook, state)

        self.reducer.change_engine(make)

    # -- when gradients travel --------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards of the forwards in this block accumulate on this rank only."""
        before, self.sync_gradients = self.sync_gradients, False
        try:
            yield
        finally:
            self.sync_gradients = before

    def accumulate(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield ``batches``; only the backward of the last one is synchronised."""
        held: list[Batch] = []
        try:
            for batch in batches:
                if held:
                    with self.no_sync():
                        yield held.pop()
                held.append(batch)
            yield from held
        except GeneratorExit:
            if not all(map(is_zero, self.reducer.arrivals.unseen())):
                warnings.warn(
                    "accumulate() was left before its last batch, so the gradients so far are those"
                    " of this rank alone: call zero_grad(), or go on with a synchronised backward, "
                    "before the optimizer steps",
                    stacklevel=2,
                )
            raise

    def weight(self, weight: float) -> None:
        """Give this rank's next backward a weight in the mean."""
        self.reducer.set_weight(weight)

    def change_group(self, group: ProcessGroup) -> None:
        """Go on with other ranks: same parameters, new buckets, no hook."""
        self.reducer.close()
        self.group = self.buffer_sync.group = group
        self.comm_hook_name = None
        on_finish = self.reducer.on_finish
        self.reducer = self._make_reducer(named_parameters(self.module, self.ignored))
        self.reducer.on_finish = on_finish
        self.reducer.prepare()

    def __deepcopy__(self, memo: object) -> None:
        """A copy of a replicated module is a module of its own."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _in_transform() -> bool:
    """Return whether this is inside of torch.func.grad() or the like, where no gradient is kept."""
    return torch._C._functorch.maybe_current_level() is not None


def _opening(reducer: Reducer) -> Callable[[object], None]:
    """Return a hook that begins a pass, for a leaf: it may outlive the reducer and its group."""
    found = weakref.ref(reducer)

    def begin(_: object) -> None:
        there = found()
        if there is not None and not there.group.is_closed():
            there.open()

    return begin


def named_parameters(module: nn.Module, ignored: frozenset[str]) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that take part, shared ones once."""
    return [(name, param) for name, param in module.named_parameters() if name not in ignored]


def _check_batch_norm(module: nn.Module) -> None:
    if not all(param.is_cpu for param in module.parameters()):
        return
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            raise UsageError(
                f"{name or 'the module'} is a torch.nn.SyncBatchNorm, which works on accelerators "
                f"only: on CPUs each rank would normalise by itself. Use torch.nn.BatchNorm"
            )


def _check_parameters(named: list[tuple[str, nn.Parameter]]) -> None:
    for name, param in named:
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise UsageError(
                f"the parameter {name!r} is not initialised yet; run a forward through the lazy "
                "modules before wrapping"
            )
        if param.is_meta:
            raise UsageError(
                f"the parameter {name!r} is on the meta device, without values; call "
                "module.to_empty(device=...) and initialise or load them before wrapping"
            )
    if not any(param.requires_grad for _, param in named):
        raise UsageError(
            "the module has no parameter that requires a gradient; there is nothing to synchronise"
        )


def _find_strangers(
    module: nn.Module, ignored: frozenset[str], known: set[int]
) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that were not there when the module was wrapped."""
    known = known | _synchronised_inside(module)
    named = named_parameters(module, ignored)
    # No parameters are what torch.func.functional_call() puts in their place while it runs.
    return [(n, p) for n, p in named if id(p) not in known and isinstance(p, nn.Parameter)]


def _synchronised_inside(module: nn.Module) -> set[int]:
    replicas = (getattr(part, "_replica", None) for part in module.modules())
    return {
        id(param)
        for replica in replicas
        if isinstance(replica, Replica)
        for param in replica.reducer.whole_params
    }
