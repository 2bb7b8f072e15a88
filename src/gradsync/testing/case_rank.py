"""The rank's side of the test classes: find the class, run one test of it, say how it went."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import io
import os
import sys
import traceback
import unittest
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch

from gradsync import _native
from gradsync.errors import DistBackendError, UsageError
from gradsync.group.world import default_group
from gradsync.launch.verdict import follows_from_another
from gradsync.session.lifecycle import destroy_process_group
from gradsync.testing.skips import SkipExit, skip_reason_of
from gradsync.testing.worker import standing_by

# Ranks seed it, and are forked from a process that has imported this module.
with contextlib.suppress(ImportError):
    importlib.import_module("numpy.random")

# unittest and this kit leave frames of such modules out of tracebacks.
__unittest = True

__all__ = [
    "ClassAddress",
    "Start",
    "Word",
    "describe_groups",
    "leave_groups",
    "main",
    "release_peers",
    "run_body",
    "skip_reason",
    "word_of",
]


@dataclass(frozen=True)
class Word:
    """What a rank tells its parent of a test: nothing, an exception or a skip."""

    error: str = ""
    follows: tuple[int, ...] = ()
    skip: str | None = None


@dataclass(frozen=True)
class ClassAddress:
    """Where another process finds a test class: by name, or by file if the name means another."""

    module: str
    file: str
    qualname: str

    @classmethod
    def of(cls, kind: type) -> ClassAddress:
        """Return the address of a class."""
        if "<locals>" in kind.__qualname__:
            raise UsageError(
                f"{kind.__qualname__} is defined inside a function, where its ranks, which are "
                f"other processes, cannot find it; define it at the top of its module"
            )
        file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
        return cls(kind.__module__, os.path.abspath(file) if file else "", kind.__qualname__)

    def load(self) -> Any:
        """Import the class."""
        found: Any = self._module()
        for name in self.qualname.split("."):
            found = getattr(found, name)
        return found

    def _module(self) -> Any:
        try:
            module = importlib.import_module(self.module)
        except ModuleNotFoundError:
            if not self.file:
                raise
        else:
            file = getattr(module, "__file__", None) or ""
            if not self.file or os.path.abspath(file) == self.file:
                return module
        # pytest's importlib mode leaves modules where no import finds them.
        spec = importlib.util.spec_from_file_location(self.module, self.file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[self.module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


@dataclass(frozen=True)
class Start:
    """What a rank's process begins with: the class method to call, with ``args`` and a pipe."""

    address: ClassAddress
    method: str
    args: tuple[Any, ...]
    world_size: int
    output: str
    """The file that takes what the rank writes."""
    env: dict[str, str]
    cwd: str


def main(pipe: Connection, questions: Connection, stacks: Connection, start: Start) -> None:
    """Be a rank of a test class."""
    os.environ.clear()
    os.environ.update(start.env)
    os.chdir(start.cwd)
    _redirect(start.output)
    faulthandler.enable()
    with standing_by(questions, stacks, describe_groups):
        torch.set_num_threads(max(1, _native.usable_cores() // start.world_size))
        getattr(start.address.load(), start.method)(*start.args, pipe)


def _redirect(path: str) -> None:
    """Write to a file from now on: the parent's output may be long gone, or captured by someone."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target, name in ((1, "stdout"), (2, "stderr")):
        with contextlib.suppress(OSError, ValueError):
            getattr(sys, name).flush()
        os.dup2(file, target)
        writer = io.TextIOWrapper(
            io.FileIO(target, "w", closefd=False), errors="replace", line_buffering=True
        )
        setattr(sys, name, writer)
    os.close(file)


def run_body(case: unittest.TestCase, body: Callable[[], object]) -> None:
    """Run a test's body and the cleanups that it asked for."""
    try:
        body()
    finally:
        case.doCleanups()


def word_of(error: BaseException) -> Word:
    """Return what to tell of the exception that ended a test."""
    reason = skip_reason(error)
    if reason is not None:
        return Word(skip=reason)
    ranks: tuple[int, ...] = ()
    if follows_from_another(error):
        ranks = error.ranks if isinstance(error, DistBackendError) else (-1,)
    text = "".join(traceback.format_exception(type(error), error, _own_frames(error.__traceback__)))
    return Word(error=text, follows=ranks)


def _own_frames(where: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first frame that is the test's, not unittest's or the kit's."""
    found = where
    while found is not None and "__unittest" in found.tb_frame.f_globals:
        found = found.tb_next
    return found or where


def skip_reason(error: BaseException) -> str | None:
    """Return why an exception skips the test, None when it is a failure."""
    if isinstance(error, SkipExit):
        return str(error)
    if isinstance(error, SystemExit):
        return skip_reason_of(error.code)
    # pytest.skip() does not raise unittest's exception.
    outcomes = sys.modules.get("_pytest.outcomes")
    kinds = (unittest.SkipTest, outcomes.Skipped) if outcomes else (unittest.SkipTest,)
    return str(error) if isinstance(error, kinds) else None


# -- groups ---------------------------------------------------------------------------------------


def release_peers(error: BaseException) -> None:
    """Let nobody wait for this rank any more; the report has the traceback, so a line will do."""
    group = default_group()
    if group is not None:
        group.leave(f"{type(error).__name__}: {error}".splitlines()[0])


def leave_groups() -> None:
    """Leave the default groups that the test made, gradsync's and torch's."""
    # The test has its verdict: what goes wrong in tidying up must not change it.
    with contextlib.suppress(Exception):
        if default_group() is not None:
            destroy_process_group()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        with contextlib.suppress(Exception):
            distributed.destroy_process_group()


def describe_groups() -> str:
    """Say how the default group stands as this rank sees it, for the report of a hang."""
    group = default_group()
    states = getattr(group.backend, "states", None) if group is not None else None
    if states is None:
        return ""
    return "the group as this rank sees it:\n" + "\n".join(
        f"  rank {s.rank} (pid {s.pid}) {s.presence}: #{s.sequence} {s.doing}" for s in states()
    )
