"""Runs the examples of data-parallel training one after the other, on each rank of a job."""

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"

if __name__ == "__main__":
    for name in ("first_steps", "accumulation", "comm_hook", "uneven_data"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
