"""Where a rank's process begins: light enough that the controller can name it without torch."""

from __future__ import annotations

import signal
from multiprocessing.connection import Connection

__all__ = ["DUMP_SIGNAL", "main"]

DUMP_SIGNAL = signal.SIGUSR2


def main(tasks: Connection, questions: Connection, dump_path: str) -> None:
    """Run the tasks of a rank; the server that forks ranks has imported the worker already."""
    from gradsync.testing.worker import run

    run(tasks, questions, dump_path)
