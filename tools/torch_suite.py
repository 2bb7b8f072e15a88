"""Run torch's own test base for process groups on gradsync, from the installed torch.

    python tools/torch_suite.py                       # both backends, and what differs
    python tools/torch_suite.py --backend gradsync -k all_reduce

The base ships with torch and decides by the name of the backend what to skip. It is imported with
the name "gloo", so that gradsync has to pass whatever Gloo has to; the tests themselves then run on
the backend asked for. Exit code 1 when something passes on Gloo and not on gradsync.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import sys
import tempfile
import time
import unittest
import warnings
from pathlib import Path

WORLD_SIZE = "2"


class AlsoGloo(str):
    """The name of a backend that answers to "gloo" as well: some tests choose their data by it."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def load_base(backend: str):
    """Import torch's base with Gloo's rules, and let it run on ``backend``."""
    os.environ.update(
        BACKEND="gloo", WORLD_SIZE=WORLD_SIZE, MASTER_ADDR="127.0.0.1", INIT_METHOD="env://"
    )
    os.environ.setdefault("TEMP_DIR", tempfile.gettempdir())
    sys.argv = sys.argv[:1]  # torch reads it when its test kit is imported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_distributed
        from torch.testing._internal.distributed import distributed_test as base
    import gradsync  # noqa: F401

    base.BACKEND = AlsoGloo(backend)
    for feature in ("ddp", "subgroup"):
        common_distributed.DistTestCases.backend_feature[feature].add("gradsync")
    common_distributed.TIMEOUT_DEFAULT = 60
    return base


def make_cases(backend: str) -> unittest.TestSuite:
    base = load_base(backend)

    class OnForkedRanks(base.TestDistBackend, base.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    return unittest.defaultTestLoader.loadTestsFromTestCase(OnForkedRanks)


def outcome_of(result: unittest.TestResult) -> tuple[str, str]:
    for kind, found in (("failed", result.failures), ("failed", result.errors)):
        if found:
            lines = [line for line in found[0][1].splitlines() if "Error" in line]
            return kind, (lines or found[0][1].splitlines())[-1].strip()[:300]
    if result.skipped:
        return "skipped", result.skipped[0][1][:100]
    return "passed", ""


def run(backend: str, words: list[str], chosen: set[str] | None) -> dict[str, list]:
    outcomes: dict[str, list] = {}
    for case in make_cases(backend):
        name = case._testMethodName
        if (words and not any(word in name for word in words)) or (
            chosen is not None and name not in chosen
        ):
            continue
        began = time.monotonic()
        result = unittest.TestResult()
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            case.run(result)
        kind, why = outcome_of(result)
        outcomes[name] = [kind, why, round(time.monotonic() - began, 2)]
        if kind != "skipped":
            print(f"{backend:9} {kind:7} {outcomes[name][2]:6.2f} s  {name}  {why}", flush=True)
    return outcomes


def run_apart(backend: str, words: list[str], chosen: set[str] | None) -> dict[str, list]:
    """Run in a process of its own: ranks are forked, and must inherit nothing from other tests."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "outcomes")
        pid = os.fork()
        if pid == 0:
            tempfile.tempdir = folder  # torch's kit leaves files behind
            answer.write_text(json.dumps(run(backend, words, chosen)))
            os._exit(0)
        os.waitpid(pid, 0)
        return json.loads(answer.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", choices=["gloo", "gradsync"], help="only this one")
    parser.add_argument("-k", action="append", default=[], help="only tests with this in the name")
    parser.add_argument("--out", type=Path, help="write the outcomes here as JSON")
    parser.add_argument("--gloo", type=Path, help="outcomes on Gloo from an earlier --out")
    arguments = parser.parse_args()
    outcomes: dict[str, dict[str, list]] = {}
    if arguments.gloo:
        outcomes["gloo"] = json.loads(arguments.gloo.read_text())["gloo"]
    elif arguments.backend != "gradsync":
        outcomes["gloo"] = run_apart("gloo", arguments.k, None)
    if arguments.backend != "gloo":
        passing = {n for n, o in outcomes.get("gloo", {}).items() if o[0] == "passed"}
        chosen = passing if "gloo" in outcomes else None
        outcomes["gradsync"] = run_apart("gradsync", arguments.k, chosen)
    if arguments.out:
        arguments.out.write_text(json.dumps(outcomes, indent=1))
    for backend, found in outcomes.items():
        kinds = [kind for kind, _, _ in found.values()]
        counts = {kind: kinds.count(kind) for kind in ("passed", "failed", "skipped")}
        print(f"{backend}: {counts}")
    worse = [n for n, o in outcomes.get("gradsync", {}).items() if o[0] == "failed"]
    for name in worse:
        print(f"fails on gradsync: {name}: {outcomes['gradsync'][name][1]}")
    return 1 if worse else 0


if __name__ == "__main__":
    raise SystemExit(main())
