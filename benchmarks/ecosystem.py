"""Unchanged torch DDP on torch.distributed's backends: Gloo beside gradsync, and stepping alone.

Two ranks with one thread each and the models of training.py. In alternating rounds of one run both
ranks step the same model without DDP, under torch's DDP on Gloo and on gradsync, and under DDP with
a hook that sends nothing: what DDP itself costs, and so the best that any backend can do. The tax
is what a step takes more than alone in the same round; medians over rounds. Rounds from which the
hypervisor took time are run again (calm.py; "stolen" is what it took from those that count, and
from all).

Gloo and stepping alone run in processes without gradsync, as their users run them: one in which
gradsync works keeps the memory it frees (GRADSYNC_KEEP_FREED_MEMORY). How much of the gain that is,
stepping alone in such a process shows ("kept").

    python benchmarks/ecosystem.py [--quick] [--models mlp,gpt,conv,layers] [--out r.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from training import MODELS, Joined, Pair, calm_text, gradient_mib, percent_over, take_turns

VARIANTS = ("alone", "gloo", "kept", "gradsync", "silent")


def send_nothing(_, bucket):  # torch checks annotations, and cannot read them as text
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def wrap(variant: str, model: nn.Module) -> nn.Module:
    if variant in ("alone", "kept"):
        return model
    wrapped = DistributedDataParallel(model)
    if variant == "silent":
        wrapped.register_comm_hook(None, send_nothing)
    return wrapped


def join(backend: str, rank: int, folder: str) -> Joined:
    store = dist.FileStore(f"{folder}/meet", 2)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    return wrap, dist.barrier


def measure(names: list[str], rounds: int) -> dict[str, dict[str, float]]:
    figures = {}
    with (
        Pair(VARIANTS[:2], partial(join, "gloo")) as gloo,
        Pair(VARIANTS[2:], partial(join, "gradsync")) as ours,
    ):
        for name in names:
            times, calm = take_turns([gloo, ours], name, rounds)
            row = {"mib": gradient_mib(name), **calm}
            for variant in VARIANTS:
                row[f"{variant}_ms"] = 1e3 * statistics.median(times[variant])
                taxes = percent_over(times[variant], times["alone"])
                row[f"{variant}_tax"] = statistics.median(taxes)
            for variant in ("gradsync", "silent"):
                ratios = [a / b for a, b in zip(times["gloo"], times[variant], strict=True)]
                row[f"{variant}_speedup"] = statistics.median(ratios)
                row[f"{variant}_low"], _, row[f"{variant}_high"] = statistics.quantiles(ratios, n=4)
            figures[name] = row
    return figures


def table(figures: dict[str, dict[str, float]]) -> str:
    heads = [f"{v} ms" for v in VARIANTS] + [f"{v} tax" for v in VARIANTS[1:]]
    lines = [f"{'model':8}{'MiB':>5}" + "".join(f"{head:>14}" for head in heads) + "   over gloo"]
    for name, row in figures.items():
        line = f"{name:8}{row['mib']:5.0f}" + "".join(f"{row[v + '_ms']:14.2f}" for v in VARIANTS)
        line += "".join(f"{row[v + '_tax']:13.0f}%" for v in VARIANTS[1:])
        line += f"   {row['gradsync_speedup']:.2f}x"
        line += f" ({row['gradsync_low']:.2f} to {row['gradsync_high']:.2f})"
        line += f", at best {row['silent_speedup']:.2f}x; stolen {calm_text(row)}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="5 rounds instead of 15")
    parser.add_argument("--models", default=",".join(MODELS), help="which, separated by commas")
    parser.add_argument("--out", help="write the figures to this file as JSON")
    options = parser.parse_args()
    figures = measure(options.models.split(","), 5 if options.quick else 15)
    print(table(figures))
    if options.out:
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        report = {"models": figures, "machine": machine, "torch": torch.__version__}
        Path(options.out).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
