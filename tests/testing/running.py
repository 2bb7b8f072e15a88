"""Running test classes the way unittest does, and looking at what they leave behind."""

import contextlib
import multiprocessing.util
import os
import tempfile
import unittest
from pathlib import Path
from unittest import mock


def run(kind, *names, suite=unittest.TestSuite):
    """Run tests of a class, all of them unless named, and return unittest's result."""
    loader = unittest.TestLoader()
    cases = [kind(name) for name in names or loader.getTestCaseNames(kind)]
    result = unittest.TestResult()
    suite(cases).run(result)
    return result


def failure(kind, name):
    """Run a test that must fail, and return the report."""
    result = run(kind, name)
    assert len(result.errors) == 1, result
    assert not result.failures
    return result.errors[0][1]


def skip_reason(kind, name):
    """Run a test that must be skipped, and return why it was."""
    result = run(kind, name)
    assert not result.errors, result.errors[0][1]
    assert len(result.skipped) == 1
    return result.skipped[0][1]


def passes(kind, *names):
    result = run(kind, *names)
    assert result.testsRun
    assert not result.errors, result.errors[0][1]
    assert not result.failures, result.failures[0][1]
    assert not result.skipped, result.skipped
    return True


@contextlib.contextmanager
def nothing_left_behind(folder):
    """Let temporary files go to a folder, and see that it is empty and no process is new."""
    # The fork server's own files stay as long as it does.
    multiprocessing.util.get_temp_dir()
    before = rank_processes()
    with mock.patch.object(tempfile, "tempdir", str(folder)):
        yield
    assert os.listdir(folder) == []
    assert rank_processes() == before


def rank_processes():
    """Return the processes that the fork server of this process has started, and spawned ones."""
    from multiprocessing.forkserver import _forkserver

    parents = [os.getpid(), _forkserver._forkserver_pid]
    found = set()
    for parent in filter(None, parents):
        for task in Path(f"/proc/{parent}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                found |= {int(pid) for pid in (task / "children").read_text().split()}
    from multiprocessing.resource_tracker import _resource_tracker

    return found - {_forkserver._forkserver_pid, _resource_tracker._pid}
