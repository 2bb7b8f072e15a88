"""Memory that is made and freed again and again stays with the process, unless told otherwise."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch
from gradsync.backends.freed_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        [torch.ones(1 << 21) for _ in range(4)]  # four gradients of 8 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

told = keep_freed_memory()
for _ in range(3):  # until the heap has found its shape
    faults()
print(told, faults())
"""


@pytest.mark.skipif("glibc" not in os.confstr("CS_GNU_LIBC_VERSION"), reason="is about glibc")
@pytest.mark.parametrize(
    ("settings", "kept", "most_faults"),
    [
        ({}, True, 1000),
        # 8192 pages in each of five rounds are taken anew, or not, as the heap happens to lie.
        ({"GRADSYNC_KEEP_FREED_MEMORY": "0"}, False, 50_000),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False, 50_000),
    ],
)
def test_freed_memory_is_kept_unless_the_user_says_otherwise(settings, kept, most_faults):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**environment, **settings},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    told, faults = done.stdout.split()
    assert told == str(kept)
    assert int(faults) < most_faults
