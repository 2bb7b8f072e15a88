"""pytest inside a rank: collects a file once, then runs the items that the controller names."""

from __future__ import annotations

import os
import pdb
import sys
import traceback
import warnings
from collections.abc import Generator
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from _pytest.config import _prepareconfig

from gradsync.launch.verdict import follows_from_another
from gradsync.testing import leaks
from gradsync.testing.merge import plain_report
from gradsync.testing.messages import Finished, ItemTask
from gradsync.testing.rank import ActiveRank

__all__ = ["PytestInRank", "active_rank"]

# The controller's business, or harmful twice.
_WITHOUT = ("cacheprovider", "xdist", "xdist.looponfail", "timeout", "pytest_cov", "rerunfailures")

_active: list[ActiveRank] = []


def active_rank() -> ActiveRank | None:
    """Return the rank whose test runs in this process, None outside of one."""
    return _active[0] if _active else None


class PytestInRank:
    """A pytest session that is driven from outside."""

    def __init__(self, task: ItemTask) -> None:
        self._coverage = _start_coverage(task.coverage) if task.coverage else None
        self._observer = _Observer()
        # pytest wants a terminal reporter; what it says is of no interest here.
        self._nowhere = open(os.devnull, "w")  # noqa: SIM115
        shown, sys.stdout = sys.stdout, self._nowhere
        try:
            self._config = _prepareconfig(_arguments(task))
            vars(self._config.option).update(task.options)
            # Nobody reads it, and with -v plugins tell of themselves there: hypothesis, which is
            # imported for that, made the start of a rank 2 s instead of 0.4.
            self._config.option.no_header = True
            self._config._do_configure()
            self._session = pytest.Session.from_config(self._config)
            self._config.hook.pytest_sessionstart(session=self._session)
        finally:
            sys.stdout = shown
        self._config.pluginmanager.register(self._observer, "gradsync-rank")
        self._items: dict[str, pytest.Item] = {}
        self._collected: set[str] = set()

    def run(self, task: ItemTask, active: ActiveRank, controller: Connection) -> Finished:
        """Run one item with the group put up around it, and return its reports."""
        observer = self._observer
        observer.begin(active)
        _active[:] = [active]
        try:
            item = self._find(task.path, task.nodeid)
            following = self._find_next(task)
            controller.send("ready")
            before = leaks.take()
            active.open_group()
            # Under pytest-xdist another item may come than was expected to follow the last one.
            self._session._setupstate.teardown_exact(item)
            self._config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            follows = observer.follows and task.debug == "first"
            if task.debug and observer.traceback is not None and not follows:
                _debug(observer.traceback, controller)
            active.close_group()
            observer.expect_faults(item)
            dirty = self._report_leaks(item, before, task)
        except BaseException as error:
            active.release_others(traceback.format_exc())
            active.close_group()
            # Such as KeyboardInterrupt or pytest.exit(): nothing was torn down, so this process
            # cannot run another item.
            return Finished(
                self._serialised(observer.reports),
                error=RuntimeError(f"{type(error).__name__}: {error}"),
                traceback=traceback.format_exc(),
                follows=follows_from_another(error),
                dirty=True,
            )
        finally:
            _active.clear()
            self._save_coverage()
        return Finished(
            self._serialised(observer.reports),
            observer.warnings,
            follows=observer.follows,
            dirty=dirty,
        )

    def _serialised(self, reports: list[pytest.TestReport]) -> list[dict[str, Any]]:
        hook = self._config.hook
        return [
            hook.pytest_report_to_serializable(config=self._config, report=report)
            for report in reports
        ]

    def _find(self, path: str, nodeid: str) -> pytest.Item:
        if path not in self._collected:
            for item in self._session.perform_collect([path]):
                self._items[item.nodeid] = item
            self._collected.add(path)
        if nodeid not in self._items:
            raise LookupError(
                f"{nodeid} was not found when rank {os.environ.get('RANK')} collected {path}; do "
                f"its parameters depend on the process that collects them?"
            )
        return self._items[nodeid]

    def _find_next(self, task: ItemTask) -> pytest.Item | None:
        try:
            return self._find(task.next_path, task.next_nodeid) if task.next_nodeid else None
        except Exception:
            return None  # its own test will say so

    def _report_leaks(self, item: pytest.Item, before: leaks.Picture, task: ItemTask) -> bool:
        pardoned = set(task.context.may_leave)
        if any(fault.kind == "drop_connection" for fault in task.context.faults):
            pardoned.add("socket")  # the kit's own, which was opened again
        everything = leaks.left_since(before, pardoned)
        left = {kind: what for kind, what in everything.items() if kind not in pardoned}
        if not left:
            return not leaks.RESET.issuperset(everything)
        text = "; ".join(f"{kind}: {what}" for kind, what in left.items())
        message = f"rank {task.context.rank} left something behind: {text}"
        self._observer.replace(plain_report(item, "teardown", "failed", message))
        if "process" in left:
            leaks.end_processes(before)
        return not leaks.RESET.issuperset(everything)

    def close(self) -> None:
        """End the session: fixtures of the widest scope are torn down here."""
        self._session._setupstate.teardown_exact(None)
        # Nobody reads a summary here, and making one may import a lot.
        self._config.pluginmanager.unregister(name="terminalreporter")
        self._config.hook.pytest_sessionfinish(session=self._session, exitstatus=0)
        self._config._ensure_unconfigure()
        self._nowhere.close()
        if self._coverage is not None:
            self._coverage.stop()
        self._save_coverage()

    def _save_coverage(self) -> None:
        """Keep what was measured so far: a rank may be killed, or replaced after a fault."""
        if self._coverage is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there is nothing yet
                self._coverage.save()


