"""Helper processes of the store tests: a snippet of Python that is always ended and waited for."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

PREAMBLE = """
import os, sys, time, signal, threading
from gradsync.stores import FileStore, HashStore, PrefixStore, to_torch
def say(*words): print(*words, flush=True)
def hear(): return sys.stdin.readline().strip()
"""


class Rank:
    """A Python process that runs a snippet; talk to it with ``say`` and ``hear``."""

    def __init__(self, code: str, *args: object, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + textwrap.dedent(code), *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )

    def __enter__(self) -> Rank:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def hear(self) -> str:
        """Return the next line, or raise with what the process said on stderr."""
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return line.strip()
        assert self.process.stderr is not None
        raise AssertionError(f"a helper process failed:\n{self.process.stderr.read()}")

    def say(self, words: object = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{words}\n")
        self.process.stdin.flush()

    def finish(self) -> str:
        """Wait for the process to end well and return the rest of what it said."""
        out, error = self.process.communicate(timeout=30)
        assert self.process.returncode == 0, error
        return out.strip()

    def kill(self) -> None:
        """End the process with SIGKILL and wait until it is gone."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


@contextmanager
def ranks(number: int, code: str, *args: object) -> Iterator[list[Rank]]:
    """Run the snippet in several processes, with the rank as last argument."""
    started = [Rank(code, *args, rank) for rank in range(number)]
    try:
        yield started
    finally:
        for rank in started:
            rank.kill()
