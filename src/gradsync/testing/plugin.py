"""The pytest plugin: ``@pytest.mark.ranks(2)`` runs a test on that many ranks.

Comes with gradsync. It costs nothing in a run without such tests: torch is not even imported.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from gradsync.errors import UsageError
from gradsync.testing.given import arguments
from gradsync.testing.marker import Ranks, backends_of, ranks_of, unavailable

if TYPE_CHECKING:
    from gradsync.group.group import ProcessGroup
    from gradsync.stores.store import Store
    from gradsync.testing.pool import RankPool

pytest.register_assert_rewrite("gradsync.testing.conformance")

_POOL = pytest.StashKey["RankPool"]()
# What the dumps of hanging ranks may take.
_MARGIN_S = 5.0
_PLAIN = (str, int, float, bool, type(None))

# Options that must not reach a rank: the controller selects, debugs and stops.
_CONTROLLERS = {
    "keyword",
    "markexpr",
    "usepdb",
    "trace",
    "plugins",
    "lf",
    "failedfirst",
    "maxfail",
    "deselect",
    "numprocesses",
    "dist",
    "tx",
    "stepwise",
    "collectonly",
    "setupplan",
    "setuponly",
    "setupshow",
    "capture",
    "basetemp",
    "inifilename",
    "rootdir",
    "file_or_dir",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the kit's options."""
    group = parser.getgroup("gradsync", "tests on several ranks")
    group.addoption(
        "--pdb-rank",
        type=int,
        metavar="N",
        help="open a debugger when rank N fails (--pdb alone: on the first rank that fails)",
    )
    group.addoption(
        "--ranks-timeout",
        type=float,
        metavar="SECONDS",
        help="deadline of a test on ranks; the marker's own timeout comes first (default: 60)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers",
        "ranks(*sizes, threads=False, backend='shm', timeout=None, faults=(), group=True, "
        "may_leave=()): run the test on that many ranks",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each size and backend of the marker."""
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    ranks = Ranks.parse(marker)
    for name, values in (("world_size", ranks.sizes), ("backend", ranks.backends)):
        if len(values) > 1:
            if name not in metafunc.fixturenames:
                metafunc.fixturenames.append(name)
            unit = "ranks" if name == "world_size" else ""
            metafunc.parametrize(name, values, ids=[f"{value}{unit}" for value in values])


# -- on processes ---------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test on the pool's ranks instead of in this process."""
    ranks = ranks_of(item)
    if ranks is None or ranks.on_threads(item) or _in_rank():
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports(item, ranks, nextitem):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    item.session._setupstate.teardown_exact(nextitem)
    return True


def _reports(
    item: pytest.Item, ranks: Ranks, nextitem: pytest.Item | None
) -> list[pytest.TestReport]:
    try:
        return _run_on_pool(item, ranks, nextitem)
    except pytest.fail.Exception as error:  # from outside of the test, such as pytest-timeout's
        from gradsync.testing.merge import framed

        return framed(item, str(error))


def _in_rank() -> bool:
    import sys

    remote = sys.modules.get("gradsync.testing.remote")
    return remote is not None and remote.active_rank() is not None


def _run_on_pool(
    item: pytest.Item, ranks: Ranks, nextitem: pytest.Item | None
) -> list[pytest.TestReport]:
    from gradsync.testing.ahead import next_on_rank
    from gradsync.testing.merge import merge, plain_report, reissue_warnings
    from gradsync.testing.messages import ItemTask

    reason = unavailable(ranks.backend(item))
    if reason is not None:
        path, line, _ = item.location
        return [plain_report(item, "setup", "skipped", (path, line or 0, f"Skipped: {reason}"))]
    pool = _pool_of(item.config)
    size = ranks.size(item)
    timeout_s = _timeout(item, ranks)
    following = [next_on_rank(rank, nextitem) for rank in range(size)]
    args, options = arguments(item.config), _options(item.config)
    basetemp = _basetemp(item.config)
    coverage = _coverage(item.config)
    tasks = [
        ItemTask(
            pool.context(
                rank,
                size,
                backend=ranks.backend(item),
                timeout_s=timeout_s,
                faults=ranks.faults,
                with_group=ranks.group,
                may_leave=ranks.may_leave,
            ),
            str(item.config.rootpath),
            str(item.config.inipath or ""),
            args,
            basetemp,
            options,
            str(item.path),
            item.nodeid,
            str(after.path) if after is not None else "",
            after.nodeid if after is not None else "",
            coverage,
            _debug(item.config, rank),
        )
        for rank, after in enumerate(following)
    ]
    start = time.perf_counter()
    outcomes = pool.run(tasks, timeout_s)
    reissue_warnings(item, outcomes)
    return merge(item, outcomes, timeout_s, time.perf_counter() - start)


def _basetemp(config: pytest.Config) -> str:
    if config.option.basetemp is None:
        return ""
    # Asked for now, because pytest clears it the first time that somebody asks.
    return str(config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]


def _options(config: pytest.Config) -> dict[str, Any]:
    """Return the options that ranks share with the controller."""
    return {
        name: value
        for name, value in vars(config.option).items()
        if name not in _CONTROLLERS and isinstance(value, _PLAIN)
    }


def _coverage(config: pytest.Config) -> dict[str, Any] | None:
    """Return what coverage.py needs in a rank when pytest-cov measures this run."""
    if not config.pluginmanager.hasplugin("_cov"):
        return None
    sources = [source for source in config.option.cov_source if isinstance(source, str) and source]
    return {
        "source": sources or None,
        "branch": config.option.cov_branch or None,
        "config_file": config.option.cov_config or True,
        "data_suffix": True,  # a file of its own, which pytest-cov finds and combines
    }


def _timeout(item: pytest.Item, ranks: Ranks) -> float:
    chosen: float | None = ranks.timeout or item.config.getoption("--ranks-timeout")
    # Before pytest-timeout: its report would show the controller's stack, not those of the ranks.
    return min(60.0 if chosen is None else chosen, _before_pytest_timeout(item))


def _before_pytest_timeout(item: pytest.Item) -> float:
    if not item.config.pluginmanager.hasplugin("timeout"):
        return math.inf
    limit = getattr(item.config, "_env_timeout", None)
    marker = item.get_closest_marker("timeout")
    if marker is not None:
        limit = marker.kwargs.get("timeout", marker.args[0] if marker.args else limit)
    if not isinstance(limit, int | float) or limit <= 0:
        return math.inf
    return limit - min(_MARGIN_S, limit / 4)


def _debug(config: pytest.Config, rank: int) -> str:
    chosen: int | None = config.getoption("--pdb-rank")
    if chosen is not None:
        return "always" if rank == chosen else ""
    return "first" if config.getoption("usepdb", False) else ""


def _pool_of(config: pytest.Config) -> RankPool:
    if _POOL not in config.stash:
        from gradsync.testing.pool import RankPool

        pool = config.stash[_POOL] = RankPool()
        capture = config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            pool.while_debugging = lambda: _without_capture(capture)
    return config.stash[_POOL]


@contextlib.contextmanager
def _without_capture(capture: Any) -> Iterator[None]:
    capture.suspend(in_=True)
    try:
        yield
    finally:
        capture.resume()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """End the pool with the last test, before coverage data are combined."""
    politely = False  # whoever interrupts a run does not want to wait for busy ranks
    try:
        result = yield
        politely = True
        return result
    finally:
        if _POOL in session.config.stash:
            session.config.stash[_POOL].close(politely=politely)
            del session.config.stash[_POOL]


# -- on threads -----------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test on threads of this process."""
    ranks = ranks_of(pyfuncitem)
    if ranks is None or not ranks.on_threads(pyfuncitem):
        return None
    from gradsync.testing.thread_item import run_item

    names = pyfuncitem._fixtureinfo.argnames
    given = {name: pyfuncitem.funcargs[name] for name in names}
    timeout_s = _timeout(pyfuncitem, ranks)
    run_item(pyfuncitem.obj, given, ranks.size(pyfuncitem), ranks.faults, timeout_s)
    return True


# -- fixtures -------------------------------------------------------------------------------------


def _active(request: pytest.FixtureRequest) -> Any:
    ranks = ranks_of(request.node)
    if ranks is None:
        raise UsageError(
            f"{request.node.nodeid} uses {request.fixturename!r} and needs @pytest.mark.ranks(...)"
        )
    if ranks.on_threads(request.node):
        return None  # given to each thread by itself
    from gradsync.testing.remote import active_rank

    return active_rank()


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> int:
    """The rank that runs the test."""
    active = _active(request)
    return active.context.rank if active is not None else 0


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """How many ranks run the test."""
    ranks = ranks_of(request.node)
    if ranks is None:
        _active(request)
    assert ranks is not None
    return ranks.size(request.node)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """The backend of the test's group."""
    return backends_of(request.node)


@pytest.fixture
def group(request: pytest.FixtureRequest) -> ProcessGroup | None:
    """The test's group, which is the default group too."""
    active = _active(request)
    return active.group if active is not None else None


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Store | None:
    """A store that the ranks of this test share with nobody else."""
    active = _active(request)
    return active.store if active is not None else None


@pytest.fixture
def shared(request: pytest.FixtureRequest) -> Callable[[Callable[[], Any]], Any]:
    """``shared(make)`` calls ``make()`` on rank 0 and returns its result on every rank."""
    active = _active(request)
    if active is None:
        return lambda make: make()
    from gradsync.testing.asserts import share

    return lambda make: share(active.store, active.context.rank, make)
