from __future__ import annotations

import subprocess
import sys

import pytest
from ranks_environment import clean_environment

pytest.importorskip("torch")

# The first attempt meets and then fails on one rank; the agent's store keeps all keys, and the
# second attempt must not take them for its own.
PROGRAM = """
import os
import sys
from gradsync.rendezvous import meet

attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
meeting = meet(timeout=60)
assert type(meeting.store).__name__ == "PrefixStore"
meeting.store.set(f"rank-{meeting.rank}", attempt)
told = [meeting.store.get(f"rank-{rank}").decode() for rank in range(meeting.world_size)]
assert [member.evidence.pid for member in meeting.members][meeting.rank] == os.getpid()
again = meet(timeout=60)
# One write: torchrun lets the ranks' output run into each other.
text = f"attempt {attempt} generations {meeting.generation} {again.generation} {' '.join(told)}"
sys.stdout.write(text + "\\n")
assert attempt == "1" or meeting.rank != 1, "this attempt fails"
"""


def test_torchruns_agent_store_is_used_and_a_restart_starts_afresh(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    done = subprocess.run(
        [*torchrun, "--standalone", "--nproc-per-node=2", "--max-restarts=1", str(program)],
        env=clean_environment(OMP_NUM_THREADS=1),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("attempt 1 generations 0 1 1 1") == 2, done.stdout
    assert lines.count("attempt 0 generations 0 1 0 0") >= 1
