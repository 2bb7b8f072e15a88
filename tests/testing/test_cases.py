"""``MultiProcessTestCase``: each way in which a rank can end, and what becomes of the test."""

import os
import subprocess
import sys
import time
import unittest
from unittest import mock

import case_examples as examples
import psutil
import pytest
from running import failure, nothing_left_behind, passes, run, skip_reason

from gradsync.errors import UsageError
from gradsync.testing import TEST_SKIPS, TIMEOUT_OVERRIDE, MultiProcessTestCase


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(tmp_path):
    with nothing_left_behind(tmp_path):
        yield


@pytest.fixture
def short_timeout():
    names = ("test_hangs", "test_hangs_with_the_interpreter_lock")
    with mock.patch.dict(TIMEOUT_OVERRIDE, dict.fromkeys(names, 1.0)):
        yield


def test_good_one_passes():
    assert passes(examples.Processes, "test_good")


def test_body_may_use_torchs_own_groups():
    assert passes(examples.Processes, "test_good_with_torch")


def test_exception_on_one_rank_fails_the_test_and_shows_every_rank():
    report = failure(examples.Processes, "test_raises_on_one")
    assert "failed on 1 of 2 ranks" in report
    assert "rank 1: raised an exception (exit code 10)" in report
    assert "ValueError: only here" in report
    assert "rank 0: lost another rank" in report
    assert "PeerLostError" in report
    assert report.index("rank 1:") < report.index("rank 0:"), "the cause comes first"
    assert "case_rank.py" not in report, "frames of the kit tell nobody anything"


def test_exception_ends_a_rank_that_sleeps():
    start = time.monotonic()
    report = failure(examples.Processes, "test_raises_while_other_sleeps")
    assert time.monotonic() - start < 20
    assert "ValueError: only here" in report
    assert "rank 0: was ended by the test kit" in report
    assert "time.sleep(60)" in report


def test_exceptions_of_all_ranks_are_shown():
    report = failure(examples.Processes, "test_raises_on_all")
    assert "ValueError: on 0" in report
    assert "ValueError: on 1" in report


def test_skip_carries_its_reason():
    assert skip_reason(examples.Processes, "test_skips") == "not today, says 0"


def test_skip_on_one_rank_is_a_skip_even_when_others_miss_it():
    assert skip_reason(examples.Processes, "test_skips_on_one") == "not today"


def test_what_ranks_have_started_ends_with_them():
    assert passes(examples.Processes, "test_starts_something")
    for process in psutil.process_iter(["name", "cmdline"]):
        assert process.info["cmdline"] != ["sleep", "61.25"]


def test_skip_on_one_rank_ends_the_wait_of_others_for_it():
    start = time.monotonic()
    name = "test_skips_while_other_forms_a_group"
    assert skip_reason(examples.Processes, name) == "not today"
    assert time.monotonic() - start < 30  # it may take 300


def test_skip_of_a_decorator_travels_as_its_exit_code():
    assert skip_reason(examples.Processes, "test_needs_gpus") == TEST_SKIPS["multi-gpu-8"].message


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("test_segfault", "rank 1: killed by SIGSEGV, expected was exit code 0"),
        ("test_abort_alone", "rank 1: killed by SIGABRT"),
        ("test_wrong_code", "rank 1: exit code 3"),
    ],
)
def test_end_of_any_rank_counts(name, expected):
    assert expected in failure(examples.Processes, name)


def test_every_wrong_end_is_named():
    report = failure(examples.Processes, "test_wrong_codes_everywhere")
    assert "failed on 2 of 2 ranks" in report
    assert "rank 0: exit code 3, expected" in report
    assert "rank 1: exit code 4, expected" in report


def test_crash_shows_where():
    report = failure(examples.Processes, "test_segfault")
    assert "Fatal Python error: Segmentation fault" in report
    assert "in test_segfault" in report


def test_leaving_early_with_zero_is_success():
    assert passes(examples.Processes, "test_leaves_early")


@pytest.mark.parametrize("name", ["test_expected_abort", "test_expected_abort_on_one"])
def test_expected_crash_is_success(name):
    assert passes(examples.Processes, name)


def test_expected_crash_that_does_not_come_is_a_failure():
    report = failure(examples.Processes, "test_expected_abort_that_does_not_come")
    assert "rank 0: exit code 0, expected was killed by SIGABRT" in report
    assert "rank 1: was done" in report


