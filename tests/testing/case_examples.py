"""Test classes that the tests of the kit run: some good, most of them bad on purpose."""

# ruff: noqa: N802, PT009, T201

import os
import re
import signal
import subprocess
import sys
import time
import unittest
from pathlib import Path

import torch

import gradsync as dist
from gradsync.testing import (
    DistributedTestBase,
    MultiProcContinuousTest,
    MultiProcessTestCase,
    MultiThreadedTestCase,
    skip_if_lt_x_gpu,
    spawn_threads_and_init_comms,
)


class Processes(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self.special_return_code_checks = {
            "test_expected_abort": -signal.SIGABRT,
            self.test_expected_abort_that_does_not_come: -signal.SIGABRT,
            "test_expected_abort_on_one": {1: -signal.SIGABRT},
        }
        self.skip_return_code_checks = [self.test_any_code]
        self._spawn_processes()

    def form_group(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group(store=store, rank=self.rank, world_size=self.world_size)

    def test_good(self):
        self.form_group()
        tensor = torch.ones(3) * self.rank
        dist.all_reduce(tensor)
        self.assertEqual(tensor, torch.ones(3))
        self.assertEqual(self.is_master, self.rank == 0)
        self.assertEqual(self._current_test_name(), "test_good")

    def test_good_with_torch(self):
        import torch.distributed as c10d

        store = c10d.FileStore(self.file_name, self.world_size)
        c10d.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        tensor = torch.ones(1)
        c10d.all_reduce(tensor)
        self.assertEqual(tensor, 2)

    def test_same_seed(self):
        print("drew", torch.rand(1).item())

    def test_raises_on_one(self):
        self.form_group()
        if self.rank == 1:
            raise ValueError("only here")
        dist.barrier()

    def test_raises_while_other_sleeps(self):
        if self.rank == 1:
            raise ValueError("only here")
        time.sleep(60)

    def test_raises_on_all(self):
        raise ValueError(f"on {self.rank}")

    def test_skips(self):
        raise unittest.SkipTest(f"not today, says {self.rank}")

    def test_skips_on_one(self):
        self.form_group()
        if self.rank == 1:
            raise unittest.SkipTest("not today")
        dist.barrier()

    def test_skips_while_other_forms_a_group(self):
        if self.rank == 1:
            raise unittest.SkipTest("not today")
        self.form_group()

    @skip_if_lt_x_gpu(8)
    def test_needs_gpus(self):
        raise AssertionError("there are no eight GPUs here")

    def test_segfault(self):
        self.form_group()
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        dist.barrier()

    def test_abort_alone(self):
        if self.rank == 1:
            os.abort()

    def test_wrong_code(self):
        if self.rank == 1:
            sys.exit(3)

    def test_wrong_codes_everywhere(self):
        sys.exit(3 + self.rank)

    def test_leaves_early(self):
        if self.rank == 1:
            sys.exit(0)

    def test_any_code(self):
        sys.exit(3 + self.rank)

    def test_expected_abort(self):
        os.abort()

    def test_expected_abort_that_does_not_come(self):
        pass

    def test_expected_abort_on_one(self):
        if self.rank == 1:
            os.abort()

    def test_hangs(self):
        if self.rank == 0:
            self.form_group()
            return
        self.sit_and_wait()

    def sit_and_wait(self):
        time.sleep(60)

    def test_starts_something(self):
        # In another session, and with output of its own.
        nowhere = subprocess.DEVNULL
        subprocess.Popen(["sleep", "61.25"], start_new_session=True, stdout=nowhere, stderr=nowhere)

    def test_sleeps(self):
        Path(os.environ["TMPDIR"], f"pid-{self.rank}").write_text(str(os.getpid()))
        time.sleep(60)

    def test_hangs_with_the_interpreter_lock(self):
        if self.rank == 1:
            re.match(r"(a+)+$", "a" * 40 + "b")

    def test_loud(self):
        print(f"this is {self.rank}")
        sys.stderr.write("careful\n")
        self.assertEqual(self.rank, 0)

    @unittest.expectedFailure
    def test_expected_failure(self):
        raise AssertionError("as expected")

    @unittest.skip("decided before")
    def test_skipped_before(self):
        raise AssertionError("never runs")


class Forgetful(MultiProcessTestCase):
    def test_never_runs(self):
        raise AssertionError


class Empty(Processes):
    world_size = 0

    def test_nothing(self):
        raise AssertionError


class FreshInterpreters(MultiProcessTestCase):
    world_size = 1
    fresh_interpreter = True

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_nobody_was_here_before(self):
        self.assertNotIn("forkserver", " ".join(sys.argv + sys.orig_argv))
        self.assertNotIn("gradsync.testing.remote", sys.modules)


class Base(DistributedTestBase):
    world_size = 2

    def test_create_pg(self):
        self.assertEqual(os.environ["WORLD_SIZE"], "2")
        group = self.create_pg("cpu")
        self.assertEqual(group.size(), 2)
        self.assertEqual(self.backend("cpu"), "shm")
        self.assertEqual(self.backend("cuda:1"), "nccl")
        tensor = torch.full((2, 2), float(self.rank + 1))
        group.all_reduce(tensor)
        self.assertEqual(tensor, 3.0)


class Continuous(MultiProcContinuousTest):
    world_size = 2
    state: list

    def all_reduced(self, value):
        tensor = torch.tensor([float(value)])
        dist.all_reduce(tensor)
        return tensor.item()

    def test_a_remembers(self):
        type(self).state = [os.getpid()]
        self.assertEqual(self.all_reduced(self.rank), 1)

    def test_b_is_the_same_process(self):
        self.assertEqual(type(self).state, [os.getpid()])
        self.assertEqual(self.all_reduced(1), self.world_size)

    def test_c_skips(self):
        raise unittest.SkipTest("not today")

    @skip_if_lt_x_gpu(8)
    def test_d_needs_gpus(self):
        raise AssertionError

    def test_e_goes_on(self):
        self.assertEqual(type(self).state, [os.getpid()])

    def test_f_raises(self):
        if self.rank == 1:
            raise ValueError("only here")
        dist.barrier()

    def test_g_after(self):
        raise AssertionError("the ranks are gone")

    def test_crashes(self):
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    def test_exits(self):
        sys.exit(0)

    def test_hangs(self):
        if self.rank == 1:
            time.sleep(60)


class AsManyAsDevices(MultiProcContinuousTest):
    def test_size(self):
        self.assertEqual(dist.get_world_size(), 1)
        self.assertEqual(self.world_size, 1)
        self.assertEqual(self.device_type(), "cpu")


class SizeIsProperty(MultiProcContinuousTest):
    @property
    def world_size(self):
        return 2

    @classmethod
    def tearDownClass(cls):
        pass  # and forgets to call the one above

    def test_size(self):
        self.assertEqual(dist.get_world_size(), self.world_size)


class NoSuchBackend(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "nccl"

    def test_anything(self):
        raise AssertionError


class Threads(MultiThreadedTestCase):
    world_size = 3

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def perThreadSetUp(self):
        self.mine = [self.rank]

    def perThreadTearDown(self):
        self.mine.clear()

    def test_good(self):
        tensor = torch.tensor([float(self.rank)])
        dist.all_reduce(tensor)
        self.assertEqual(tensor, 3.0)
        self.assertEqual(self.mine, [dist.get_rank()])
        self.assertEqualOnRank(self.rank, 1, rank=1)
        self.assertNotEqualOnRank(self.rank, 1, rank=0)

    def test_raises_on_one(self):
        if self.rank == 1:
            raise ValueError("only here")
        dist.barrier()

    def test_skips(self):
        raise unittest.SkipTest("not today")

    def test_skips_on_one(self):
        if self.rank == 1:
            raise unittest.SkipTest("not today")
        dist.barrier()

    @skip_if_lt_x_gpu(8)
    def test_needs_gpus(self):
        raise AssertionError

    def test_leaves_early(self):
        if self.rank == 1:
            sys.exit(0)

    def test_wrong_code(self):
        if self.rank == 1:
            sys.exit(3)

    def test_hangs(self):
        if self.rank == 1:
            time.sleep(2)


class ForgetfulThreads(MultiThreadedTestCase):
    def test_never_runs(self):
        raise AssertionError


class Decorated(unittest.TestCase):
    @spawn_threads_and_init_comms(world_size=3)
    def test_good(self):
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        self.assertEqual(tensor.item(), 3)

    @spawn_threads_and_init_comms
    def test_raises(self):
        self.assertEqual(dist.get_rank(), 0)

    @skip_if_lt_x_gpu(8)
    def test_needs_gpus(self):
        raise AssertionError
