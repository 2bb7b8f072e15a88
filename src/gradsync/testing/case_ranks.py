"""The parent's side of the test classes: the processes of one test or class, watched and ended."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from gradsync.base.deadline import Deadline
from gradsync.launch.guardian import end_everything
from gradsync.launch.verdict import last_traceback
from gradsync.testing.case_rank import ClassAddress, Start, Word, main
from gradsync.testing.case_verdict import Ending
from gradsync.testing.pool import RankProcess

__all__ = ["CaseRanks"]

# How long ranks may take to end by themselves once one has failed. They are told at once, so this
# is for their reports only, on a machine that may be busy.
_AFTERMATH_S = 1.5
_SHOWN_LINES = 40
# What ranks of a test class, and programs that they start, have in their environment.
_MARK = "RANK_OF_TEST_CLASS"


class CaseRanks:
    """The rank processes of a test class, with a folder that goes when they go."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gradsync-test-"))
        self.ranks: list[RankProcess] = []
        self._shown: list[int] = []
        self._owner = os.getpid()
        # Before multiprocessing's own handler, which would wait for ranks that wait for us.
        atexit.register(self.end)

    def start(
        self,
        kind: type,
        method: str,
        world_size: int,
        args: Callable[[int], tuple[Any, ...]],
        *,
        fresh: bool,
    ) -> None:
        """Start one process for each rank, which calls ``kind.method(*args(rank), pipe)``."""
        address = ClassAddress.of(kind)
        for rank in range(world_size):
            output = self._output(rank)
            output.touch()
            start = Start(
                address,
                method,
                args(rank),
                world_size,
                str(output),
                {**os.environ, _MARK: str(self.folder)},
                os.getcwd(),
            )
            self.ranks.append(RankProcess(main, (start,), name=f"process {rank}", fresh=fresh))
            self._shown.append(0)

    def _output(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.txt"

    def gather(
        self, timeout_s: float, is_bad: Callable[[Ending], bool], *, until_exit: bool
    ) -> list[Ending]:
        """Wait for the end of a test: every rank's exit, or else every rank's word on it.

        One that is bad, or skips the test and exits, leaves the others a moment to see it and end
        by themselves.
        """
        endings = [Ending(rank) for rank in range(len(self.ranks))]
        pending = dict(enumerate(self.ranks))
        deadline = limit = Deadline(timeout_s)
        while pending and not limit.expired():
            sources = [x for r in pending.values() for x in _sources(r)]
            ready = connection.wait(sources, limit.remaining())
            for at, rank in list(pending.items()):
                if not any(source in ready for source in _sources(rank)):
                    continue
                if self._listen(rank, endings[at], until_exit):
                    del pending[at]
                    is_over = is_bad(endings[at]) or (until_exit and endings[at].skip is not None)
                    if is_over and limit is deadline:
                        limit = Deadline(min(_AFTERMATH_S, deadline.remaining()))
        late = limit is deadline
        for at, rank in pending.items():
            endings[at].stack = rank.where()
            if late:
                endings[at].problem = f"timed out after {timeout_s:g} seconds; it stood here"
        for ending in endings:
            lines = self._new_output(ending.rank)
            ending.output = last_traceback(lines, _SHOWN_LINES, 2 * _SHOWN_LINES)
        return endings

    @staticmethod
    def _listen(rank: RankProcess, ending: Ending, until_exit: bool) -> bool:
        """Take in what a rank says; return whether that was the end of its test."""
        try:
            while not rank.tasks.closed and rank.tasks.poll():
                word = rank.tasks.recv()
                # Classes made for torch's kit send their traceback as it is.
                word = word if isinstance(word, Word) else Word(error=str(word))
                ending.error, ending.follows, ending.skip = word.error, word.follows, word.skip
                if not until_exit:
                    return True
        except (EOFError, OSError):
            rank.tasks.close()  # the pipe ends shortly before the process does
        if not connection.wait([rank.process.sentinel], 0):
            return False
        rank.process.join()
        ending.exit_code = rank.process.exitcode
        return True

    def _new_output(self, rank: int) -> list[str]:
        """Pass on what a rank has written since the last test, and return its lines."""
        with open(self._output(rank), errors="replace") as file:
            file.seek(self._shown[rank])
            text = file.read()
            self._shown[rank] = file.tell()
        lines = text.splitlines()
        for line in lines:
            sys.stdout.write(f"[rank {rank}] {line}\n")
        return lines

    def send(self, message: Any) -> None:
        """Say something to every rank."""
        for rank in self.ranks:
            try:
                rank.tasks.send(message)
            except OSError:
                continue  # it is dead, which is found when its word is awaited

    def end(self, *, politely: bool = False) -> None:
        """End all processes and remove the folder; may be called twice."""
        atexit.unregister(self.end)
        if os.getpid() != self._owner:
            return  # a fork of ours
        ranks, self.ranks = self.ranks, []
        for rank in ranks:
            rank.end(politely=politely)
        # And the programs that they have started, in whichever session.
        end_everything(set(), f"{_MARK}={self.folder}".encode())
        shutil.rmtree(self.folder, ignore_errors=True)


def _sources(rank: RankProcess) -> Sequence[Any]:
    return (rank.process.sentinel,) if rank.tasks.closed else (rank.tasks, rank.process.sentinel)