def test_codes_can_be_ignored():
    assert passes(examples.Processes, "test_any_code")


@pytest.mark.usefixtures("short_timeout")
def test_hang_shows_the_stacks_of_all_ranks():
    report = failure(examples.Processes, "test_hangs")
    assert "failed on 2 of 2 ranks after 1." in report
    assert "rank 0: timed out after 1 seconds" in report
    assert "rank 1: timed out after 1 seconds" in report
    assert "in sit_and_wait" in report
    assert "in form_group" in report


@pytest.mark.usefixtures("short_timeout")
def test_hang_shows_the_stack_of_a_rank_that_cannot_answer():
    report = failure(examples.Processes, "test_hangs_with_the_interpreter_lock")
    assert "does not answer" in report
    assert "in test_hangs_with_the_interpreter_lock" in report


def test_output_is_passed_on_with_the_rank(capsys):
    report = failure(examples.Processes, "test_loud")
    shown = capsys.readouterr().out
    assert "[rank 0] this is 0\n[rank 0] careful\n" in shown
    assert "[rank 1] this is 1\n" in shown
    assert "1 != 0" in report


def test_ranks_draw_the_same_random_numbers(capsys):
    assert passes(examples.Processes, "test_same_seed")
    first, second = capsys.readouterr().out.splitlines()
    assert first.replace("[rank 0]", "") == second.replace("[rank 1]", "")


def test_unittests_own_decorators_keep_their_meaning():
    result = run(examples.Processes, "test_expected_failure", "test_skipped_before")
    assert len(result.expectedFailures) == 1
    assert result.skipped[0][1] == "decided before"


def test_forgetting_to_spawn_is_an_error():
    assert "did not call self._spawn_processes()" in failure(examples.Forgetful, "test_never_runs")


def test_world_of_nobody_is_skipped():
    assert skip_reason(examples.Empty, "test_nothing") == "world_size is 0"


def test_fresh_interpreter():
    assert passes(examples.FreshInterpreters, "test_nobody_was_here_before")


def test_distributed_test_base():
    before = dict(os.environ)
    assert passes(examples.Base, "test_create_pg")
    assert dict(os.environ) == before


def test_class_inside_a_function_is_refused_with_the_reason():
    class Hidden(MultiProcessTestCase):
        def setUp(self):
            super().setUp()
            self._spawn_processes()

        def test_anything(self):
            pass

    assert "define it at the top of its module" in failure(Hidden, "test_anything")
    assert issubclass(UsageError, ValueError)


def test_method_name_may_be_given_both_ways():
    assert examples.Processes(methodName="test_good")._testMethodName == "test_good"
    assert examples.Processes(method_name="test_good")._testMethodName == "test_good"
    with pytest.raises(ValueError, match="no such test method"):
        examples.Processes(methodName="test_no_such")


def test_processes_and_pipes_can_be_looked_at():
    case = examples.Processes("test_good")
    case.setUp()
    assert [p.name for p in case.processes] == ["process 0", "process 1"]
    assert set(case.pid_to_pipe) == {p.pid for p in case.processes}
    case.tearDown()
    case.doCleanups()
    assert case.processes == []


def test_keys_of_tables_may_be_what_a_test_wraps():
    case = examples.Processes("test_any_code")
    case.setUp()
    case.skip_return_code_checks = [case.test_any_code.__wrapped__]
    case.test_any_code()
    case.doCleanups()


def test_debugging_run_raises_at_once():
    suite = unittest.TestSuite([examples.Processes("test_raises_on_one")])
    with pytest.raises(RuntimeError, match="only here"):
        suite.debug()


def test_ranks_end_with_a_parent_that_is_killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")  # who is killed cannot tidy up
    code = f"import sys; sys.path[:0] = {sys.path!r}; import case_examples, running\n"
    code += "running.run(case_examples.Processes, 'test_sleeps')"
    env = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen([sys.executable, "-c", code], env=env) as parent:
        files = [folder / f"pid-{rank}" for rank in range(2)]
        wait_for(lambda: all(file.exists() and file.read_text() for file in files))
        parent.kill()
    pids = [int(file.read_text()) for file in files]
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
