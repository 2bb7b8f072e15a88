"""Test classes whose ranks are threads of this process: the same bodies, hardly any cost."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, cast

from gradsync.testing.case_rank import run_body, word_of
from gradsync.testing.case_verdict import Ending, judge
from gradsync.testing.cases import RankedTestCase
from gradsync.testing.reference import set_rng_seed
from gradsync.testing.skips import DEFAULT_WORLD_SIZE, TIMEOUT_DEFAULT, get_timeout
from gradsync.testing.threads import ThreadRank, run_threads

__unittest = True  # unittest leaves frames of such modules out of tracebacks

__all__ = ["MultiThreadedTestCase", "spawn_threads_and_init_comms"]

F = TypeVar("F", bound=Callable[..., Any])


class MultiThreadedTestCase(RankedTestCase):
    """Runs each test on ``world_size`` threads; ``setUp`` must call ``_spawn_threads``.

    Each thread has an instance and a default group of its own. All share one process and its random
    numbers: use ``assertEqualOnRank`` for what depends on these.
    """

    MAIN_THREAD_RANK: ClassVar[int] = -1

    _wanted = False

    @property
    def world_size(self) -> int:
        """How many ranks a test runs on; override it."""
        return DEFAULT_WORLD_SIZE

    def perThreadSetUp(self) -> None:  # noqa: N802 - torch's name
        """Prepare a test on each rank; override it."""

    def perThreadTearDown(self) -> None:  # noqa: N802 - torch's name
        """Tidy up after a test on each rank; override it."""

    def _spawn_threads(self) -> None:
        """Ask for the threads, which start when ``setUp`` is done."""
        self._wanted = True

    def _join_ranks(self, fn: Callable[[], object]) -> None:
        if not self._wanted:
            raise RuntimeError(
                f"no rank has run {self.id()}: setUp did not call self._spawn_threads()"
            )
        _run_on_threads(self.world_size, self._run, get_timeout(self.id()), self.id())

    def _run(self, me: ThreadRank) -> None:
        """Be a rank: make an instance of its own and run the test."""
        case = type(self)(self._testMethodName)
        case.rank = me.rank
        case.perThreadSetUp()
        try:
            run_body(case, getattr(case, self._testMethodName))
        finally:
            case.perThreadTearDown()

    def assertEqualOnRank(  # noqa: N802 - torch's name
        self, x: Any, y: Any, msg: Any = None, *, rank: int = 0
    ) -> None:
        """Compare on one rank only."""
        if self.rank == rank:
            self.assertEqual(x, y, msg)  # noqa: PT009

    def assertNotEqualOnRank(  # noqa: N802 - torch's name
        self, x: Any, y: Any, msg: Any = None, *, rank: int = 0
    ) -> None:
        """Compare on one rank only."""
        if self.rank == rank:
            self.assertNotEqual(x, y, msg)  # noqa: PT009


def spawn_threads_and_init_comms(
    func: F | None = None,
    timeout: float = TIMEOUT_DEFAULT,
    world_size: int = DEFAULT_WORLD_SIZE,
) -> Any:
    """Run one test on threads that form a group; ``gradsync.get_rank()`` tells them apart."""
    if func is None:
        return functools.partial(
            spawn_threads_and_init_comms, timeout=timeout, world_size=world_size
        )

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        _run_on_threads(world_size, lambda me: func(*args, **kwargs), timeout, func.__qualname__)

    return cast(F, wrapper)


def _run_on_threads(
    size: int, body: Callable[[ThreadRank], object], timeout_s: float, test: str
) -> None:
    set_rng_seed()
    began = time.monotonic()
    ranks = run_threads(size, body, timeout_s=timeout_s)
    late = not any(me.error for me in ranks)
    judge([_ending(me, timeout_s, late) for me in ranks], test, time.monotonic() - began)


def _ending(me: ThreadRank, timeout_s: float, late: bool) -> Ending:
    ending = Ending(me.rank, stack=me.stack)
    if me.stack and late:
        ending.problem = f"timed out after {timeout_s:g} seconds; it stood here"
    error = me.error
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return ending  # one that leaves early without a complaint is done
    word = word_of(error)
    ending.error, ending.follows, ending.skip = word.error, word.follows, word.skip
    return ending
