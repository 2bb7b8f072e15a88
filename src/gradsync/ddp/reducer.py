"""``Reducer``: from a gradient that autograd has just accumulated to the mean over all ranks.

One hook for each parameter counts its bucket down; a full bucket is launched once all earlier ones
have been; what is left is launched and awaited by a callback at the end of backward.

A *pass* is one backward that is synchronised. The first one launches nothing before its end: it
learns in which order gradients arrive and how often each hook runs (more than once with re-entrant
checkpoints), and the buckets are planned anew from that.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradsync.ddp.bucket import Bucket
from gradsync.ddp.engine import Engine, allocator, make_engine
from gradsync.ddp.planner import BucketPlan, TensorSpec, plan_arrival, plan_initial
from gradsync.ddp.sparse import mean_sparse
from gradsync.ddp.weights import PassWeight
from gradsync.errors import DistError, UsageError
from gradsync.group.group import ProcessGroup

__all__ = ["Reducer", "ReducerOptions"]

_log = logging.getLogger(__name__)

# Between two gradients smaller than this there is no time to reduce anything worth a look.
_POLL_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class ReducerOptions:
    """How a reducer works."""

    limits: tuple[int, ...] = (1 << 20, 25 << 20)
    strict: bool = False
    timeout_s: float = 1800.0


EngineMaker = Callable[[ProcessGroup, Sequence[Bucket], float], Engine]


class Reducer:
    """Averages the gradients of named parameters over a group, bucket by bucket."""

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        group: ProcessGroup,
        options: ReducerOptions,
        sparse: Sequence[bool] = (),
    ) -> None:
        self.names = [name for name, _ in named]
        self.params = [param for _, param in named]
        for param in self.params:
            param._gradsync_reducer = weakref.ref(self)  # type: ignore[attr-defined]
        self.group = group
        self.options = options
        self.weight = PassWeight(self.params)
        self.armed = False
        """Whether a backward through no output of ours is to be synchronised, too."""
        self.passes = 0
        """Synchronised backwards so far."""
        self.make_engine: EngineMaker = make_engine
        self.on_finish: list[Callable[[], None]] = []
        """Called at the end of each pass, when the gradients are the mean."""
        count = len(self.params)
        self._sparse = list(sparse) or [False] * count
        self.broken: str | None = None
        self.is_open = False
        self._fired = bytearray(count)
        self._dirty = bytearray(count)
        self._runs = [1] * count
        self._to_run = [1] * count
        self._order: list[int] = []
        self._handles: list[Any] = []
        self._reported = False
        self.has_rebuilt = False
        self.unused: tuple[str, ...] = ()
        """Parameters without a gradient on any rank in the last pass."""
        self._trainable: list[bool] = []
        self._engine: Engine | None = None
        self.buckets: list[Bucket] = []
        self._sparse_numbers: list[int] = []
        self.plan: BucketPlan = ()
        self._remaining: list[int] = []
        self._next = 0
        self._partial: list[Bucket] = []
        self.replan_by_registration()

    # -- plans ------------------------------------------------------------------------------------

    def _specs(self) -> list[TensorSpec]:
        return [
            TensorSpec(p.numel() * p.element_size(), str(p.dtype), str(p.device), s)
            for p, s in zip(self.params, self._sparse, strict=True)
        ]

    def replan_by_registration(self) -> None:
        """Plan for the parameters that need a gradient now, and learn their order again."""
        self._trainable = [param.requires_grad for param in self.params]
        active = [n for n, trains in enumerate(self._trainable) if trains]
        specs = self._specs()
        plan = plan_initial([specs[n] for n in active], self.options.limits)
        self._order = []
        self._learning = True
        self.has_rebuilt = False
        self._adopt(tuple(tuple(active[n] for n in bucket) for bucket in plan))

    def _replan_by_arrival(self) -> None:
        specs = self._specs()
        active = [n for bucket in self.plan for n in bucket]
        plan = plan_arrival(specs, self.options.limits, self._order)
        wanted = tuple(
            kept for bucket in plan if (kept := tuple(n for n in bucket if self._trainable[n]))
        )
        # Ranks may have seen different orders: rank 0's counts.
        flat = torch.tensor([x for bucket in wanted for x in (len(bucket), *bucket)])
        sizes = torch.tensor([flat.numel()])
        self.group.broadcast(sizes, 0)
        flat = flat if self.group.rank() == 0 else torch.empty(int(sizes), dtype=torch.int64)
        self.group.broadcast(flat, 0)
        agreed = _unflatten(flat.tolist())
        if sorted(n for bucket in agreed for n in bucket) != sorted(active):
            raise UsageError(
                "the ranks do not train the same parameters: requires_grad differs between rank 0 "
                f"and rank {self.group.rank()} of the group; freeze and unfreeze them on all ranks"
            )
        self._learning = False
        self.has_rebuilt = True
        self._adopt(agreed)

    def _adopt(self, plan: BucketPlan) -> None:
        """Make the buckets of a plan, unless they exist, and hooks that count them down."""
        if plan != self.plan or self._engine is None:
            self._close_engine()
            self.plan = plan
            dense = [bucket for bucket in plan if not self._sparse[bucket[0]]]
            self._sparse_numbers = [bucket[0] for bucket in plan if self._sparse[bucket[0]]]
            self.buckets = [self._make_bucket(i, numbers) for i, numbers in enumerate(dense)]
            self._engine = self.make_engine(self.group, self.buckets, self.options.timeout_s)
        self._remaining[:] = [0] * len(self.buckets)
        self._install_hooks()

    def _make_bucket(self, index: int, numbers: Sequence[int]) -> Bucket:
        params = [self.params[n] for n in numbers]
        return Bucket(index, numbers, params, allocator(self.group, params[0].device))

    def change_engine(self, make: EngineMaker) -> None:
        """Average in another way from now on; the gradients keep their places."""
        if self.is_open:
            raise UsageError("a communication hook cannot be registered during backward")
        if self._engine is not None:
            self._engine.close()
        self.make_engine = make
        self._engine = make(self.group, self.buckets, self.options.timeout_s)

    # -- hooks ------------------------------------------------------------------------------------

    def _install_hooks(self) -> None:
        self._remove_hooks()
        proxy = weakref.ref(self)
        for index, bucket in enumerate(self.buckets):
            for number in bucket.numbers:
                self._hook(number, self._counting_hook(proxy, number, index))
        for number in self._sparse_numbers:
            self._hook(number, self._sparse_hook(proxy, number))

    def _hook(self, number: int, hook: Callable[[Any], None]) -> None:
        param = self.params[number]
        self._handles.append(param.register_post_accumulate_grad_hook(hook))

    def _counting_hook(
        self, proxy: weakref.ref[Reducer], number: int, index: int
    ) -> Callable[[Any], None]:
        """Return the hook of a parameter; this is the hot path, so it only touches lists."""
        fired, remaining = self._fired, self._remaining

        def on_grad(_: object) -> None:
            if fired[number]:
                _alive(proxy)._ran_again(number, index)
                return
            fired[number] = 1
            left = remaining[index] - 1
            remaining[index] = left
            if left <= 0:
                _alive(proxy)._counted_down(number, index, left)

        def on_grad_large(param: object) -> None:
            on_grad(param)
            _alive(proxy)._progress()

        def on_grad_learning(param: object) -> None:
            if not fired[number]:
                _alive(proxy)._order.append(number)
            on_grad(param)

        def on_one_of_several(param: object) -> None:
            _alive(proxy)._ran_once_of_several(number, lambda: on_grad(param))

        if self._learning:
            return on_grad_learning
        if self._runs[number] > 1:
            return on_one_of_several
        return on_grad_large if self.params[number].numel() >= _POLL_ELEMENTS else on_grad

    def _sparse_hook(self, proxy: weakref.ref[Reducer], number: int) -> Callable[[Any], None]:
        def on_grad(_: object) -> None:
            reducer = _alive(proxy)
            if reducer._learning and number not in reducer._order:
                reducer._order.append(number)
            if reducer.is_open or reducer._opened_by_hook():
                reducer._fired[number] = 1
            else:
                reducer._accumulated(number)

        return on_grad

    def _counted_down(self, number: int, index: int, left: int) -> None:
        """Handle a gradient that completes its bucket, or that comes while no pass is open."""
        if left < 0:
            if not self._opened_by_hook():
                self._remaining[index] = 0
                self._accumulated(number)
                return
            self._fired[number] = 1
            self._remaining[index] -= 1
            if self._remaining[index] > 0:
                return
        self._launch_full()

    def _opened_by_hook(self) -> bool:
        if self.armed:
            self.open()
        return self.armed

    def _accumulated(self, number: int) -> None:
        """Note a gradient that the other ranks have not seen: the next pass takes it along."""
        self._fired[number] = 0
        self._dirty[number] = 1
        self.weight.accumulated(number)

    def _ran_once_of_several(self, number: int, last: Callable[[], None]) -> None:
        if not self.is_open and not self._opened_by_hook():
            self._accumulated(number)
            return
        self._dirty[number] = 1
        self._to_run[number] -= 1
        if self._to_run[number] == 0:
            last()

    def _ran_again(self, number: int, index: int) -> None:
        if index < self._next:
            self.broken = f"the gradient of {self.names[number]!r} changed after it was sent"
            raise DistError(
                f"{self.broken}: its hook ran more often than in the first backward "
                f"({self._runs[number]} times), as happens when re-entrant checkpoints come and go. "
                "Use checkpoint(..., use_reentrant=False)."
            )
        if self._learning:
            self._runs[number] += 1

    # -- a pass -----------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin a pass, unless one is open; it ends with the backward that is running."""
        if self.is_open:
            return
        self.is_open = True
        # While learning, one more than will ever come: nothing is launched before the end.
        extra = 1 if self._learning else 0
        self._remaining[:] = [len(bucket.numbers) + extra for bucket in self.buckets]
        self._fired[:] = bytes(len(self._fired))
        self._to_run[:] = self._runs
        self._next = 0
        if self._learning:
            self._order.clear()
            self._runs[:] = [1] * len(self._runs)
        self.weight.begin()
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._finish)

    def open_from_output(self, _: object) -> None:
        """Begin a pass when backward reaches an output: before any parameter, in the outer graph."""
        self.open()

    def set_weight(self, weight: float) -> None:
        """Give the next backward a weight."""
        self.weight.set(weight, unweighted_before=1 in self._dirty)

    def _launch_full(self) -> None:
        remaining, buckets = self._remaining, self.buckets
        while self._next < len(buckets) and remaining[self._next] <= 0:
            self._launch(buckets[self._next], None)

    def _launch(self, bucket: Bucket, missing: bytes | None) -> None:
        if torch.is_grad_enabled():
            self.broken = "backward(create_graph=True) was called"
            raise UsageError(
                "backward(create_graph=True) through a DistributedDataParallel module is not "
                "supported: the higher derivatives would not be synchronised. Take the first "
                "derivatives with torch.autograd.grad(..., create_graph=True) instead."
            )
        self.weight.discard(bucket.numbers)
        missing = bucket.fill() if missing is None else bucket.fill_partly(missing)
        if missing is not None:
            self._partial.append(bucket)
        self._next += 1
        assert self._engine is not None
        self._engine.launch(bucket, missing, self.weight.apply(bucket.flat))

    def _progress(self) -> None:
        if self.is_open and self._next and self._engine is not None:
            self._engine.poll()

    def _finish(self) -> None:
        """End the pass: launch what is left, wait for everything, settle what had no gradient."""
        if not self.is_open:
            return
        if 1 not in self._fired and self._to_run == self._runs:
            self.is_open = False  # torch.autograd.grad: no gradient was accumulated
            self._remaining[:] = [0] * len(self._remaining)
            return
        self.broken = "a backward was cut short by an error after it had sent gradients"
        with torch.no_grad():
            self._launch_rest()
            assert self._engine is not None
            self._engine.finish()
            unused_here = self._settle()
            unused_here += self._reduce_sparse()
        self._close_pass()
        for callback in self.on_finish:
            callback()
        if unused_here:
            self._report(unused_here)

    def _launch_rest(self) -> None:
        for bucket in self.buckets[self._next :]:
            missing = bytes(not (self._fired[n] or self._dirty[n]) for n in bucket.numbers)
            self._launch(bucket, missing if 1 in missing else None)

    def _settle(self) -> list[int]:
        """Settle buckets with unused parameters; return the numbers of those unused here."""
        partial, self._partial = self._partial, []
        here: list[int] = []
        everywhere: list[str] = []
        for bucket in partial:
            assert self._engine is not None
            nowhere = self._engine.missing_everywhere(bucket)
            here += [bucket.numbers[k] for k in bucket.unused_here()]
            everywhere += [self.names[bucket.numbers[k]] for k in nowhere]
            bucket.settle(nowhere)
        self.unused = tuple(everywhere)
        return here

    def _reduce_sparse(self) -> list[int]:
        unused = []
        for number in self._sparse_numbers:
            param = self.params[number]
            has = param.grad is not None and (self._fired[number] or self._dirty[number])
            self.weight.discard((number,))
            mean = mean_sparse(self.group, param, param.grad, bool(has), self.weight.apply)
            if mean is not None:
                param.grad = mean
            else:
                self.unused += (self.names[number],)
            if not has:
                unused.append(number)
        return unused

    def _close_pass(self) -> None:
        self.is_open = False
        self.broken = None
        self.passes += 1
        self._dirty[:] = bytes(len(self._dirty))
        self._fired[:] = bytes(len(self._fired))
        self._remaining[:] = [0] * len(self._remaining)
        self.weight.end()

    def _report(self, unused_here: Sequence[int]) -> None:
        names = ", ".join(self.names[n] for n in unused_here)
        if self.options.strict:
            raise UsageError(
                f"strict=True, and in this backward these parameters got no gradient on rank "
                f"{self.group.rank()}: {names}. On no rank: {', '.join(self.unused) or 'none'}."
            )
        if not self._reported:
            self._reported = True
            _log.info(
                "parameters without a gradient on rank %d: %s; on no rank: %s",
                self.group.rank(),
                names,
                ", ".join(self.unused) or "none",
            )

    # -- between passes ---------------------------------------------------------------------------

    def prepare(self) -> None:
        """Before a forward that is to be synchronised: plan anew when that is due."""
        if self.is_open and torch._C._current_graph_task_id() == -1:
            self._recover()
        if self.broken is not None and not self.is_open:
            raise DistError(f"{self.broken}; the ranks' gradients no longer agree")
        if self.is_open:
            return
        if self._trainable != [param.requires_grad for param in self.params]:
            self.replan_by_registration()
        elif self._learning and self.passes and self._order:
            self._replan_by_arrival()

    def _recover(self) -> None:
        """Forget a pass whose backward raised; once something was sent, that cannot be undone."""
        self.is_open = False
        if self._next and self.broken is None:
            self.broken = "a backward was cut short by an error after it had sent gradients"
        self._fired[:] = bytes(len(self._fired))
        self._remaining[:] = [0] * len(self._remaining)

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def close(self) -> None:
        """Take the hooks away and give the memory back."""
        self._remove_hooks()
        self._close_engine()

    def __del__(self) -> None:
        self._remove_hooks()


def _alive(proxy: weakref.ref[Reducer]) -> Reducer:
    reducer = proxy()
    assert reducer is not None  # its hooks go before it does
    return reducer


def _unflatten(numbers: list[int]) -> BucketPlan:
    buckets, at = [], 0
    while at < len(numbers):
        count = numbers[at]
        buckets.append(tuple(numbers[at + 1 : at + 1 + count]))
        at += 1 + count
    return tuple(buckets)
