"""What a trivial two-rank test costs under gradsync's pytest plugin and under torch's base class.

Both run the same body (sum a tensor over two ranks, check it) under pytest on the same machine, in
alternating rounds. A test's cost is the time from its start to its end as pytest sees it, with all
that the harness does for it. The first test of a round of ours starts the warm ranks; it is
reported apart and not part of the median.

    python benchmarks/testkit.py [--quick] [--out results.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

OURS = """
import pytest, torch
import gradsync as dist

@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", range({count}))
def test_sum(number):
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 4
"""

TORCH = """
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase

class SumTest(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

def body(self):
    store = dist.FileStore(self.file_name, self.world_size)
    dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 4

for number in range({count}):
    setattr(SumTest, f"test_sum_{{number}}", lambda self: body(self))
"""

CONFTEST = """
import json, os, time
times = []

def pytest_runtest_logstart(nodeid):
    times.append([nodeid, time.perf_counter(), 0.0])

def pytest_runtest_logfinish(nodeid):
    times[-1][2] = time.perf_counter()

def pytest_sessionfinish(session):
    if "TIMES" in os.environ and times:
        with open(os.environ["TIMES"], "w") as file:
            json.dump([end - start for _, start, end in times], file)
"""


def run(folder: Path, name: str) -> list[float]:
    """Run one file of tests and return what each cost, in seconds."""
    times = folder / f"{name}.json"
    times.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"test_{name}.py"],
        cwd=folder,
        env={**os.environ, "TIMES": str(times)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"the {name} tests did not pass:\n{done.stdout}\n{done.stderr}")
    return list(json.loads(times.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="10 tests instead of 50")
    parser.add_argument("--out", help="write the figures to this file as JSON")
    options = parser.parse_args()
    rounds, count = (2, 5) if options.quick else (5, 10)
    ours, theirs, starts = [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # One more of ours in each round: the first starts the ranks and is counted apart.
        (folder / "test_ours.py").write_text(OURS.format(count=count + 1))
        (folder / "test_torch.py").write_text(TORCH.format(count=count))
        (folder / "conftest.py").write_text(CONFTEST)
        (folder / "pytest.ini").write_text("[pytest]\n")
        for _ in range(rounds):
            first, *rest = run(folder, "ours")
            starts.append(first)
            ours += rest
            theirs += run(folder, "torch")
    figures = {
        "tests": len(ours),
        "gradsync_ms": 1e3 * statistics.median(ours),
        "torch_ms": 1e3 * statistics.median(theirs),
        "ratio": statistics.median(theirs) / statistics.median(ours),
        "gradsync_first_ms": 1e3 * statistics.median(starts),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    print(f"a trivial two-rank test, median of {figures['tests']}:")
    print(f"  gradsync's plugin            {figures['gradsync_ms']:9.1f} ms")
    print(f"  (its first, starting ranks)  {figures['gradsync_first_ms']:9.1f} ms")
    print(f"  torch MultiProcessTestCase   {figures['torch_ms']:9.1f} ms")
    print(f"  ratio                        {figures['ratio']:9.0f}")
    if options.out:
        Path(options.out).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
