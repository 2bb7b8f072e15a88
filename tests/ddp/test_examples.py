"""The examples do what they say."""

import re
import subprocess
import sys
from pathlib import Path


def test_examples_run():
    script = Path(__file__).with_name("run_examples.py")
    done = subprocess.run(
        [sys.executable, "-m", "gradsync", "run", "-n", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0]
    differences = re.findall(r"differs from one process on all samples by ([\d.e-]+)", done.stdout)
    assert len(differences) == 2
    assert all(float(difference) < 1e-6 for difference in differences)
    assert "3151872 bytes of gradients travelled as 1575936" in done.stdout
    sums = re.findall(r"(\d) batches, sum of the weights ([-\d.]+)", done.stdout)
    assert sorted(count for count, _ in sums) == ["5", "8"]
    assert sums[0][1] == sums[1][1]
