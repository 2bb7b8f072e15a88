"""``MultiProcContinuousTest``: one set of ranks for a class, and what a failure does to it."""

from unittest import mock

import case_examples as examples
import pytest
from running import failure, nothing_left_behind, passes, run, skip_reason

from gradsync.testing import TEST_SKIPS, TIMEOUT_OVERRIDE


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(tmp_path):
    with nothing_left_behind(tmp_path):
        yield


def test_ranks_and_group_live_as_long_as_the_class_and_a_failure_poisons_the_rest():
    names = ["test_a_remembers", "test_b_is_the_same_process", "test_c_skips"]
    names += ["test_d_needs_gpus", "test_e_goes_on", "test_f_raises", "test_g_after"]
    result = run(examples.Continuous, *names)
    assert result.testsRun == len(names)
    assert {case._testMethodName: reason for case, reason in result.skipped} == {
        "test_c_skips": "not today",
        "test_d_needs_gpus": TEST_SKIPS["multi-gpu-8"].message,
        "test_g_after": "test_f_raises has failed on the ranks of this class",
    }
    [(case, report)] = result.errors
    assert case._testMethodName == "test_f_raises"
    assert "rank 1: raised an exception" in report
    assert "ValueError: only here" in report
    assert "rank 0: lost another rank" in report


def test_class_can_be_run_again_after_a_failure():
    failure(examples.Continuous, "test_f_raises")
    assert passes(examples.Continuous, "test_a_remembers", "test_b_is_the_same_process")


def test_crash_is_a_failure():
    report = failure(examples.Continuous, "test_crashes")
    assert "rank 1: its process has ended: killed by SIGKILL" in report


def test_leaving_is_a_failure():
    report = failure(examples.Continuous, "test_exits")
    assert "SystemExit: 0" in report


def test_hang_shows_the_stack():
    with mock.patch.dict(TIMEOUT_OVERRIDE, {"test_hangs": 1.0}):
        report = failure(examples.Continuous, "test_hangs")
    assert "rank 1: timed out after 1 seconds" in report
    assert "time.sleep(60)" in report
    assert "rank 0: was done" in report


def test_world_is_as_large_as_there_are_devices():
    assert passes(examples.AsManyAsDevices)


def test_world_size_may_be_a_property_and_tear_down_class_forget_its_parent():
    assert passes(examples.SizeIsProperty)


def test_backend_that_is_not_here_skips():
    assert "'nccl' is not available" in skip_reason(examples.NoSuchBackend, "test_anything")
