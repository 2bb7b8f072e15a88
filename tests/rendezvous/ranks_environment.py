"""The environment of a process that a test starts."""

from __future__ import annotations

import os

# What a test says about the job must be all there is: nothing of the machine it runs on.
_FOREIGN = ("RANK", "WORLD_", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI", "MPI_", "GRADSYNC_")


def clean_environment(**values: object) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return env | {name: str(value) for name, value in values.items()}
