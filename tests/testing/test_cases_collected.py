"""The classes as a reader of the docs would use them, collected by pytest itself."""

# ruff: noqa: PT009

import torch

import gradsync as dist
from gradsync.testing import (
    DistributedTestBase,
    MultiProcContinuousTest,
    MultiProcessTestCase,
    MultiThreadedTestCase,
    requires_gloo,
)


class Body:
    """One body for all kinds of ranks."""

    world_size = 2

    def check_sum(self):
        tensor = torch.arange(4.0) + self.rank
        dist.all_reduce(tensor)
        self.assertEqual(tensor, [1, 3, 5, 7])


class TestProcesses(Body, MultiProcessTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @requires_gloo()
    def test_sum(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group(store=store, rank=self.rank, world_size=self.world_size)
        self.check_sum()


class TestBase(Body, DistributedTestBase):
    def test_sum(self):
        self.create_pg("cpu")
        self.check_sum()


class TestContinuous(Body, MultiProcContinuousTest):
    def test_sum(self):
        self.check_sum()

    def test_sum_again(self):
        self.check_sum()


class TestThreads(Body, MultiThreadedTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_sum(self):
        self.check_sum()
