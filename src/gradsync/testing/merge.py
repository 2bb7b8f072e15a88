"""From what became of each rank to one pytest report: pure, so it is tested without a process."""

from __future__ import annotations

import copy
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import pytest

from gradsync.testing.messages import Died, Finished, Outcome, Stuck

__all__ = ["RELEASED", "framed", "merge", "plain_report", "reissue_warnings"]

RELEASED = "released: another rank had failed or ended"

_PHASES = ("setup", "call", "teardown")

Phases = list[tuple[int, "pytest.TestReport"]]


def merge(
    item: pytest.Item, outcomes: Sequence[Outcome], timeout_s: float, duration: float = 0.0
) -> list[pytest.TestReport]:
    """Return the reports of the whole test.

    The first cause is shown in full; the other ranks get a line each.
    """
    lost = _lost(item, outcomes, timeout_s)
    if lost is not None:
        return framed(item, lost, _sections(item, outcomes), duration)
    loaded = [_load(item, outcome) for outcome in outcomes]
    merged: list[pytest.TestReport] = []
    for when in _PHASES:
        phase = [
            (rank, report)
            for rank, reports in enumerate(loaded)
            for report in reports
            if report.when == when
        ]
        if when == "call" and merged and merged[0].failed:
            # Others had begun the test: only what went wrong by itself is worth a second report.
            phase = [(r, p) for r, p in phase if p.failed and not _follows(outcomes[r])]
        if phase:
            merged.append(_merge_phase(phase, outcomes))
    return merged


def _follows(outcome: Outcome) -> bool:
    return isinstance(outcome, Finished) and outcome.follows


def _merge_phase(phase: Phases, outcomes: Sequence[Outcome]) -> pytest.TestReport:
    failed = [(rank, report) for rank, report in phase if report.failed]
    expected = [pair for pair in phase if pair[1].skipped and hasattr(pair[1], "wasxfail")]
    if expected:
        # One rank failed as it should: the others may pass, even under xfail(strict=True).
        failed = [
            (rank, report)
            for rank, report in failed
            if "[XPASS(strict)]" not in str(report.longrepr) and not _follows(outcomes[rank])
        ]
        expected.sort(key=lambda pair: _follows(outcomes[pair[0]]))
        phase = expected + [pair for pair in phase if pair not in expected]
    # A failure of its own comes before one that only says that another rank has gone.
    failed.sort(key=lambda pair: _follows(outcomes[pair[0]]))
    rank, chosen = failed[0] if failed else phase[0]
    sections = []
    for other, report in phase:
        sections += [(f"{title} (rank {other})", text) for title, text in report.sections]
    if failed:
        # A test that fails on one rank while another skips must not look skipped.
        lines = [f"rank {r}: {_in_a_line(report, outcomes[r])}" for r, report in phase]
        sections.insert(0, (f"ranks ({chosen.when}); shown above: rank {rank}", "\n".join(lines)))
    chosen.sections = sections
    chosen.duration = max(report.duration for _, report in phase)
    return chosen


def _in_a_line(report: pytest.TestReport, outcome: Outcome) -> str:
    if not report.failed:
        return report.outcome
    if _follows(outcome):
        return RELEASED
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        lines = crash.message.strip().splitlines()[:1]
    else:
        lines = str(report.longrepr).strip().splitlines()[-1:]  # of a traceback, the exception
    return f"failed: {lines[0]}" if lines else "failed"


def _load(item: pytest.Item, outcome: Outcome) -> list[pytest.TestReport]:
    assert isinstance(outcome, Finished | Died)
    if isinstance(outcome, Died):
        return []  # planned: the test wanted it so
    hook = item.config.hook
    reports: list[pytest.TestReport] = [
        # pytest takes what it is given apart, and a report may be wanted twice.
        hook.pytest_report_from_serializable(config=item.config, data=copy.deepcopy(data))
        for data in outcome.reports
    ]
    if outcome.error is not None:
        # It came out of the first phase that has no report.
        when = _PHASES[min(len(reports), 2)]
        reports = [report for report in reports if report.when != when]
        reports.append(plain_report(item, when, "failed", outcome.traceback))
    return reports


