"""Round trips of gradsync's TCPStore beside torch's, on one host.

Both systems are driven the same way: the server is the master in a process of its own; the clients,
each a connection and a thread, are spread over up to four other processes. Systems take turns in
every round, so that whatever else the machine does hits both alike. Reported is the median over
rounds of the time that a process needs per operation.

    python benchmarks/stores.py [--quick] [--out results.json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT = timedelta(seconds=60)
SYSTEMS = ("gradsync", "torch")
OPERATIONS = ("get", "add", "wait", "compare_set", "multi_get", "set")
PROCESSES = 4  # that share the clients when there are many


def open_store(system: str, port: int, is_master: bool) -> Any:
    """Return a TCPStore of one of the two systems; their constructors are the same."""
    if system == "torch":
        from torch.distributed import TCPStore
    else:
        from gradsync.stores.tcp import TCPStore
    return TCPStore("127.0.0.1", port, None, is_master, timeout=TIMEOUT)


def operation(store: Any, name: str, client: int) -> Callable[[], object]:
    """Return a call without arguments that does one operation on keys that exist."""
    own = f"client/{client}"
    if name == "get":
        return lambda: store.get("shared")
    if name == "add":
        return lambda: store.add(own + "/count", 1)
    if name == "wait":
        return lambda: store.wait(["shared"])
    if name == "compare_set":
        return lambda: store.compare_set(own, "value", "value")
    if name == "multi_get":
        keys = [f"many/{i}" for i in range(8)]
        return lambda: store.multi_get(keys)
    return lambda: store.set(own + "/set", "value")


def serve(system: str, pipe: Connection) -> None:
    store = open_store(system, 0, True)
    store.set("shared", b"x" * 64)
    for i in range(8):
        store.set(f"many/{i}", b"x" * 64)
    pipe.send(store.port)
    pipe.recv()


def drive(system: str, port: int, clients: range, pipe: Connection) -> None:
    """Run (operation, repeats) orders: every client in a thread of its own, all at once."""
    stores = [open_store(system, port, False) for _ in clients]
    for store, client in zip(stores, clients, strict=True):
        store.set(f"client/{client}", "value")
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        name, repeats = order
        calls = [operation(s, name, c) for s, c in zip(stores, clients, strict=True)]
        took = time_calls(calls, repeats)
        for store in stores:
            store.check(["shared"])  # what was only sent has arrived before the next order
        pipe.send(took)


def time_calls(calls: list[Callable[[], object]], repeats: int) -> float:
    """Return the seconds until every call has been made ``repeats`` times."""
    start = threading.Barrier(len(calls))
    began = ended = 0.0

    def run(call: Callable[[], object]) -> None:
        nonlocal began, ended
        start.wait()
        began = began or time.perf_counter()
        for _ in range(repeats):
            call()
        ended = time.perf_counter()

    threads = [threading.Thread(target=run, args=(call,)) for call in calls[1:]]
    for thread in threads:
        thread.start()
    run(calls[0])
    for thread in threads:
        thread.join()
    return ended - began


class Bench:
    """One system's server and the processes that drive it."""

    def __init__(self, system: str, clients: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.clients = clients
        self.pipes: list[Connection] = []
        self.processes = []

        def start(target: Callable[..., None], *args: object) -> Connection:
            here, there = spawn.Pipe()
            process = spawn.Process(target=target, args=(*args, there), daemon=True)
            process.start()
            self.processes.append(process)
            return here

        self.server = start(serve, system)
        port = self.server.recv()
        share = -(-clients // min(PROCESSES, clients))
        for first in range(0, clients, share):
            members = range(first, min(first + share, clients))
            self.pipes.append(start(drive, system, port, members))
        for pipe in self.pipes:
            pipe.recv()

    def measure(self, name: str, repeats: int) -> float:
        """Return the microseconds that a process needs per operation."""
        for pipe in self.pipes:
            pipe.send((name, repeats))
        times = [pipe.recv() for pipe in self.pipes]
        per_process = self.clients / len(self.pipes)
        return statistics.mean(times) / repeats / per_process * 1e6

    def close(self) -> None:
        """End all processes."""
        # The clients first, so that none of them sees its server go.
        for pipe, process in zip(self.pipes, self.processes[1:], strict=True):
            pipe.send(None)
            process.join()
        self.server.send(None)
        self.processes[0].join()


def compare(clients: int, rounds: int, repeats: int) -> list[dict[str, Any]]:
    benches = {system: Bench(system, clients) for system in SYSTEMS}
    samples: dict[tuple[str, str], list[float]] = {
        (system, name): [] for system in SYSTEMS for name in OPERATIONS
    }
    for index in range(-1, rounds):
        order = SYSTEMS if index % 2 else SYSTEMS[::-1]
        for name in OPERATIONS:
            for system in order:
                took = benches[system].measure(name, repeats)
                if index >= 0:  # the first round only warms up
                    samples[system, name].append(took)
    for bench in benches.values():
        bench.close()
    rows = []
    for name in OPERATIONS:
        ours, theirs = samples["gradsync", name], samples["torch", name]
        row: dict[str, Any] = {"operation": name, "clients": clients, "rounds": rounds}
        row["gradsync_us"], row["torch_us"] = statistics.median(ours), statistics.median(theirs)
        row["gradsync_min_us"], row["torch_min_us"] = min(ours), min(theirs)
        row["torch_over_gradsync"] = row["torch_us"] / row["gradsync_us"]
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'operation':12} {'clients':>7} {'gradsync µs':>12} {'torch µs':>10} {'times faster':>13}"
    )
    for row in rows:
        print(
            f"{row['operation']:12} {row['clients']:7} {row['gradsync_us']:12.2f} "
            f"{row['torch_us']:10.2f} {row['torch_over_gradsync']:13.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few seconds instead of a minute")
    parser.add_argument("--out", help="save the rows as JSON here")
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 64])
    options = parser.parse_args()
    rounds = 7 if options.quick else 31
    rows = []
    for clients in options.clients:
        repeats = max(4, (400 if options.quick else 1500) // clients)
        rows += compare(clients, rounds, repeats)
    show(rows)
    if options.out:
        import torch

        about = {
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "machine": platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
        }
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump({"about": about, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
