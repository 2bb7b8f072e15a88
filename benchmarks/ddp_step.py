"""What data-parallel training costs: a model stepping alone, under torch's DDP, and under ours.

Two ranks with one thread each. Within one run, in alternating rounds, both ranks step the same
model without any communication, under torch's DDP (Gloo, gradient_as_bucket_view) and under
gradsync's. The tax is what a step takes more than alone in the same round; medians over rounds.
Rounds from which the hypervisor took time are run again (calm.py; "stolen" is what it took from
those that count, and from all).

What every synchronous training costs, however it moves its gradients, is measured as well: stepping
alone with a barrier in every step ("lockstep"), which makes each rank wait for the slower one.

Peak memory is that of fresh processes, over stepping alone: what is allocated (malloc's blocks that
are in use, and shared memory), and what is resident, by proportional share, which includes the
holes in malloc's heap.

Every variant has two processes with one model, as its users run it: the gradients of another model
in the same process would leave other holes in its heap. Processes in which gradsync trains keep the
memory they free (GRADSYNC_KEEP_FREED_MEMORY), which makes their steps quicker with or without
communication. So stepping alone is also timed in processes that do the same without training by
gradsync: the tax over that ("net tax") is what communication alone costs.

    python benchmarks/ddp_step.py [--quick | --no-memory] [--models mlp,gpt]
        [--out r.json] [--plot r.svg]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
from pathlib import Path

import torch
from torch import nn

import gradsync
from gradsync.backends.freed_memory import keep_freed_memory
from training import MODELS, Joined, Pair, calm_text, gradient_mib, percent_over, take_turns

TAXES = {
    "torch": ("torch", "alone"),
    "gradsync": ("gradsync", "alone"),
    "net": ("gradsync", "alone_kept"),
    "lockstep": ("lockstep", "alone_kept"),
}
"""Which variant is taxed, over which."""
WITH_MEMORY = ("alone", "torch", "gradsync")


class Lockstep(nn.Module):
    """A model that waits for the other rank's before each step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        gradsync.barrier()
        return self.model(batch)


def wrap(variant: str, model: nn.Module) -> nn.Module:
    if variant == "torch":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if variant == "lockstep":
        return Lockstep(model)
    return gradsync.DistributedDataParallel(model) if variant == "gradsync" else model


def join_torch(rank: int, folder: str) -> Joined:
    store = torch.distributed.FileStore(f"{folder}/meet", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    return wrap, torch.distributed.barrier


def join_gradsync(rank: int, folder: str) -> Joined:
    gradsync.init_process_group(init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    return wrap, gradsync.barrier


def join_and_keep(rank: int, folder: str) -> Joined:
    keep_freed_memory()
    return join_gradsync(rank, folder)


VARIANTS = {
    "alone": join_torch,
    "torch": join_torch,
    "alone_kept": join_and_keep,
    "lockstep": join_and_keep,
    "gradsync": join_gradsync,
}
"""What the processes of each have loaded and joined."""


def measure(names: list[str], rounds: int, memory: bool) -> dict[str, dict[str, float]]:
    figures = {}
    with contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(Pair([v], join)) for v, join in VARIANTS.items()]
        for name in names:
            times, calm = take_turns(pairs, name, rounds)
            row = {"mib": gradient_mib(name), **calm}
            for variant, seen in times.items():
                row[f"{variant}_ms"] = 1e3 * statistics.median(seen)
            for tax, (variant, base) in TAXES.items():
                seen = percent_over(times[variant], times[base])
                row[f"{tax}_tax"] = statistics.median(seen)
                row[f"{tax}_spread"] = statistics.quantiles(seen, n=4)[2] - min(seen)
            ratios = zip(times["torch"], times["gradsync"], strict=True)
            row["speedup"] = statistics.median(a / b for a, b in ratios)
            figures[name] = row
    if memory:
        for name in names:
            figures[name] |= peaks(name)
    return figures


def peaks(name: str) -> dict[str, float]:
    """Return each variant's peaks, the medians of several pairs of fresh processes."""
    found: dict[str, list[float]] = {}
    for _ in range(5):
        for variant in WITH_MEMORY:
            with Pair([variant], VARIANTS[variant]) as pair:
                allocated, resident = pair.peaks_mib(name, variant)
            found.setdefault(f"{variant}_allocated_mib", []).append(allocated)
            found.setdefault(f"{variant}_resident_mib", []).append(resident)
    return {key: statistics.median(seen) for key, seen in found.items()}


def table(figures: dict[str, dict[str, float]]) -> str:
    heads = ["MiB", "alone ms", "torch ms", "ours ms", "torch tax", "our tax", "speedup"]
    heads += ["alone, kept", "net tax", "lockstep", "stolen"]
    if all("alone_resident_mib" in row for row in figures.values()):
        heads += ["torch alloc", "our alloc", "torch RSS", "our RSS"]
    lines = [f"{'model':8}" + "".join(f"{head:>12}" for head in heads)]
    for name, row in figures.items():
        cells = [f"{row['mib']:.0f}"]
        cells += [f"{row[key]:.2f}" for key in ("alone_ms", "torch_ms", "gradsync_ms")]
        cells += [f"{row['torch_tax']:.1f} %", f"{row['gradsync_tax']:.1f} %"]
        cells += [
            f"{row['speedup']:.2f}x",
            f"{row['alone_kept_ms']:.2f}",
            f"{row['net_tax']:.1f} %",
            f"{row['lockstep_tax']:.1f} %",
            calm_text(row),
        ]
        for kind in ("allocated_mib", "resident_mib"):
            for variant in ("torch", "gradsync"):
                if f"{variant}_{kind}" in row:
                    over = row[f"{variant}_{kind}"] - row[f"alone_{kind}"]
                    cells.append(f"{over:+.1f} MiB")
        lines.append(f"{name:8}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def plot(figures: dict[str, dict[str, float]]) -> str:
    """Return the taxes as bars, in SVG."""
    highest = max(row["torch_tax"] for row in figures.values()) or 1.0
    shapes = ['<text x="10" y="20">tax over stepping alone, 2 ranks: torch DDP, gradsync</text>']
    for place, (name, row) in enumerate(figures.items()):
        for bar, (variant, colour) in enumerate((("torch", "#b0b0b0"), ("gradsync", "#2b7bba"))):
            tax = row[f"{variant}_tax"]
            high = max(1.0, 220 * max(tax, 0.0) / highest)
            x, y = 30 + 130 * place + 50 * bar, 270 - high
            box = f'x="{x}" y="{y:.1f}" width="44" height="{high:.1f}" fill="{colour}"'
            shapes.append(f"<rect {box}/>")
            shapes.append(f'<text x="{x}" y="{y - 4:.1f}">{tax:.0f}%</text>')
        shapes.append(f'<text x="{30 + 130 * place}" y="290">{name}</text>')
    size = f'width="{60 + 130 * len(figures)}" height="300" font-family="sans-serif" font-size="13"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(shapes)}</svg>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 15, no memory")
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory")
    parser.add_argument("--models", default=",".join(MODELS), help="which, separated by commas")
    parser.add_argument("--out", help="write the figures to this file as JSON")
    parser.add_argument("--plot", help="write a bar chart to this file as SVG")
    options = parser.parse_args()
    names = options.models.split(",")
    figures = measure(
        names, 3 if options.quick else 15, memory=not (options.quick or options.no_memory)
    )
    print(table(figures))
    machine = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
    }
    if options.out:
        Path(options.out).write_text(json.dumps({"models": figures, **machine}, indent=1))
    if options.plot:
        Path(options.plot).write_text(plot(figures))


if __name__ == "__main__":
    main()
