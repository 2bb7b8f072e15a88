"""A test class whose ranks live as long as the class: for many small tests on one group."""

from __future__ import annotations

import inspect
import os
import time
import unittest
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import torch

from gradsync.errors import BackendUnavailable
from gradsync.group.group import ProcessGroup
from gradsync.group.world import resolve
from gradsync.launch.verdict import describe_end
from gradsync.session.lifecycle import init_process_group
from gradsync.stores.file import FileStore
from gradsync.testing.case_rank import Word, leave_groups, release_peers, run_body, word_of
from gradsync.testing.case_ranks import CaseRanks
from gradsync.testing.case_verdict import judge
from gradsync.testing.cases import RankedTestCase
from gradsync.testing.reference import set_rng_seed
from gradsync.testing.skips import device_counts, get_timeout

__unittest = True  # unittest leaves frames of such modules out of tracebacks

__all__ = ["MultiProcContinuousTest"]

_AS_MANY_AS_DEVICES = -2


class MultiProcContinuousTest(RankedTestCase):
    """Runs all tests of the class on the same processes and the same group.

    The ranks start with the first test. A test that fails leaves them in a state that nobody knows,
    so they are ended and the rest of the class is skipped. ``setUp`` and ``tearDown`` run in the
    parent only.
    """

    world_size: int = _AS_MANY_AS_DEVICES
    """How many ranks (a property will do): -2 for one on each device."""
    timeout: ClassVar[timedelta] = timedelta(seconds=120)
    """The group's timeout."""
    fresh_interpreter: ClassVar[bool] = False
    """Start new interpreters instead of forking a warm one."""
    rdvz_file: ClassVar[str | None] = None
    """The file at which the ranks meet."""
    poison_pill: ClassVar[bool] = False
    """Whether a test of the class has failed, so that the others are skipped."""
    pg: ClassVar[ProcessGroup | None] = None
    """The group, on a rank."""

    _processes_spawned: ClassVar[bool] = False
    _ranks: ClassVar[CaseRanks | None] = None
    _culprit: ClassVar[str] = ""

    # -- hooks ------------------------------------------------------------------------------------

    @classmethod
    def backend_str(cls) -> str | None:
        """Return the backend of the group; None lets gradsync choose."""
        return None

    @classmethod
    def device_type(cls) -> str:
        """Return the kind of device the tests use: the accelerator that is here, else ``"cpu"``."""
        return next(iter(device_counts()), "cpu")

    @classmethod
    def opts(cls, high_priority_stream: bool = False) -> Any:
        """Return options for the backend; for an ``_init_pg`` of the class's own."""
        return None

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        """Form the group, once on each rank."""
        init_process_group(
            cls.backend_str(),
            store=FileStore(rdvz_file, world_size),
            rank=rank,
            world_size=world_size,
            timeout=cls.timeout,
        )
        cls.pg = resolve(None)

    # -- in the parent ----------------------------------------------------------------------------

    @classmethod
    def setUpClass(cls) -> None:
        """Begin with a clean slate."""
        super().setUpClass()
        cls._end_processes()
        cls.poison_pill = False

    @classmethod
    def tearDownClass(cls) -> None:
        """End the ranks."""
        cls._end_processes(politely=True)
        super().tearDownClass()

    def setUp(self) -> None:
        """Start the ranks before the first test."""
        super().setUp()
        kind = type(self)
        if kind.poison_pill:
            raise unittest.SkipTest(f"{kind._culprit} has failed on the ranks of this class")
        if not kind._processes_spawned:
            kind._spawn_processes(self._count_ranks())

    def _count_ranks(self) -> int:
        size = self.world_size
        if size != _AS_MANY_AS_DEVICES:
            return size
        device = self.device_type()
        size = int(torch.get_device_module(device).device_count())
        if size == 0:
            raise unittest.SkipTest(f"there is no {device} device")
        return size

    @classmethod
    def _spawn_processes(cls, world_size: int) -> None:
        cls._ranks = ranks = CaseRanks()
        cls._processes_spawned = True
        # tearDownClass may be overridden by one that does not call this class's.
        cls.addClassCleanup(cls._end_processes)
        file = cls.rdvz_file = str(ranks.folder / "store")
        ranks.start(
            cls,
            "_worker_loop",
            world_size,
            lambda rank: (rank, world_size, file),
            fresh=cls.fresh_interpreter,
        )

    @classmethod
    def _end_processes(cls, *, politely: bool = False) -> None:
        if cls._ranks is not None:
            cls._ranks.end(politely=politely)
        cls._ranks = None
        cls._processes_spawned = False
        cls.rdvz_file = None

    def _join_ranks(self, fn: Callable[[], object]) -> None:
        kind = type(self)
        assert kind._ranks is not None
        began = time.monotonic()
        kind._ranks.send(self._testMethodName)
        endings = kind._ranks.gather(
            get_timeout(self.id()),
            lambda ending: bool(ending.error) or ending.exit_code is not None,
            until_exit=False,
        )
        for ending in endings:
            if ending.exit_code is not None:
                ending.problem = f"its process has ended: {describe_end(ending.exit_code)}"
        if any(ending.failed for ending in endings):
            kind.poison_pill = True
            kind._culprit = self._testMethodName
            kind._end_processes()
        judge(endings, self.id(), time.monotonic() - began)

    # -- on a rank --------------------------------------------------------------------------------

    @classmethod
    def _worker_loop(cls, rank: int, world_size: int, rdvz_file: str, parent_pipe: Any) -> None:
        """Be a rank: form the group, then run one test after the other."""
        cls.rank = rank
        if not isinstance(inspect.getattr_static(cls, "world_size"), property):
            cls.world_size = world_size
        cls.rdvz_file = rdvz_file
        os.environ["LOCAL_RANK"] = str(rank)
        obstacle = cls._begin(rank, world_size, rdvz_file)
        failed = False
        while True:
            try:
                name = parent_pipe.recv()
            except EOFError:
                break
            word = obstacle or cls._run_test(name)
            failed = failed or bool(word.error)
            parent_pipe.send(word)
        if not failed:
            leave_groups()

    @classmethod
    def _begin(cls, rank: int, world_size: int, rdvz_file: str) -> Word | None:
        """Form the group; return what every test shall say when that fails."""
        try:
            cls._init_pg(rank, world_size, rdvz_file)
        except BackendUnavailable as error:
            return Word(skip=str(error))
        except BaseException as error:
            return word_of(error)
        return None

    @classmethod
    def _run_test(cls, test_name: str) -> Word:
        try:
            case = cls(test_name)
            set_rng_seed()
            run_body(case, getattr(case, test_name))
        except BaseException as error:
            word = word_of(error)
            if word.skip is None:
                release_peers(error)
            return word
        return Word()
