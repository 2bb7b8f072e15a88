"""Ranks as threads of this process: the same API and real results, in well under a millisecond.

A thread cannot be ended from outside, so a rank that hangs outside of a collective stays behind as
a daemon thread; the report says where.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradsync.backends.backend import Backend
from gradsync.backends.threads import ThreadsBackend
from gradsync.base.deadline import Deadline
from gradsync.base.host import host_evidence
from gradsync.group.group import ProcessGroup
from gradsync.group.members import Members
from gradsync.group.world import replace_thread_group
from gradsync.stores.hash import HashStore
from gradsync.stores.store import Store
from gradsync.testing.calls import CallLog
from gradsync.testing.faults import Fault
from gradsync.testing.inject import Injector
from gradsync.testing.stacks import stack_of_test

__all__ = ["ThreadRank", "run_threads"]

# How long ranks may take to end after one has failed: they are released at once.
_AFTERMATH_S = 5.0


@dataclass
class ThreadRank:
    """One rank of a run on threads, and what became of it."""

    rank: int
    group: ProcessGroup
    store: Store
    result: Any = None
    error: BaseException | None = None
    stack: str = ""
    """Where it stood when it had not ended in time."""
    log: CallLog | None = None
    injector: Injector | None = None
    done: threading.Event = field(default_factory=threading.Event)


def run_threads(
    size: int,
    body: Callable[[ThreadRank], Any],
    *,
    timeout_s: float = 60.0,
    faults: Sequence[Fault] = (),
    backends: Sequence[Backend] | None = None,
) -> list[ThreadRank]:
    """Call ``body(rank)`` in ``size`` threads that form one group; return all of them.

    ``backends`` may be given, one for each rank; the native core carries the calls otherwise.

    >>> from gradsync.testing.threads import run_threads
    >>> [r.result for r in run_threads(3, lambda me: me.rank * 10)]
    [0, 10, 20]
    """
    store = HashStore()
    if backends is None:
        backends = ThreadsBackend.make(size)
    here = host_evidence()
    ranks = []
    for rank, backend in enumerate(backends):
        members = Members("world", "default_pg", tuple(range(size)), rank, (here,) * size, store)
        # Longer than the run: its own deadline shows every rank, this would show one.
        group = ProcessGroup(backend, members, timeout_s=2 * timeout_s + 5)
        me = ThreadRank(rank, group, store, log=CallLog(group))
        ranks.append(me)
        if faults:
            me.injector = Injector(faults, rank, store)
            group.hooks.add_before(me.injector, may_raise=True)
    threads = [
        threading.Thread(
            target=_run, args=(me, backend, body, timeout_s), daemon=True, name=f"rank {me.rank}"
        )
        for me, backend in zip(ranks, backends, strict=True)
    ]
    for thread in threads:
        thread.start()
    _join(ranks, threads, Deadline(timeout_s))
    return ranks


def _run(
    me: ThreadRank, backend: Backend, body: Callable[[ThreadRank], Any], timeout_s: float
) -> None:
    replace_thread_group(me.group)
    try:
        if isinstance(backend, ThreadsBackend):
            backend.enter(timeout_s)
        me.result = body(me)
    except BaseException as error:
        me.error = error
        me.group.leave(traceback.format_exc())
    else:
        me.group.leave()
    finally:
        replace_thread_group(None)
        me.done.set()


def _join(ranks: list[ThreadRank], threads: list[threading.Thread], deadline: Deadline) -> None:
    limit = deadline
    pending = list(ranks)
    while pending:
        # One that fails shortens the wait for the others, so look at all of them in turn.
        for me in list(pending):
            if me.done.wait(
                min(0.02, limit.remaining()) if len(pending) > 1 else limit.remaining()
            ):
                pending.remove(me)
                if me.error is not None and limit is deadline:
                    limit = Deadline(min(_AFTERMATH_S, deadline.remaining()))
        if limit.expired():
            break
    for me in pending:
        frame = sys._current_frames().get(threads[me.rank].ident or 0)
        me.stack = "".join(stack_of_test(frame)).rstrip() if frame else ""
        me.stack = me.stack or "(ended just now)"
    for me in pending:
        for group in (*me.group.children, me.group):
            group.abort("the test's deadline has passed")
