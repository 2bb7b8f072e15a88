"""A pytest function on thread ranks: each thread gets its own ``rank``, ``group`` and ``store``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gradsync.launch.verdict import follows_from_another
from gradsync.stores.prefix import PrefixStore
from gradsync.testing.faults import Fault
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
    deadly = [fault for fault in faults if fault.is_deadly or fault.kind == "stop"]
    if deadly:
        pytest.skip(f"{deadly[0].kind} needs ranks that are processes")

    def body(me: ThreadRank) -> None:
        own = {"rank": me.rank, "group": me.group, "store": PrefixStore("test", me.store)}
        function(**{name: own.get(name, value) for name, value in given.items()})

    ranks = run_threads(size, body, timeout_s=timeout_s, faults=faults)
    failed = [me for me in ranks if me.error is not None]
    failed.sort(key=lambda me: follows_from_another(me.error or Exception()))
    stuck = [me for me in ranks if me.stack]
    lines = [_line(me) for me in ranks]
    if failed:
        error = failed[0].error
        assert error is not None
        error.add_note(f"shown: rank {failed[0].rank}. " + "; ".join(lines)) if hasattr(
            error, "add_note"
        ) else None
        raise error
    if stuck:
        blocks = []
        for me in ranks:
            blocks.append(f"---------- rank {me.rank} ----------")
            blocks.append(me.stack or "finished")
            blocks += me.log.lines() if me.log else []
        names = ", ".join(str(me.rank) for me in stuck)
        pytest.fail(
            f"rank{'s' * (len(stuck) > 1)} {names} had not finished after {timeout_s:g} s\n"
            + "\n".join(blocks),
            pytrace=False,
        )


def _line(me: ThreadRank) -> str:
    if me.stack:
        return f"rank {me.rank}: not finished"
    if me.error is None:
        return f"rank {me.rank}: passed"
    if follows_from_another(me.error):
        return f"rank {me.rank}: released, because another rank had failed"
    text = str(me.error).strip().splitlines() or [type(me.error).__name__]
    return f"rank {me.rank}: failed: {text[0]}"
