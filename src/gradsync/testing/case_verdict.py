"""Pure: from how each rank of a test ended to one verdict, and the report that explains it."""

from __future__ import annotations

import unittest
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gradsync.launch.verdict import describe_end
from gradsync.testing.skips import skip_reason_of

__unittest = True  # unittest leaves frames of such modules out of tracebacks

__all__ = ["TEST_ERROR_EXIT_CODE", "Ending", "ExpectedCode", "judge", "judge_exit_codes"]

TEST_ERROR_EXIT_CODE = 10
"""A rank that raised an exception exits with this."""

ExpectedCode = int | Mapping[int, int]
"""An exit code that a test expects: rank 0's, or those of the ranks that a mapping names."""


@dataclass
class Ending:
    """How one rank of a test ended."""

    rank: int
    error: str = ""
    """The traceback of the exception that it raised."""
    follows: tuple[int, ...] = ()
    """The ranks whose loss its exception reports."""
    skip: str | None = None
    """Why it skipped the test."""
    exit_code: int | None = None
    """None while it runs, or when the kit ended it."""
    problem: str = ""
    """What else is wrong with it."""
    stack: str = ""
    """Where it stood when the kit ended it."""
    output: list[str] = field(default_factory=list)
    """The last lines that it wrote."""

    @property
    def failed(self) -> bool:
        """Whether this rank alone makes the test fail."""
        return bool(self.error or self.problem)


def judge_exit_codes(
    endings: Sequence[Ending], expected: ExpectedCode | None, *, ignore: bool
) -> None:
    """Turn exit codes into skips and problems.

    A code that is expected of rank 0 is allowed on the others too. With ``ignore``, only a rank
    that has raised an exception has failed.
    """
    for ending in endings:
        code = ending.exit_code
        if code is None or ignore:
            continue
        good = good_codes(ending.rank, expected)
        reason = skip_reason_of(code)
        if code in good or ending.error:
            continue
        if reason is not None:
            ending.skip = ending.skip or reason
        else:
            wanted = " or ".join(describe_end(g) for g in sorted(good))
            ending.problem = f"{describe_end(code)}, expected was {wanted}"


def good_codes(rank: int, expected: ExpectedCode | None) -> Collection[int]:
    """Return the exit codes that are right for a rank."""
    if expected is None:
        return {0}
    if isinstance(expected, Mapping):
        return {expected.get(rank, 0)}
    return {expected} if rank == 0 else {expected, 0}


def judge(endings: Sequence[Ending], test: str, seconds: float) -> None:
    """Raise what the test deserves: RuntimeError, SkipTest or nothing."""
    skipped = [ending for ending in endings if ending.skip is not None]
    failed = [ending for ending in endings if ending.failed]
    gone = {ending.rank for ending in skipped}
    # A rank that lost its peer because that one skipped has found nothing wrong.
    causes = [e for e in failed if e.problem or not e.follows or not gone.issuperset(e.follows)]
    if causes:
        raise RuntimeError(_report(endings, test, seconds))
    if skipped:
        raise unittest.SkipTest(skipped[0].skip or "")


def _report(endings: Sequence[Ending], test: str, seconds: float) -> str:
    order = sorted(endings, key=lambda e: (not e.failed, bool(e.follows), e.rank))
    count = sum(e.failed and not e.follows for e in endings) or sum(e.failed for e in endings)
    lines = [f"{test} failed on {count} of {len(endings)} ranks after {seconds:.1f} s"]
    for ending in order:
        lines.append(f"---------- rank {ending.rank}: {_headline(ending)} ----------")
        lines += [text.rstrip() for text in (ending.error, ending.stack) if text]
        if ending.output and not ending.error:
            lines += ["its last output:", *ending.output]
    return "\n".join(lines)


def _headline(ending: Ending) -> str:
    if ending.error:
        words = "lost another rank" if ending.follows else "raised an exception"
        code = ending.exit_code
        return words if code is None else f"{words} ({describe_end(code)})"
    if ending.problem:
        return ending.problem
    if ending.skip is not None:
        return f"skipped: {ending.skip}"
    if ending.stack:
        return "was ended by the test kit, because another rank had failed"
    return "was done" if ending.exit_code in (0, None) else describe_end(ending.exit_code)