def _lost(item: pytest.Item, outcomes: Sequence[Outcome], timeout_s: float) -> str | None:
    """Return what to say of a test that lost ranks against its plan, None when it did not."""
    stuck = [rank for rank, o in enumerate(outcomes) if isinstance(o, Stuck)]
    dead = [rank for rank, o in enumerate(outcomes) if isinstance(o, Died) and not o.planned]
    if not stuck and not dead:
        return None
    own = [
        r
        for r, o in enumerate(outcomes)
        if isinstance(o, Finished) and _failed(o) and not o.follows
    ]
    parts = []
    if dead:
        parts.append("; ".join(f"rank {r} died: {_death(outcomes[r])}" for r in dead))
    if stuck:
        names = ", ".join(map(str, stuck))
        parts.append(
            f"rank{'s' * (len(stuck) > 1)} {names} had not finished "
            f"{'after another rank failed' if own or dead else f'after {timeout_s:g} s'}"
        )
    text = [". ".join(parts)]
    for rank, outcome in enumerate(outcomes):
        text.append(f"---------- rank {rank} ----------")
        text.append(_block(item, outcome))
    return "\n".join(text)


def _block(item: pytest.Item, outcome: Outcome) -> str:
    if isinstance(outcome, Stuck):
        return outcome.dump
    if isinstance(outcome, Died):
        return _death(outcome)
    if not _failed(outcome):
        return "passed" if outcome.reports else "finished"
    if outcome.follows:
        return RELEASED
    failed = [report for report in _load(item, outcome) if report.failed]
    return "\n".join(report.longreprtext for report in failed)


def _failed(outcome: Finished) -> bool:
    return outcome.error is not None or any(r.get("outcome") == "failed" for r in outcome.reports)


def _death(outcome: Outcome) -> str:
    assert isinstance(outcome, Died)
    if outcome.exit_code < 0:
        try:
            name = signal.Signals(-outcome.exit_code).name
        except ValueError:
            name = f"signal {-outcome.exit_code}"
        return f"its process (pid {outcome.pid}) was killed by {name}"
    return f"its process (pid {outcome.pid}) exited with code {outcome.exit_code}"


def _sections(item: pytest.Item, outcomes: Sequence[Outcome]) -> list[tuple[str, str]]:
    """Return the output of the ranks that can still say what they have written."""
    found = []
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, Finished) and outcome.reports:
            last = _load(item, outcome)[-1]  # its sections are those of all phases
            found += [(f"{title} (rank {rank})", text) for title, text in last.sections]
    return found


def reissue_warnings(item: pytest.Item, outcomes: Sequence[Outcome]) -> None:
    """Tell pytest of the warnings of the ranks, of each kind once."""
    for warning in {w: None for o in outcomes if isinstance(o, Finished) for w in o.warnings}:
        text, module, name, file, line = warning
        category = getattr(sys.modules.get(module), name, UserWarning)
        message = warnings.WarningMessage(text, category, file, line)
        item.ihook.pytest_warning_recorded.call_historic(
            kwargs={
                "warning_message": message,
                "nodeid": item.nodeid,
                "when": "runtest",
                "location": None,
            }
        )


def framed(
    item: pytest.Item, why: str, sections: Sequence[tuple[str, str]] = (), duration: float = 0.0
) -> list[pytest.TestReport]:
    """Return the reports of a test that failed without one of its own."""
    call = plain_report(item, "call", "failed", why)
    call.sections = list(sections)
    call.duration = duration
    return [plain_report(item, "setup", "passed"), call, plain_report(item, "teardown", "passed")]


def plain_report(
    item: pytest.Item, when: Any, outcome: Any, longrepr: Any = None
) -> pytest.TestReport:
    """Return a report that no pytest phase has made."""
    keywords: dict[str, Any] = dict.fromkeys(item.keywords, 1)
    return pytest.TestReport(
        item.nodeid, item.location, keywords, outcome, longrepr, when, duration=0.0
    )
