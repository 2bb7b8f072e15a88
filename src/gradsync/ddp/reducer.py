"""``Reducer``: from a gradient that autograd has just accumulated to the mean over all ranks.

A *pass* is one backward that is synchronised. Hooks count gradients in (``arrivals.py``); full
buckets are launched in order, and the rest by a callback at the end of backward. The first pass
only learns in which order gradients arrive and how often (more than once with re-entrant
checkpoints); from that the buckets are planned anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from gradsync.ddp.agreement import WHILE_AVERAGING, explaining, plan_of_rank_0
from gradsync.ddp.arrivals import Arrivals
from gradsync.ddp.bucket import Bucket
from gradsync.ddp.engine import (
    BOARD_LIMITS,
    CALL_LIMITS,
    Engine,
    allocator,
    has_boards,
    make_engine,
)
from gradsync.ddp.forwards import Forwards
from gradsync.ddp.parts import Strangers
from gradsync.ddp.planner import BucketPlan, TensorSpec, plan_arrival, plan_initial
from gradsync.ddp.running import Running
from gradsync.ddp.sparse import mean_sparse
from gradsync.ddp.timing import Timing
from gradsync.ddp.trained import Trained
from gradsync.ddp.weights import PassWeight
from gradsync.errors import DistError, UsageError
from gradsync.group.group import ProcessGroup

__all__ = ["EngineMaker", "Reducer", "ReducerOptions"]

_log = logging.getLogger(__name__)

EngineMaker: TypeAlias = Callable[[ProcessGroup, Sequence[Bucket], float], Engine]

_CUT_SHORT = "a backward was cut short by an error after it had sent gradients"


@dataclass(frozen=True)
class ReducerOptions:
    """How a reducer works."""

    limits: tuple[int, ...] | None = None
    strict: bool = False
    timeout_s: float = 1800.0


class Reducer:
    """Averages the gradients of named parameters over a group, bucket by bucket."""

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        group: ProcessGroup,
        options: ReducerOptions,
        sparse: Sequence[bool],
        strangers: Strangers,
    ) -> None:
        self.names = [name for name, _ in named]
        self.params = [param for _, param in named]
        self.group = group
        self.options = options
        self.arrivals = Arrivals(self.params)
        self.weight = PassWeight(self.params)
        self.timing = Timing()
        self.forwards = Forwards()
        self.armed = False
        """Whether a backward that passes no output of ours is synchronised, too."""
        self.is_open = False
        self.passes = 0
        """Synchronised backwards so far."""
        self.has_rebuilt = False
        self.unused: tuple[str, ...] = ()
        """Parameters without a gradient on any rank in the last pass."""
        self.unused_changed = False
        """Whether that was ever different from the pass before."""
        self._strangers = strangers
        self.on_finish: list[Callable[[], None]] = []
        """Called at the end of each pass, when the gradients are the mean."""
        self.plan: BucketPlan = ()
        self.buckets: list[Bucket] = []
        self._sparse = list(sparse)
        self._sparse_numbers: list[int] = []
        self._trained = Trained(named)
        self._make_engine: EngineMaker = make_engine
        self._engine: Engine | None = None
        self._launched = 0
        self._partial: list[Bucket] = []
        self._broken: str | None = None
        self._ever_unused: set[int] = set()
        self._planned_after = 0
        self._running = Running(self.whole_params)

    # -- plans ------------------------------------------------------------------------------------

    @property
    def whole_params(self) -> list[Any]:
        """The parameters as the module has them."""
        return [getattr(param, "_param", param) for param in self.params]

    def _specs(self) -> list[TensorSpec]:
        return [
            TensorSpec(p.numel() * dtype.itemsize, str(dtype), str(p.device), sparse)
            for p, dtype, sparse in zip(
                self.params, self._trained.dtypes, self._sparse, strict=True
            )
        ]

    def _limits(self) -> tuple[int, ...]:
        if self.options.limits is not None:
            return self.options.limits
        devices = [param.device for param in self.params]
        boards = self._make_engine is make_engine and has_boards(self.group, devices)
        return BOARD_LIMITS if boards else CALL_LIMITS

    def _plan_by_registration(self) -> None:
        """Plan for the parameters that train now, and learn their order again."""
        trained = self._trained
        dtypes, before = trained.dtypes, set(trained.numbers)
        trained.look()
        if trained.dtypes != dtypes:
            self._engine = None  # not in the buckets there are
        active, specs = trained.numbers, self._specs()
        if dtypes:  # those that were frozen may have accumulated something in no_sync()
            self.arrivals.note_gradients(set(active) - before)
        plan = plan_initial([specs[n] for n in active], self._limits())
        self.has_rebuilt = False
        self.arrivals.learn()
        self._planned_after = self.passes
        self._adopt(tuple(tuple(active[n] for n in bucket) for bucket in plan))

    def _plan_by_arrival(self) -> None:
        specs, active = self._specs(), self._trained.numbers
        place = {n: k for k, n in enumerate(active)}
        arrived = [place[n] for n in self.arrivals.order]
        plan = plan_arrival([specs[n] for n in active], self._limits(), arrived)
        own = tuple(tuple(active[n] for n in bucket) for bucket in plan)
        with explaining(WHILE_AVERAGING):
            agreed = plan_of_rank_0(self.group, own)
        if sorted(n for bucket in agreed for n in bucket) != active:
            raise UsageError(
                "the ranks do not train the same parameters: requires_grad differs between rank 0 "
                f"and rank {self.group.rank()} of the group; freeze and unfreeze them on all ranks"
            )
        self.has_rebuilt = True
        self.arrivals.learning = False
        self._adopt(agreed)

    def _adopt(self, plan: BucketPlan) -> None:
        """Make the buckets of a plan, unless they exist, and hooks that count them down."""
        dense = [bucket for bucket in plan if not self._sparse[bucket[0]]]
        self._sparse_numbers = [bucket[0] for bucket in plan if self._sparse[bucket[0]]]
        if plan != self.plan or self._engine is None:
            # First the old ones go: there is never memory for two sets, unless the user has views.
            self.plan, self._engine, self.buckets = plan, None, []
            self.buckets = [self._make_bucket(i, numbers) for i, numbers in enumerate(dense)]
            self._engine = self._make_engine(self.group, self.buckets, self.options.timeout_s)
        self._install_hooks()

    def _install_hooks(self) -> None:
        buckets = [bucket.numbers for bucket in self.buckets]
        self.arrivals.install(self, buckets, self._sparse_numbers)

    def _make_bucket(self, index: int, numbers: Sequence[int]) -> Bucket:
        params = [self.params[n] for n in numbers]
        return Bucket(index, numbers, params, allocator(self.group, params[0].device))

    def change_engine(self, make: EngineMaker) -> None:
        """Average in another way from now on, in buckets that suit it."""
        if self.is_open:
            raise UsageError("how gradients are averaged cannot be changed during backward")
        self._engine = None
        self._make_engine = make
        self._plan_by_registration()

    def prepare(self) -> None:
        """Before the first forward and those that are to be synchronised: plan if that is due."""
        if self.is_open and self._running:
            return  # a forward inside of this very backward: a checkpoint
        self.check()
        if self._trained.has_changed():
            self._trained.agree(self.group, self.arrivals.dirty)
            self._plan_by_registration()
        elif self.arrivals.learning and self.passes > self._planned_after:
            self._plan_by_arrival()
        elif not self.arrivals.are_last():
            self._install_hooks()

    def check(self) -> None:
        """Raise if a backward was cut short after it had sent gradients."""
        if self.is_open and not self._running:
            self._forget_pass()
            self.weight.end()
        if self._broken is not None and not self.is_open:
            raise DistError(
                f"{self._broken}; the ranks' gradients no longer agree. Wrap the module again, on "
                "all ranks."
            )

    def _forget_pass(self) -> None:
        """Forget a pass whose backward raised; what was sent by then cannot be undone."""
        if self._launched and self._broken is None:
            self._broken = _CUT_SHORT
        self.is_open = False
        self._running.end()
        self._partial.clear()
        self.arrivals.end()

    @property
    def error(self) -> str | None:
        """What made this reducer useless, if something did."""
        return self._broken if not self.is_open else None

    # -- what the hooks say -----------------------------------------------------------------------

    def try_open(self) -> bool:
        """Return whether a pass is open, opening one if the last forward asked for it."""
        if self.is_open:
            return True
        if self.armed and not self.group.is_closed() and not self._running.has_rival():
            self.open()
        return self.is_open

    def open(self) -> None:
        """Begin a pass, unless one is open; it ends with the backward that is running.

        Called when backward reaches an output of the module: before any parameter, and in the
        outer one of nested backwards.
        """
        if self.is_open and self._running:
            return
        self.check()
        self._strangers.look()
        self.weight.begin()
        self.timing.note_backward()
        self.is_open = True
        self._launched = 0
        # What another reducer averages in this backward is averaged again after that: the same.
        self.arrivals.begin(self._running.has_rival(), len(self.forwards))
        self._running.begin(self._finish)

    def bucket_full(self) -> None:
        """Launch every bucket that is full and whose turn it is."""
        remaining, buckets = self.arrivals.remaining, self.buckets
        while self._launched < len(buckets) and remaining[self._launched] <= 0:
            self._launch(buckets[self._launched], None)

    def accumulated(self, number: int) -> None:
        """Note a gradient that the other ranks have not seen: the next pass takes it along."""
        self.weight.accumulated(number)

    def came_again(self, number: int, index: int) -> None:
        """Refuse a gradient that changed after it was sent; before that, it is no matter."""
        if index >= self._launched:
            return
        self._broken = f"the gradient of {self.names[number]!r} changed after it was sent"
        raise DistError(
            f"{self._broken}: its hook ran more often than in the first backward "
            f"({self.arrivals.runs[number]} times), as it does when re-entrant checkpoints come "
            "and go. Use checkpoint(..., use_reentrant=False)."
        )

    def progress(self) -> None:
        """Move communication along while backward goes on."""
        if self.is_open and self._launched and self._engine is not None:
            self._engine.poll()

    # -- a pass -----------------------------------------------------------------------------------

    def _launch(self, bucket: Bucket, missing: bytes | None) -> None:
        assert self._engine is not None
        self.weight.check()
        if missing is None and self.weight.is_plain and self._engine.lend(bucket):
            self._launched += 1
            self.timing.note_launch()
            return
        self.weight.discard(bucket.numbers)
        missing = bucket.fill() if missing is None else bucket.fill_partly(missing)
        if missing is not None:
            self._partial.append(bucket)
        self._launched += 1
        self.timing.note_launch()
        self._engine.launch(bucket, missing, self.weight.apply(bucket.flat))

    def _finish(self, node: Any) -> None:
        """End the pass: launch what is left, wait for everything, settle what had no gradient."""
        if not self.is_open:
            return
        arrivals = self.arrivals
        # Nothing was accumulated: this is torch.autograd.grad, or there was nothing on this rank.
        if not arrivals.any() and (not self.plan or self._running.leads_to_params(node)):
            self.weight.unspend()
            self._forget_pass()
            self._strangers.refuse()  # or all of them were replaced
            return
        arrivals.check_untouched(self.names)
        self.weight.check()
        self._broken = _CUT_SHORT
        self.timing.note_computed()
        with torch.no_grad():
            for bucket in self.buckets[self._launched :]:
                self._launch(bucket, arrivals.missing(bucket.numbers))
            assert self._engine is not None
            with explaining(WHILE_AVERAGING):
                self._engine.finish()
            unused_before = self.unused
            unused_here = self._settle() + self._reduce_sparse()
        self.unused_changed |= self.passes > 0 and self.unused != unused_before
        self.timing.note_done()
        self._broken = None
        self.is_open = False
        self._running.end()
        self.passes += 1
        arrivals.dirty[:] = bytes(len(self.params))
        arrivals.end()
        unused_here = [] if self.weight.discards else unused_here  # it counts for nothing
        self.weight.end()
        for callback in self.on_finish:
            callback()
        if unused_here:
            self._report(unused_here)

    def shadow_pass(self) -> None:
        """Take part in a pass of the other ranks, with nothing to add."""
        weight = None if self.weight.default is None else 0.0
        assert self._engine is not None
        with torch.no_grad():
            for bucket in self.buckets:
                bucket.flat.zero_()
                self._engine.launch(bucket, bytes([1] * len(bucket.params)), weight)
            self._engine.finish()
            for bucket in self.buckets:
                self._engine.missing_everywhere(bucket)
            for number in self._sparse_numbers:
                mean_sparse(self.group, self.params[number], None, False, lambda _: weight)
        self.passes += 1

    def _settle(self) -> list[int]:
        """Settle buckets with unused parameters; return the numbers of those unused here."""
        partial, self._partial = self._partial, []
        here: list[int] = []
        everywhere: list[int] = []
        for bucket in partial:
            assert self._engine is not None
            nowhere = self._engine.missing_everywhere(bucket)
            here += [bucket.numbers[k] for k in bucket.unused_here()]
            everywhere += [bucket.numbers[k] for k in nowhere]
            bucket.settle(nowhere)
        self.unused = tuple(self.names[n] for n in sorted(everywhere))
        return here

    def _reduce_sparse(self) -> list[int]:
        unused = []
        for number in self._sparse_numbers:
            self.weight.discard((number,))
            param = self.params[number]
            used = param.grad is not None and self.arrivals.missing((number,)) is None
            mean = mean_sparse(self.group, param, param.grad, used, self.weight.apply)
            if mean is not None:
                param.grad = mean
            else:
                self.unused += (self.names[number],)
            if not used:
                unused.append(number)
        return unused

    def _report(self, unused_here: Sequence[int]) -> None:
        names = ", ".join(self.names[n] for n in sorted(unused_here))
        nowhere = ", ".join(self.unused) or "none"
        if self.options.strict:
            where = f"on rank {self.group.rank()}: {names}. On no rank: {nowhere}."
            raise UsageError(f"strict=True, and these parameters got no gradient {where}")
        if not self._ever_unused:
            rank = self.group.rank()
            _log.info("no gradient on rank %d for: %s. On no rank: %s", rank, names, nowhere)
        if not self._ever_unused.issuperset(unused_here):
            self._ever_unused.update(unused_here)
            self._strangers.refuse()

    def set_weight(self, weight: float) -> None:
        """Give the next backward a weight."""
        self.weight.set(weight, self.arrivals.unseen())

    def close(self) -> None:
        """Take the hooks away and give the memory back."""
        self.arrivals.remove()
        self._engine, self.buckets = None, []

    def __del__(self) -> None:
        self.arrivals.remove()
