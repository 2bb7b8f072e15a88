"""Carrying out a fault plan: a hook at the waist that counts calls and strikes at the right one."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable

from gradsync.backends.call import Call
from gradsync.errors import UsageError
from gradsync.stores.store import Store
from gradsync.testing.faults import Fault

__all__ = ["Injector"]


class Injector:
    """A before-hook that carries out the faults of one rank."""

    def __init__(self, faults: Iterable[Fault], rank: int, store: Store | None) -> None:
        self._faults = [fault for fault in faults if fault.rank == rank]
        self._counts: Counter[str] = Counter()
        self._store = store
        self._struck: list[Fault] = []

    def __call__(self, call: Call) -> None:
        """Count the call and strike where the plan says so."""
        self._counts[call.op.name] += 1
        self._counts["*"] += 1
        for fault in self._faults:
            if fault.op in (call.op.name, "*") and self._counts[fault.op] == fault.number:
                self._struck.append(fault)
                self._strike(fault)

    def missed(self) -> str:
        """Say which faults of the plan have not happened, nothing when all have."""
        return "; ".join(
            f"the plan was {fault.kind} on rank {fault.rank} at {fault.op}#{fault.number}, but it "
            f"made only {self._counts[fault.op]} such calls"
            for fault in self._faults
            if fault not in self._struck
        )

    def _strike(self, fault: Fault) -> None:
        strikes: dict[str, Callable[[Fault], None]] = {
            "kill": lambda f: os.kill(os.getpid(), f.value),
            "exit": lambda f: os._exit(f.value),
            "raise": self._raise,
            "delay": lambda f: time.sleep(f.value),
            "stop": self._stop,
            "drop_connection": self._drop_connection,
        }
        strikes[fault.kind](fault)

    @staticmethod
    def _raise(fault: Fault) -> None:
        raise fault.value

    @staticmethod
    def _stop(fault: Fault) -> None:
        # A stopped process cannot wake itself: a shell does, which is gone by itself afterwards.
        script = f"sleep {fault.value}; kill -CONT {os.getpid()}"
        child = os.posix_spawn("/bin/sh", ["sh", "-c", script], {"PATH": os.defpath})
        os.kill(os.getpid(), signal.SIGSTOP)
        os.waitpid(child, 0)

    def _drop_connection(self, fault: Fault) -> None:
        cut = getattr(self._store, "cut_connection", None)
        if cut is None:
            raise UsageError(f"{type(self._store).__name__} has no connection that could be cut")
        cut()
