"""The warm pool: rank processes that live from test to test, and are replaced when one is lost.

Processes are forked from a server that has imported torch once (``multiprocessing``'s forkserver),
so the first costs a second and every further one a few milliseconds.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import secrets
import signal
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from gradsync.base.deadline import Deadline
from gradsync.stores.unix import UnixStore
from gradsync.testing.entry import DUMP_SIGNAL, main
from gradsync.testing.faults import Fault
from gradsync.testing.messages import (
    CallTask,
    Died,
    Finished,
    ItemTask,
    Outcome,
    RankContext,
    Stuck,
)

__all__ = ["RankPool", "RankProcess"]

_PRELOAD = [
    "gradsync.testing.worker",
    "gradsync.testing.remote",
    "gradsync.testing.cases",
    "gradsync.testing.continuous",
]

# How long the other ranks may go on when one has failed or died: they are released at once, so this
# is for their reports only.
_AFTERMATH_S = 10.0
_ANSWER_S = 2.0
_START_S = 60.0
# How long ranks may take to end by themselves.
_PATIENCE_S = 5.0

Task = ItemTask | CallTask


class RankProcess:
    """A rank's process as the controller sees it: ``target(tasks, questions, stacks, ...)``.

    The second argument answers where the rank stands (``standing_by``), the third takes its stacks
    when it cannot. With ``fresh`` it is a new interpreter, which takes seconds.
    """

    def __init__(
        self,
        target: Callable[..., None] = main,
        args: tuple[Any, ...] = (),
        *,
        name: str | None = None,
        fresh: bool = False,
    ) -> None:
        context: Any = multiprocessing.get_context("spawn" if fresh else "forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self.tasks: connection.Connection
        self.questions: connection.Connection
        self.tasks, tasks = context.Pipe()
        self.questions, questions = context.Pipe()
        self._stacks, stacks = context.Pipe(duplex=False)
        self.process: BaseProcess = context.Process(
            target=target, args=(tasks, questions, stacks, *args), name=name
        )
        # Only this process comes from the server: what a test starts is made the usual way here.
        self.process._start_method = None
        self.process.start()
        tasks.close()
        questions.close()
        stacks.close()

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid or 0

    def where(self) -> str:
        """Ask the rank where it stands; if it cannot answer, a signal makes it write its stacks."""
        with contextlib.suppress(OSError, EOFError):
            self.questions.send("where?")
            if self.questions.poll(_ANSWER_S):
                return str(self.questions.recv())
        stacks = b""
        with contextlib.suppress(OSError):
            os.kill(self.pid, DUMP_SIGNAL)
            while self._stacks.poll(0.2):
                part = os.read(self._stacks.fileno(), 65536)
                if not part:
                    break
                stacks += part
        text = stacks.decode("utf-8", "replace") or "(and its stacks cannot be had)"
        return f"pid {self.pid} does not answer\n{text}"

    def hang_up(self) -> None:
        """Let the rank know that there are no more tasks."""
        for line in (self.tasks, self.questions, self._stacks):
            line.close()

    def end(self, *, politely: bool, patience: Deadline | None = None) -> int:
        """End the process and return its exit code."""
        self.hang_up()
        if politely:
            self.process.join((patience or Deadline(_PATIENCE_S)).remaining())
        if self.process.exitcode is None:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGCONT)
            self.process.kill()
            self.process.join(5)
        code = self.process.exitcode
        return 0 if code is None else code


class RankPool:
    """Runs a task on several ranks at a time."""

    def __init__(self) -> None:
        self._ranks: list[RankProcess] = []
        self._token = secrets.token_hex(16)
        self._store_name = f"gradsync-tests-{secrets.token_hex(8)}"
        self._store = UnixStore(self._store_name, is_master=True, token=self._token)
        self._tests = 0
        self._debugged = 0
        self._owner = os.getpid()
        self.while_debugging: Callable[[], contextlib.AbstractContextManager[None]] = (
            contextlib.nullcontext
        )

    def context(
        self,
        rank: int,
        world_size: int,
        *,
        backend: str = "shm",
        timeout_s: float = 60.0,
        faults: Sequence[Fault] = (),
        with_group: bool = True,
        may_leave: Sequence[str] = (),
    ) -> RankContext:
        """Return who ``rank`` is in the next test."""
        return RankContext(
            rank,
            world_size,
            backend,
            self._store_name,
            self._token,
            f"test-{self._tests}",
            timeout_s,
            dict(os.environ),
            os.getcwd(),
            tuple(faults),
            with_group,
            tuple(may_leave),
        )

    def run(self, tasks: Sequence[Task], timeout_s: float) -> list[Outcome]:
        """Run one task on each of the first ranks and return what became of them, in rank order."""
        self._tests += 1
        self._fill(len(tasks))
        ranks = self._ranks[: len(tasks)]
        for rank, task in zip(ranks, tasks, strict=True):
            # A rank that died since its last test is found when its answer is awaited.
            with contextlib.suppress(OSError):
                rank.tasks.send(task)
        try:
            outcomes = self._gather(ranks, tasks, timeout_s)
        except BaseException:
            self._replace(ranks)  # they are in the middle of something
            raise
        if not all(isinstance(outcome, Finished) and not outcome.dirty for outcome in outcomes):
            self._replace(ranks)
        return outcomes

    def _fill(self, count: int) -> None:
        for at, rank in enumerate(self._ranks):
            if rank.process.exitcode is not None:
                rank.end(politely=False)
                self._ranks[at] = RankProcess()
        while len(self._ranks) < count:
            self._ranks.append(RankProcess())

    def _gather(
        self, ranks: Sequence[RankProcess], tasks: Sequence[Task], timeout_s: float
    ) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        starting = set(range(len(ranks)))
        # To start a rank may take long on a busy machine, which is no fault of the test.
        limit = deadline = Deadline(_START_S + timeout_s)
        while len(outcomes) < len(ranks):
            waiting = {r: i for i, r in enumerate(ranks) if i not in outcomes}
            left = limit.remaining()
            ready = connection.wait(
                [x for r in waiting for x in (r.tasks, r.process.sentinel)],
                None if math.isinf(left) else left,
            )
            for rank, at in waiting.items():
                if rank.tasks in ready or rank.process.sentinel in ready:
                    outcome = self._receive(rank, tasks[at])
                    if isinstance(outcome, str):
                        if outcome == "debug":
                            limit = deadline = Deadline(None)  # a person is at it
                            continue
                        starting.discard(at)
                        if not starting and limit is deadline:
                            limit = deadline = Deadline(timeout_s)
                        continue
                    outcomes[at] = outcome
                    if _is_failure(outcome) and limit is deadline:
                        limit = Deadline(min(deadline.remaining(), _AFTERMATH_S))
            if limit.expired():
                for rank, at in waiting.items():
                    if at not in outcomes:
                        outcomes[at] = Stuck(rank.pid, rank.where())
        return [outcomes[at] for at in range(len(ranks))]

    def _receive(self, rank: RankProcess, task: Task) -> Outcome | str:
        """Return what became of a rank that has stirred, or a word that it goes on."""
        try:
            message = rank.tasks.recv()
        except (EOFError, OSError):
            rank.process.join(5)
            code = rank.process.exitcode
            ends = [f.end for f in task.context.faults if f.rank == task.context.rank]
            return Died(0 if code is None else code, rank.pid, code is not None and code in ends)
        if message == "debug":
            self._debug(rank, task)
            return "debug"
        if message == "ready":
            return "ready"
        assert isinstance(message, Finished)
        return message

    def _debug(self, rank: RankProcess, task: Task) -> None:
        if getattr(task, "debug", "") == "first" and self._debugged == self._tests:
            rank.tasks.send("another rank was first")
            return
        self._debugged = self._tests
        with self.while_debugging():
            rank.tasks.send("go on")
            rank.tasks.recv()

    def _replace(self, ranks: Sequence[RankProcess]) -> None:
        """Throw away the ranks of a test that lost one or left something behind."""
        for rank in ranks:
            rank.end(politely=False)
        self._ranks = [rank for rank in self._ranks if rank not in ranks]

    def close(self, *, politely: bool = True) -> None:
        """End all ranks; politely, they take down what their fixtures have put up."""
        if os.getpid() != self._owner:
            return
        for rank in self._ranks:
            rank.hang_up()  # all of them first, so that they end side by side
        patience = Deadline(_PATIENCE_S)
        for rank in self._ranks:
            rank.end(politely=politely, patience=patience)
        self._ranks = []


def _is_failure(outcome: Outcome) -> bool:
    if isinstance(outcome, Finished):
        return bool(outcome.error) or any(r.get("outcome") == "failed" for r in outcome.reports)
    return True
