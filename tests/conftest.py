"""Fixtures of all tests, and a place for what their processes leave behind."""

import os
import shutil
import signal
import tempfile

import pytest

pytest_plugins = ["pytester"]

_own_folder = pytest.StashKey[str]()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Give all processes that tests start a folder for temporary files, whoever they are.

    Some have no chance to tidy up, because they are killed, and some never do: torch's compiler and
    its launcher. This process itself goes on in the usual place, as its temporary folders do.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell ignores Ctrl-C for what it starts in the background; so would all that tests start
        # and interrupt.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    tempfile.gettempdir()  # which is remembered
    session.config.stash[_own_folder] = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="gradsync-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if folder := config.stash.get(_own_folder, None):
        shutil.rmtree(folder, ignore_errors=True)
