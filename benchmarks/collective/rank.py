"""One rank of one system: prepares a call on order, times batches of it, sleeps in between.

Started by ``worlds.py``, with the interpreter that has the system. Orders come as lines of JSON
over a Unix socket, so that a system whose turn it is not costs no time on any core.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np

TIMEOUT = timedelta(seconds=120)
UNCOUNTED = 2
"""Calls at the beginning of a turn that do not count: they find in the caches what the system
before them left there, which nothing but this benchmark does to them."""
WHOLE_ONLY = ("all_reduce", "all_reduce_shared", "broadcast", "reduce", "ping_pong")
Call = Callable[[int], object]  # takes the root


class TorchLike:
    """gradsync or torch.distributed, which have the same functions."""

    def __init__(self, system: str) -> None:
        import torch

        self.torch = torch
        torch.set_num_threads(1)
        if system == "gradsync":
            import gradsync as dist
        else:
            import torch.distributed as dist
        self.dist: Any = dist
        self.backend = "gloo" if system == "gloo" else None
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.version = torch.__version__ if system == "gloo" else "this code"
        self.init(int(os.environ["MASTER_PORT"]))

    def init(self, port: int) -> None:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
        self.dist.init_process_group(self.backend, timeout=TIMEOUT)

    def close(self) -> None:
        self.dist.destroy_process_group()

    def barrier(self) -> None:
        self.dist.barrier()

    def empty(self, elements: int, op: str) -> Any:
        """Return a tensor as users have them."""
        if op == "all_reduce_shared" and self.backend is None:
            return self.dist.shared_empty(elements, dtype=self.torch.float32)
        return self.torch.empty(elements, dtype=self.torch.float32)

    def lacks(self, op: str) -> str:
        if op == "all_reduce_shared" and self.backend is None:
            return "" if hasattr(self.dist, "shared_empty") else "no shared_empty"
        if op == "ping_pong":
            return "" if hasattr(self.dist, "send") else "no send"
        return ""

    def call(self, op: str, buffers: Buffers) -> Call:
        dist, rank = self.dist, self.rank
        whole, piece, other = buffers.whole, buffers.piece, buffers.other
        parts = list(whole.chunk(self.size))
        if op == "ping_pong":
            if rank > 1:
                return lambda _: None
            steps = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
            return lambda _: [step(whole, 1 - rank) for step in steps]
        calls: dict[str, Call] = {
            "all_reduce": lambda _: dist.all_reduce(whole),
            "all_reduce_shared": lambda _: dist.all_reduce(whole),
            "broadcast": lambda root: dist.broadcast(whole, root),
            "reduce": lambda root: dist.reduce(whole, root),
            "all_gather": lambda _: dist.all_gather_into_tensor(whole, piece),
            "gather": lambda root: dist.gather(piece, parts if root == rank else None, root),
            "scatter": lambda root: dist.scatter(piece, parts if root == rank else None, root),
            "reduce_scatter": lambda _: dist.reduce_scatter_tensor(piece, whole),
            "all_to_all": lambda _: dist.all_to_all_single(other, whole),
            "barrier": lambda _: dist.barrier(),
        }
        return calls[op]

    def leave(self) -> None:
        """End the group, so that a new one can be timed."""
        self.dist.barrier()
        self.close()

    def time_init(self, port: int, at: float) -> tuple[float, float]:
        """Return when this rank called init_process_group and when it returned.

        All ranks sleep until ``at``, so that they start at once. Both systems meet by ``env://`` at
        a port that nobody has used; the modules were imported when they first met.
        """
        time.sleep(max(0.0, at - time.monotonic()))
        began = time.monotonic()
        self.init(port)
        return began, time.monotonic()

    def time_new_group(self) -> tuple[float, float]:
        self.dist.barrier()
        began = time.monotonic()
        group = self.dist.new_group()
        ended = time.monotonic()
        self.dist.barrier()
        self.dist.destroy_process_group(group)
        return began, ended


class Mpi:
    """mpi4py on whatever MPI its environment has; upper-case methods on numpy buffers."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.mpi: Any = MPI
        self.world = MPI.COMM_WORLD
        self.rank, self.size = self.world.rank, self.world.size
        self.version = MPI.Get_library_version().splitlines()[0].strip("\0 ")

    def close(self) -> None:
        self.mpi.Finalize()

    def barrier(self) -> None:
        self.world.Barrier()

    def empty(self, elements: int, op: str) -> Any:
        """Return float32 memory that begins at a cache line, as torch's does."""
        raw = np.empty(elements + 16, np.float32)
        first = -raw.ctypes.data % 64 // 4
        return raw[first : first + elements]

    def lacks(self, op: str) -> str:
        return ""

    def call(self, op: str, buffers: Buffers) -> Call:
        world, rank, in_place = self.world, self.rank, self.mpi.IN_PLACE
        whole, piece, other = buffers.whole, buffers.piece, buffers.other
        if op == "ping_pong":
            if rank > 1:
                return lambda _: None
            steps = (world.Send, world.Recv) if rank == 0 else (world.Recv, world.Send)
            return lambda _: [step(whole, 1 - rank) for step in steps]

        def reduce(root: int) -> None:
            given, into = (in_place, whole) if rank == root else (whole, None)
            world.Reduce(given, into, root=root)

        calls: dict[str, Call] = {
            "all_reduce": lambda _: world.Allreduce(in_place, whole),
            "all_reduce_shared": lambda _: world.Allreduce(in_place, whole),
            "broadcast": lambda root: world.Bcast(whole, root),
            "reduce": reduce,
            "all_gather": lambda _: world.Allgather(piece, whole),
            "gather": lambda root: world.Gather(piece, whole if root == rank else None, root),
            "scatter": lambda root: world.Scatter(whole if root == rank else None, piece, root),
            "reduce_scatter": lambda _: world.Reduce_scatter_block(whole, piece),
            "all_to_all": lambda _: world.Alltoall(whole, other),
            "barrier": lambda _: world.Barrier(),
        }
        return calls[op]


