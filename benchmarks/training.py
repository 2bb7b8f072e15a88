"""The models that the training benchmarks step, and how they are stepped and timed."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from calm import calmest

Step: TypeAlias = Callable[[], object]
Joined: TypeAlias = tuple[Callable[[str, nn.Module], nn.Module], Step]
"""What wraps a model for a variant, and a barrier."""
Join: TypeAlias = Callable[[int, str], Joined]
"""Joins a rank to its peer through files in a folder."""


class Block(nn.Module):
    """One block of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.before(x)).view(rows, length, 3, self.heads, -1).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))


class GPT(nn.Module):
    """A small GPT: 34 MiB of parameters."""

    def __init__(self, vocabulary: int = 10240, width: int = 256, blocks: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.zeros(128, width))
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place[: tokens.shape[1]]
        return self.norm(self.blocks(x)) @ self.embed.weight.t()


def conv_net() -> nn.Module:
    """A convolutional net with batch norm: 18 MiB of parameters."""
    widths, layers, before = (64, 128, 256, 512), [], 3
    for width in widths:
        for stride, count in ((2, before), (1, width)):
            layers += [nn.Conv2d(count, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)]
            layers.append(nn.ReLU())
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def mlp() -> nn.Module:
    """Four wide layers: 32 MiB of parameters."""
    return nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(1448, 1448), nn.ReLU())))


def small_layers() -> nn.Module:
    """41 layers of 64 x 64: many parameters, little work."""
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(41)))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], int]] = {
    "mlp": (mlp, lambda: torch.randn(64, 1448), 5),
    "gpt": (GPT, lambda: torch.randint(10240, (2, 128)), 3),
    "conv": (conv_net, lambda: torch.randn(16, 3, 32, 32), 5),
    "layers": (small_layers, lambda: torch.randn(32, 64), 60),
}
"""Model, batch, and steps in a round."""


def stepper(name: str, wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], None]:
    """Return what trains the wrapped model by one step."""
    torch.manual_seed(0)
    make, data, _ = MODELS[name]
    model = wrap(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = data()

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


class Pair:
    """Two ranks in processes of their own, which step when they are told to and are idle otherwise.

    What a library does to its process stays there: variants that are to be compared as their users
    run them have pairs of their own, and take turns.
    """

    def __init__(self, variants: Sequence[str], join: Join) -> None:
        self.variants = variants
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        context = multiprocessing.get_context("spawn")
        for rank in range(2):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(there, join, rank, self._folder.name), daemon=True
            )
            process.start()
            there.close()  # so that a rank that dies is noticed
            self._pipes.append(here)
            self._processes.append(process)

    def seconds(self, name: str, variant: str, count: int) -> float:
        """Return what a step takes, over ``count`` of them; the slower rank counts."""
        return max(self._ask(_time_steps, name, variant, count))

    def peaks_mib(self, name: str, variant: str) -> tuple[float, float]:
        """Return the peaks of allocated and of resident memory over a few steps, of the larger."""
        allocated, resident = zip(*self._ask(_watch_memory, name, variant, 4), strict=True)
        return max(allocated), max(resident)

    def _ask(self, *order: object) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(order)
        return [pipe.recv() for pipe in self._pipes]

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def _serve(pipe: Connection, join: Join, rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    wrap, barrier = join(rank, folder)
    steps: dict[tuple[str, str], Step] = {}
    with contextlib.suppress(EOFError):
        while True:
            measure, name, variant, count = pipe.recv()
            if (name, variant) not in steps:
                steps = {key: step for key, step in steps.items() if key[0] == name}
                steps[name, variant] = stepper(name, partial(wrap, variant))
            pipe.send(measure(steps[name, variant], count, barrier))
    steps.clear()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _time_steps(step: Step, count: int, barrier: Step) -> float:
    barrier()
    start = time.perf_counter()
    for _ in range(count):
        step()
    barrier()
    return (time.perf_counter() - start) / count


_MALLINFO = ("arena", "ordblks", "smblks", "hblks", "hblkhd")
_MALLINFO += ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo(ctypes.Structure):
    """What glibc says of its heap; see mallinfo2(3)."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO]


def _watch_memory(step: Step, count: int, barrier: Step) -> tuple[float, float]:
    allocated, resident, done = 0.0, 0.0, threading.Event()
    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = _Mallinfo

    def watch() -> None:
        nonlocal allocated, resident
        while not done.wait(0.002):
            lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
            kib = {line.split()[0]: int(line.split()[1]) for line in lines}
            heap = libc.mallinfo2()
            blocks = heap.uordblks + heap.hblkhd
            allocated = max(allocated, blocks / 2**20 + kib["Pss_Shmem:"] / 2**10)
            resident = max(resident, kib["Pss:"] / 2**10)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(count):
        step()
    done.set()
    watcher.join()
    barrier()  # a share is only one while the other rank is there
    return allocated, resident


def take_turns(
    pairs: Sequence[Pair], name: str, rounds: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the seconds of a step of each variant in each round, and how calm those were."""
    turns = [(pair, variant) for pair in pairs for variant in pair.variants]

    def run(number: int) -> dict[str, float]:
        order = turns if number % 2 else list(reversed(turns))
        return {v: pair.seconds(name, v, MODELS[name][2]) for pair, v in order}

    run(0)  # warms up, and DDP plans its buckets in it
    counted = calmest(run, rounds)
    calm = {"stolen": 100 * counted.stolen, "stolen_from_all": 100 * counted.stolen_from_all}
    calm["rounds_run"] = counted.rounds
    return {variant: [each[variant] for each in counted.results] for _, variant in turns}, calm


def calm_text(row: dict[str, float]) -> str:
    """Return what was stolen from the rounds that count, and from all that were run."""
    return f"{row['stolen']:.1f}/{row['stolen_from_all']:.1f} %"


def percent_over(times: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return by how much each time exceeds that of the same round."""
    return [100 * (t / b - 1) for t, b in zip(times, base, strict=True)]


def gradient_mib(name: str) -> float:
    return sum(p.numel() * p.element_size() for p in MODELS[name][0]().parameters()) / 2**20