def _arguments(task: ItemTask) -> list[str]:
    """Return the command line of the pytest in a rank."""
    args = [f"--rootdir={task.rootdir}", *task.args]
    for plugin in _WITHOUT:
        args += ["-p", f"no:{plugin}"]
    if task.inifile:
        args += ["-c", task.inifile]
    if task.basetemp:
        own = Path(task.basetemp, f"rank-{task.context.rank}")
        # pytest clears the folder that it is given: leave the one of a rank that was replaced.
        args.append(f"--basetemp={own}-{os.getpid()}" if own.exists() else f"--basetemp={own}")
    # The controller's options come as data; some are of plugins that a rank does without.
    os.environ.pop("PYTEST_ADDOPTS", None)  # every test sets the environment anew
    return [*args, "-o", "addopts="]


class _Observer:
    """Collects the reports of one item, and releases the other ranks as soon as it fails."""

    def __init__(self) -> None:
        self._folders: dict[Path, pytest.Collector] = {}
        self.begin(None)

    def begin(self, active: ActiveRank | None) -> None:
        """Forget the item before."""
        self._active = active
        self.reports: list[pytest.TestReport] = []
        self.warnings: list[tuple[str, str, str, str, int]] = []
        self.follows = False
        self.traceback: TracebackType | None = None

    def replace(self, report: pytest.TestReport) -> None:
        """Put a report in the place of the one that says that this phase passed."""
        for at, old in enumerate(self.reports):
            if old.when == report.when and old.passed:
                report.sections, report.duration = old.sections, old.duration
                self.reports[at] = report
                return
        self.reports.append(report)

    def expect_faults(self, item: pytest.Item) -> None:
        """Fail a test that passed although a fault of its plan never happened."""
        injector = self._active.injector if self._active else None
        missed = injector.missed() if injector else ""
        if missed and all(report.passed for report in self.reports):
            self.replace(plain_report(item, "call", "failed", missed))

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_directory(
        self, path: Path
    ) -> Generator[None, pytest.Collector | None, pytest.Collector | None]:
        # A conftest's fixtures belong to the node of its folder, and each collection makes new
        # ones: hand out the first again.
        node = yield
        return None if node is None else self._folders.setdefault(path, node)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, Any, Any]:
        return (yield from self._watch())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, Any, Any]:
        return (yield from self._watch())

    def _watch(self) -> Generator[None, Any, Any]:
        try:
            return (yield)
        except BaseException as error:
            if not isinstance(error, pytest.skip.Exception):
                assert self._active is not None
                self._active.release_others(traceback.format_exc())
                self.follows = follows_from_another(error)
                self.traceback = error.__traceback__
            raise

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)

    @pytest.hookimpl
    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        if when != "runtest":
            return  # the controller has collected the file too
        kind = warning_message.category
        where = warning_message.filename, warning_message.lineno
        self.warnings.append(
            (str(warning_message.message), kind.__module__, kind.__qualname__, *where)
        )


def _start_coverage(settings: dict[str, Any]) -> Any:
    import coverage  # the controller has it, or there would be no settings

    measured = coverage.Coverage(**settings)
    measured.start()
    return measured


def _debug(where: TracebackType, controller: Connection) -> None:
    """Let a person look around on the controlling terminal; the controller steps back meanwhile."""
    controller.send("debug")
    if controller.recv() != "go on":
        return
    try:
        with open("/dev/tty") as keyboard, open("/dev/tty", "w") as screen:
            debugger = pdb.Pdb(stdin=keyboard, stdout=screen)
            debugger.reset()
            debugger.interaction(None, where)
    finally:
        controller.send("done")
