"""The process of a rank: takes tasks from the controller one after the other.

It is forked from a server that has imported torch already, so a new one costs milliseconds. A
thread beside the test answers when the controller asks where the rank stands.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

from gradsync.launch.verdict import follows_from_another
from gradsync.testing.entry import DUMP_SIGNAL
from gradsync.testing.messages import CallTask, Finished, ItemTask
from gradsync.testing.rank import ActiveRank
from gradsync.testing.stacks import stack_of_test

__all__ = ["ANSWERING_THREAD", "run", "standing_by"]

ANSWERING_THREAD = "gradsync test kit"

_PR_SET_PDEATHSIG = 1


def run(tasks: Connection, questions: Connection, stacks: Connection) -> None:
    """Run tasks until the controller hangs up."""
    worker = _Worker(tasks)
    with standing_by(questions, stacks, worker.describe):
        worker.run()


@contextlib.contextmanager
def standing_by(
    questions: Connection, stacks: Connection, describe: Callable[[], str]
) -> Iterator[None]:
    """Be a rank that ends with its controller and says where it stands whenever that one asks."""
    # We end with the server that forked us, and that one with the controller, whoever kills it: if
    # only nobody else holds the pipe by which it notices.
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's to handle
    # For a rank that holds the interpreter lock and cannot answer: written by the signal handler.
    faulthandler.register(DUMP_SIGNAL, stacks.fileno(), all_threads=True)
    answering = threading.Thread(
        target=_answer, args=(questions, describe), name=ANSWERING_THREAD, daemon=True
    )
    answering.start()
    yield


class _Worker:
    def __init__(self, tasks: Connection) -> None:
        self._tasks = tasks
        self._active: ActiveRank | None = None
        self._pytest: object = None

    def run(self) -> None:
        while True:
            try:
                task = self._tasks.recv()
            except (EOFError, OSError):
                break
            try:
                result = self._item(task) if isinstance(task, ItemTask) else self._call(task)
            except BaseException as error:
                result = replace(_failed(error), dirty=True)
            self._tasks.send(result)
        if self._pytest is not None:
            self._pytest.close()  # type: ignore[attr-defined]

    def _item(self, task: ItemTask) -> Finished:
        # Imported here: ranks of a plain unittest need no pytest.
        from gradsync.testing.remote import PytestInRank

        if not isinstance(self._pytest, PytestInRank):
            self._pytest = PytestInRank(task)
        self._active = ActiveRank(task.context)
        try:
            return self._pytest.run(task, self._active, self._tasks)
        finally:
            self._active = None

    def _call(self, task: CallTask) -> Finished:
        active = self._active = ActiveRank(task.context)
        try:
            self._tasks.send("ready")
            active.open_group()
            return Finished(result=task.function(*task.args))
        except BaseException as error:
            active.release_others(traceback.format_exc())
            return _failed(error)
        finally:
            active.close_group()
            self._active = None

    def describe(self) -> str:
        """Return what the test of the moment is doing."""
        active = self._active
        return "" if active is None else active.describe()


def _answer(questions: Connection, describe: Callable[[], str]) -> None:
    """Tell the controller where this rank stands, as often as it asks."""
    while True:
        try:
            questions.recv()
            questions.send(_where(describe))
        except (EOFError, OSError):
            break


def _where(describe: Callable[[], str]) -> str:
    main = threading.main_thread().ident
    mine = threading.get_ident()
    lines = [f"pid {os.getpid()}"]
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if ident == mine:
            continue
        name = next((t.name for t in threading.enumerate() if t.ident == ident), "unknown")
        lines.append(f"thread {name!r}:")
        lines += [line.rstrip() for line in stack_of_test(frame)]
    lines.append(describe())
    return "\n".join(line for line in lines if line)


def _failed(error: BaseException) -> Finished:
    """Return the outcome of a task that raised; call it where the exception is handled."""
    text = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")  # one that cannot travel
    return Finished(error=error, traceback=text, follows=follows_from_another(error))
