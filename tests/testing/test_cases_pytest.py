"""A file with all the classes, run by pytest and by unittest as programs of their own."""

import subprocess
import sys
import textwrap

FILE = textwrap.dedent(
    """
    import unittest
    import pytest
    import torch
    import gradsync as dist
    from gradsync.testing import (
        DistributedTestBase, MultiProcContinuousTest, MultiThreadedTestCase, TEST_SKIPS, TestSkip
    )

    class TestProcesses(DistributedTestBase):
        world_size = 2

        def test_good(self):
            self.create_pg("cpu")
            x = torch.ones(2)
            dist.all_reduce(x)
            self.assertEqual(x, 2)

        def test_bad(self):
            print("hello")
            assert self.rank == 0

        def test_skipped(self):
            pytest.skip("pytest's own")

    class TestContinuous(MultiProcContinuousTest):
        world_size = 2

        def test_one(self):
            dist.barrier()

        def test_two(self):
            raise unittest.SkipTest("later")

    class TestThreads(MultiThreadedTestCase):
        def setUp(self):
            super().setUp()
            self._spawn_threads()

        def test_good(self):
            dist.barrier()

        def test_skipped(self):
            pytest.skip("pytest's own")

    if __name__ == "__main__":
        unittest.main()
    """
)


def test_classes_run_under_pytest(pytester):
    # The mode in which ranks cannot import the file by its name; test_cases_collected.py is run in
    # the other one.
    pytester.makepyfile(test_file=FILE)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--import-mode=importlib")
    result.assert_outcomes(passed=3, failed=1, skipped=3)
    result.stdout.fnmatch_lines(
        ["*TestProcesses.test_bad failed on 1 of 2 ranks*", "*Captured stdout*", "*rank 0] hello"],
        consecutive=False,
    )


def test_classes_run_under_unittest(tmp_path):
    path = tmp_path / "check_something.py"
    path.write_text(FILE)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Ran 7 tests" in done.stderr
    assert "FAILED (errors=1, skipped=3)" in done.stderr
