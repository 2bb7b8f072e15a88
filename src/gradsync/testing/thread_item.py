"""A pytest function on thread ranks: each thread gets its own ``rank``, ``group`` and ``store``."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from gradsync.launch.verdict import follows_from_another
from gradsync.stores.prefix import PrefixStore
from gradsync.testing.asserts import share
from gradsync.testing.faults import Fault
from gradsync.testing.merge import RELEASED
from gradsync.testing.rank import SEED
from gradsync.testing.threads import ThreadRank, run_threads

__all__ = ["run_item"]


def run_item(
    function: Callable[..., Any],
    given: dict[str, Any],
    size: int,
    faults: Sequence[Fault],
    timeout_s: float,
) -> None:
    """Run a test function on thread ranks; raise the first cause, with a line on every rank."""
    deadly = [f for f in faults if f.is_deadly or f.kind in ("stop", "drop_connection")]
    if deadly:
        pytest.skip(f"{deadly[0].kind} needs ranks that are processes")

    def body(me: ThreadRank) -> None:
        own = {
            "rank": me.rank,
            "group": me.group,
            "store": PrefixStore("test", me.store),
            "shared": lambda make: share(PrefixStore("kit", me.store), me.rank, make),
        }
        function(**{name: own.get(name, value) for name, value in given.items()})

    with _process_kept():
        ranks = run_threads(size, body, timeout_s=timeout_s, faults=faults)
    _judge(ranks, timeout_s)


@contextlib.contextmanager
def _process_kept() -> Iterator[None]:
    """Begin with the seed of every test on ranks, and leave the pytest process as it was."""
    environment = dict(os.environ)
    dtype = torch.get_default_dtype()
    python, state = random.getstate(), torch.get_rng_state()
    random.seed(SEED)
    torch.default_generator.manual_seed(SEED)
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(state)
        torch.set_default_dtype(dtype)
        if environment != dict(os.environ):
            os.environ.clear()
            os.environ.update(environment)


def _judge(ranks: Sequence[ThreadRank], timeout_s: float) -> None:
    failed = [me for me in ranks if me.error is not None]
    failed.sort(key=lambda me: follows_from_another(me.error))
    stuck = [me for me in ranks if me.stack]
    if failed and not (stuck and follows_from_another(failed[0].error)):
        error = failed[0].error
        assert error is not None
        if hasattr(error, "add_note"):  # Python 3.11
            lines = "; ".join(_line(me) for me in ranks)
            error.add_note(f"shown: rank {failed[0].rank}. {lines}")
        raise error
    if stuck:
        blocks = []
        for me in ranks:
            blocks.append(f"---------- rank {me.rank} ----------")
            blocks.append(me.stack or _line(me))
            blocks += me.log.lines() if me.log else []
        names = ", ".join(str(me.rank) for me in stuck)
        pytest.fail(
            f"rank{'s' * (len(stuck) > 1)} {names} had not finished after {timeout_s:g} s\n"
            + "\n".join(blocks),
            pytrace=False,
        )
    missed = [text for me in ranks if me.injector and (text := me.injector.missed())]
    if missed:
        pytest.fail("; ".join(missed), pytrace=False)


def _line(me: ThreadRank) -> str:
    if me.stack:
        return f"rank {me.rank}: not finished"
    if me.error is None:
        return f"rank {me.rank}: passed"
    if follows_from_another(me.error):
        return f"rank {me.rank}: {RELEASED}"
    text = str(me.error).strip().splitlines() or [type(me.error).__name__]
    return f"rank {me.rank}: failed: {text[0]}"
