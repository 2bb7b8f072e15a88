"""Test classes with one fresh process for each rank of each test, under unittest and pytest.

The names are those of torch's ``MultiProcessTestCase``. Processes are forked from a server that has
imported torch, so a test costs milliseconds.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
import unittest
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import MethodType
from typing import Any, ClassVar
from unittest import mock

import torch

from gradsync.group.group import ProcessGroup
from gradsync.group.world import resolve
from gradsync.session.lifecycle import init_process_group
from gradsync.stores.file import FileStore
from gradsync.testing.case_rank import leave_groups, release_peers, run_body, word_of
from gradsync.testing.case_ranks import CaseRanks
from gradsync.testing.case_verdict import (
    TEST_ERROR_EXIT_CODE,
    Ending,
    ExpectedCode,
    judge,
    judge_exit_codes,
)
from gradsync.testing.equality import TestCase
from gradsync.testing.reference import set_rng_seed
from gradsync.testing.skips import DEFAULT_WORLD_SIZE, TEST_SKIPS, get_timeout

__unittest = True  # unittest leaves frames of such modules out of tracebacks

__all__ = ["DistributedTestBase", "MultiProcessTestCase", "RankedTestCase"]


class RankedTestCase(TestCase):
    """A test class whose bodies run on ranks, while the instance that unittest made only waits."""

    MAIN_PROCESS_RANK: ClassVar[int] = -1
    rank: int = MAIN_PROCESS_RANK

    def __init__(self, method_name: str = "runTest", methodName: str = "runTest") -> None:  # noqa: N803
        chosen = methodName if methodName != "runTest" else method_name
        super().__init__(chosen)
        body = getattr(self, chosen, None)
        if body is not None:
            setattr(self, chosen, self.join_or_run(body))

    def join_or_run(self, fn: Callable[[], object]) -> Callable[[], object]:
        """Return what to call in place of a test: on a rank its body, elsewhere a wait for it."""

        @functools.wraps(fn)
        def wrapper(self: RankedTestCase) -> None:
            if self.rank == self.MAIN_PROCESS_RANK:
                self._join_ranks(fn)
            else:
                fn()

        return MethodType(wrapper, self)

    def _join_ranks(self, fn: Callable[[], object]) -> None:
        raise NotImplementedError

    def _current_test_name(self) -> str:
        return self._testMethodName

    @property
    def is_master(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0


class MultiProcessTestCase(RankedTestCase):
    """Runs each test on ``world_size`` fresh processes; ``setUp`` must call ``_spawn_processes``.

    ``setUp`` and ``tearDown`` run in the parent only, the test itself on the ranks only. Every
    rank must end with exit code 0, or with what ``special_return_code_checks`` says.
    """

    TEST_ERROR_EXIT_CODE: ClassVar[int] = TEST_ERROR_EXIT_CODE

    fresh_interpreter: ClassVar[bool] = False
    """Start new interpreters instead of forking a warm one: seconds, for tests that need it."""

    file_name: str
    """A file that only this test has, for a ``FileStore``."""
    special_return_code_checks: dict[Any, ExpectedCode]
    """Exit codes other than 0 that tests expect, by test: its name, its method or what that wraps.

    A number is expected of rank 0 and allowed on the others; ``{rank: code}`` names ranks.
    """
    skip_return_code_checks: list[Any]
    """The tests whose exit codes do not matter, named in the same ways."""

    @property
    def world_size(self) -> int:
        """How many ranks a test runs on; override it."""
        return DEFAULT_WORLD_SIZE

    @property
    def destroy_pg_upon_exit(self) -> bool:
        """Whether a rank leaves the default group after its test, so that tests need not."""
        return True

    # -- in the parent ----------------------------------------------------------------------------

    def setUp(self) -> None:
        """Prepare a test; ranks start with ``_spawn_processes``."""
        super().setUp()
        self.special_return_code_checks = {}
        self.skip_return_code_checks = []
        self._ranks: CaseRanks | None = CaseRanks()
        # Not in tearDown, which does not run when a setUp fails and may be overridden.
        self.addCleanup(self._end_processes)
        file = self._ranks.folder / "store"
        file.touch()
        self.file_name = str(file)
        self._began: float | None = None

    def _spawn_processes(self) -> None:
        """Start the ranks of this test."""
        assert self._ranks is not None
        self._began = time.monotonic()
        self._ranks.start(
            type(self),
            "_run",
            self.world_size,
            lambda rank: (rank, self._current_test_name(), self.file_name),
            fresh=self.fresh_interpreter,
        )

    @property
    def processes(self) -> list[BaseProcess]:
        """The processes of the ranks, in rank order."""
        return [rank.process for rank in self._ranks.ranks] if self._ranks else []

    @property
    def pid_to_pipe(self) -> dict[int, Connection]:
        """The parent's end of each rank's pipe, by process id."""
        return {rank.pid: rank.tasks for rank in self._ranks.ranks} if self._ranks else {}

    def _join_ranks(self, fn: Callable[[], object]) -> None:
        self._join_processes(fn)

    def _join_processes(self, fn: Callable[[], object]) -> None:
        """Wait for all ranks and raise what they deserve."""
        if self._began is None or self._ranks is None:
            raise RuntimeError(
                f"no rank has run {self.id()}: setUp did not call self._spawn_processes()"
            )
        if not self._ranks.ranks:
            raise unittest.SkipTest("world_size is 0")
        expected = _entry(self.special_return_code_checks, fn)
        ignore = any(_means(key, fn) for key in self.skip_return_code_checks)

        def is_bad(ending: Ending) -> bool:
            judge_exit_codes([ending], expected, ignore=ignore)
            return ending.failed

        timeout_s = get_timeout(self.id())
        endings = self._ranks.gather(timeout_s, is_bad, until_exit=True)
        self._end_processes()
        judge(endings, self.id(), time.monotonic() - self._began)

    def _end_processes(self) -> None:
        if self._ranks is not None:
            self._ranks.end()
            self._ranks = None

    # -- on a rank --------------------------------------------------------------------------------

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, parent_pipe: Any) -> None:
        """Be a rank: make an instance of its own and run the test."""
        self = cls(test_name)
        self.rank = rank
        self.file_name = file_name
        self.run_test(test_name, parent_pipe)

    def run_test(self, test_name: str, parent_pipe: Any) -> None:
        """Run the test on this rank; how it went is the exit code, with words in the pipe."""
        set_rng_seed()
        try:
            run_body(self, getattr(self, test_name))
        except SystemExit:
            raise  # a skip with its own code, or the test's own wish
        except BaseException as error:
            word = word_of(error)
            release_peers(error)
            parent_pipe.send(word)
            generic = TEST_SKIPS["generic"].exit_code
            sys.exit(TEST_ERROR_EXIT_CODE if word.skip is None else generic)
        finally:
            if self.destroy_pg_upon_exit:
                leave_groups()


class DistributedTestBase(MultiProcessTestCase):
    """A ``MultiProcessTestCase`` that starts its ranks by itself and has ``create_pg``."""

    def setUp(self) -> None:
        """Export ``WORLD_SIZE`` while the test runs, and start the ranks."""
        super().setUp()
        exported = mock.patch.dict("os.environ", {"WORLD_SIZE": str(self.world_size)})
        exported.start()
        self.addCleanup(exported.stop)
        self._spawn_processes()

    def backend(self, device: str) -> str:
        """Return the backend for a kind of device: shared memory unless it is an accelerator."""
        kinds = {"cuda": "nccl", "hpu": "hccl", "xpu": "xccl"}
        return next((kinds[kind] for kind in kinds if kind in str(device)), "shm")

    def create_pg(self, device: str, world_size: int | None = None) -> ProcessGroup:
        """Form the default group with the other ranks of this test and return it."""
        size = self.world_size if world_size is None else world_size
        backend = self.backend(device)
        if backend != "shm":
            torch.get_device_module(torch.device(device).type).set_device(self.rank)
        init_process_group(
            backend, store=FileStore(self.file_name, size), rank=self.rank, world_size=size
        )
        return resolve(None)

    def rank_to_device(self, device: str) -> dict[int, list[int]]:
        """Return the device indices of each rank, shared in turn when there are fewer."""
        count = torch.get_device_module(torch.device(device).type).device_count()
        return {rank: [rank % count] for rank in range(self.world_size)}


def _means(key: object, fn: Callable[[], object]) -> bool:
    """Return whether a key of a table of tests means this one."""
    if isinstance(key, str):
        return key == getattr(fn, "__name__", "")
    return callable(key) and _innermost(key) is _innermost(fn)


def _innermost(fn: Callable[..., object]) -> object:
    plain: Any = inspect.unwrap(getattr(fn, "__func__", fn))
    return getattr(plain, "__func__", plain)


def _entry(table: dict[Any, ExpectedCode], fn: Callable[[], object]) -> ExpectedCode | None:
    return next((code for key, code in table.items() if _means(key, fn)), None)
