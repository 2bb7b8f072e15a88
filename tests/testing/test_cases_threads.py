"""``MultiThreadedTestCase`` and ``spawn_threads_and_init_comms``: the same bodies on threads."""

import threading
import time
from unittest import mock

import case_examples as examples
import pytest
from running import failure, passes, run, skip_reason

from gradsync.testing import TEST_SKIPS, TIMEOUT_OVERRIDE


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind():
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def test_good_one_passes():
    assert passes(examples.Threads, "test_good")


def test_it_is_quick():
    start = time.monotonic()
    for _ in range(20):
        assert passes(examples.Threads, "test_good")
    assert time.monotonic() - start < 2


def test_exception_on_one_rank_fails_the_test_and_shows_every_rank():
    report = failure(examples.Threads, "test_raises_on_one")
    assert "failed on 1 of 3 ranks" in report
    assert "ValueError: only here" in report
    assert report.count("lost another rank") == 2


def test_skips_travel():
    assert skip_reason(examples.Threads, "test_skips") == "not today"
    assert skip_reason(examples.Threads, "test_skips_on_one") == "not today"
    assert skip_reason(examples.Threads, "test_needs_gpus") == TEST_SKIPS["multi-gpu-8"].message


def test_leaving_early_is_ignored_unless_it_complains():
    assert passes(examples.Threads, "test_leaves_early")
    assert "SystemExit: 3" in failure(examples.Threads, "test_wrong_code")


def test_hang_shows_the_stack():
    with mock.patch.dict(TIMEOUT_OVERRIDE, {"test_hangs": 0.5}):
        report = failure(examples.Threads, "test_hangs")
    assert "rank 1: timed out after 0.5 seconds" in report
    assert "time.sleep(2)" in report
    stuck = [t for t in threading.enumerate() if t.name == "rank 1"]
    stuck[0].join()


def test_forgetting_to_spawn_is_an_error():
    assert "did not call self._spawn_threads()" in failure(
        examples.ForgetfulThreads, "test_never_runs"
    )


def test_decorated_method():
    assert passes(examples.Decorated, "test_good")
    report = failure(examples.Decorated, "test_raises")
    assert "failed on 3 of 4 ranks" in report


def test_decorator_skips_a_test_without_ranks_like_any_other():
    result = run(examples.Decorated, "test_needs_gpus")
    assert result.skipped[0][1] == TEST_SKIPS["multi-gpu-8"].message