class Buffers:
    """A call's memory. ``whole`` is the larger side: all ranks' pieces, or simply the tensor."""

    def __init__(self, world: TorchLike | Mpi, op: str, total_bytes: int) -> None:
        self.op, self.rank, self.size = op, world.rank, world.size
        elements = max(1, total_bytes // 4)
        share = 1 if op in WHOLE_ONLY else self.size
        self.whole = world.empty(max(1, elements // share) * share, op)
        self.piece = world.empty(len(self.whole) // share, "")
        self.other = world.empty(len(self.whole) if op == "all_to_all" else 1, "")
        self.fill(world.rank + 1)

    def fill(self, value: int) -> None:
        for array in (self.whole, self.piece, self.other):
            array[:] = value
        if self.op == "scatter":
            for number, part in enumerate(self.whole.reshape(self.size, -1)):
                part[:] = number + 1

    def right(self) -> bool:
        """Return whether a call with root 0 on buffers full of rank + 1 had the right result."""
        total = self.size * (self.size + 1) // 2
        each = np.repeat(np.arange(1, self.size + 1), len(self.piece))
        is_root = self.rank == 0
        wanted: dict[str, tuple[Any, Any]] = {
            "all_reduce": (self.whole, total),
            "all_reduce_shared": (self.whole, total),
            "broadcast": (self.whole, 1),
            "ping_pong": (self.whole, 1 if self.rank < 2 else self.rank + 1),
            "reduce": (self.whole, total) if is_root else (0, 0),  # Gloo leaves anything there
            "all_gather": (self.whole, each),
            "gather": (self.whole, each if is_root else self.rank + 1),
            "scatter": (self.piece, self.rank + 1),
            "reduce_scatter": (self.piece, total),
            "all_to_all": (self.other, each),
            "barrier": (0, 0),
        }
        found, expected = wanted[self.op]
        # Of copies: a tensor that numpy has seen is no longer torch's alone.
        values = np.array(found.clone() if hasattr(found, "clone") else found)
        return bool(np.all(values == expected))


class Rank:
    """Carries out orders on a world."""

    def __init__(self, world: TorchLike | Mpi) -> None:
        self.world: Any = world
        self.call: Call = lambda _: None

    def prepare(self, op: str, total_bytes: int) -> str:
        """Make a call ready and try it; return why it cannot be made, if so."""
        if lacking := self.world.lacks(op):
            return lacking
        self.call = lambda _: None  # lets go of the memory of the one before
        buffers = Buffers(self.world, op, total_bytes)
        self.call = self.world.call(op, buffers)
        self.call(0)
        if not buffers.right():
            raise SystemExit(f"{op} of {total_bytes} bytes has a wrong result")
        buffers.fill(0)  # sums stay zero, and the speed of arithmetic that of ordinary numbers
        return ""

    def run(self, repeats: int, root: int | None) -> float:
        """Return the seconds of some calls; without a root, ranks take turns to be it."""
        call, size = self.call, self.world.size
        roots = [(i % size if root is None else root) for i in range(repeats)]
        for each in roots[:UNCOUNTED]:
            call(each)
        self.world.barrier()
        began = time.perf_counter()
        for each in roots:
            call(each)
        return time.perf_counter() - began

    def leave(self) -> None:
        self.world.leave()

    def init(self, port: int, at: float) -> tuple[float, float]:
        return self.world.time_init(port, at)

    def new_group(self) -> tuple[float, float]:
        return self.world.time_new_group()

    def python_cost(self, rounds: int, repeats: int) -> dict[str, float]:
        """Return microseconds of the public and of the native all_reduce, in a world of one."""
        import torch

        from gradsync.group.world import default_group

        tensor = torch.ones(1)
        group = default_group()
        session = group.backend._session
        address, all_reduce = tensor.data_ptr(), self.world.dist.all_reduce
        times: dict[str, list[float]] = {"public": [], "native": []}
        for _ in range(rounds):
            began = time.perf_counter()
            for _ in range(repeats):
                all_reduce(tensor)
            middle = time.perf_counter()
            for _ in range(repeats):
                session.all_reduce(address, 1, 1, 0, 60.0)
            ended = time.perf_counter()
            times["public"].append((middle - began) / repeats * 1e6)
            times["native"].append((ended - middle) / repeats * 1e6)
        return {name: statistics.median(values) for name, values in times.items()}

    def close(self) -> None:
        self.world.close()


def main() -> None:
    system, address = sys.argv[1:]
    link = socket.socket(socket.AF_UNIX)
    link.connect(address)
    world = TorchLike(system) if system in ("gradsync", "gloo") else Mpi()
    rank = Rank(world)
    with link.makefile("rw") as lines:

        def answer(what: object) -> None:
            lines.write(json.dumps(what) + "\n")
            lines.flush()

        answer({"version": world.version, "python": platform.python_version()})
        for line in lines:
            name, arguments = json.loads(line)
            answer(getattr(rank, name)(**arguments))
            if name == "close":
                return


if __name__ == "__main__":
    main()
