"""What data-parallel training costs: a model stepping alone, under torch's DDP, and under ours.

Two ranks with one thread each. Within one run, in alternating rounds, both ranks step the same
model without any communication, under torch's DDP (Gloo, gradient_as_bucket_view) and under
gradsync's. The tax is what a step takes more than alone in the same round; medians over rounds.
Peak memory is that of fresh processes, by proportional share, over stepping alone.

    python benchmarks/ddp_step.py [--quick] [--models mlp,gpt] [--out r.json] [--plot r.svg]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import threading
from functools import partial
from pathlib import Path

import torch
from torch import nn

import gradsync
from training import MODELS, gradient_mib, stepper, take_turns

VARIANTS = ("alone", "torch", "gradsync")


def wrap(variant: str, model: nn.Module) -> nn.Module:
    if variant == "torch":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return gradsync.DistributedDataParallel(model) if variant == "gradsync" else model


def begin(rank: int, folder: str, variants: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    gradsync.init_process_group(timeout=120)
    if "torch" in variants:
        store = torch.distributed.FileStore(f"{folder}/torch", 2)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)


def end(variants: tuple[str, ...]) -> None:
    if "torch" in variants:
        torch.distributed.destroy_process_group()
    gradsync.destroy_process_group()


def time_rank(rank: int, folder: str, names: list[str], rounds: int) -> None:
    """Time every variant in turn, round by round; rank 0 writes what it saw."""
    begin(rank, folder, VARIANTS)
    found = {}
    for name in names:
        steps = {v: stepper(name, partial(wrap, v)) for v in VARIANTS}
        found[name] = take_turns(steps, MODELS[name][2], rounds, gradsync.barrier)
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps(found))
    end(VARIANTS)


def memory_rank(rank: int, folder: str, name: str, variant: str) -> None:
    """Write the peak of this process's proportional share of memory over a few steps."""
    begin(rank, folder, (variant,))
    step, peak, done = stepper(name, partial(wrap, variant)), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            text = Path("/proc/self/smaps_rollup").read_text()
            peak = max(peak, *(int(x.split()[1]) for x in text.splitlines() if x[:4] == "Pss:"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(4):
        step()
    done.set()
    watcher.join()
    Path(folder, f"{name}.{variant}.{rank}").write_text(str(peak / 1024))
    end((variant,))


def measure(names: list[str], rounds: int, memory: bool) -> dict[str, dict[str, float]]:
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        gradsync.spawn(time_rank, (folder, names, rounds), nprocs=2)
        times = json.loads(Path(folder, "times.json").read_text())
        for name in names:
            row = {"mib": gradient_mib(name)}
            alone = times[name]["alone"]
            for variant in VARIANTS:
                seen = times[name][variant]
                taxes = [100 * (t / a - 1) for t, a in zip(seen, alone, strict=True)]
                row[f"{variant}_ms"] = 1e3 * statistics.median(seen)
                row[f"{variant}_tax"] = statistics.median(taxes)
                row[f"{variant}_spread"] = statistics.quantiles(taxes, n=4)[2] - min(taxes)
            ratios = zip(times[name]["torch"], times[name]["gradsync"], strict=True)
            row["speedup"] = statistics.median(a / b for a, b in ratios)
            if memory:
                for variant in VARIANTS:
                    Path(folder, "torch").unlink(missing_ok=True)
                    gradsync.spawn(memory_rank, (folder, name, variant), nprocs=2)
                    seen = [
                        float(Path(folder, f"{name}.{variant}.{r}").read_text()) for r in (0, 1)
                    ]
                    row[f"{variant}_peak_mib"] = max(seen)
            figures[name] = row
    return figures


def table(figures: dict[str, dict[str, float]]) -> str:
    head = f"{'model':8}{'MiB':>6}{'alone ms':>10}{'torch ms':>10}{'ours ms':>10}"
    lines = [head + f"{'torch tax':>11}{'our tax':>9}{'speedup':>9}{'torch mem':>11}{'our mem':>9}"]
    for name, row in figures.items():
        line = f"{name:8}{row['mib']:6.0f}" + "".join(f"{row[v + '_ms']:10.2f}" for v in VARIANTS)
        line += f"{row['torch_tax']:10.0f}%{row['gradsync_tax']:8.1f}%{row['speedup']:8.2f}x"
        if "alone_peak_mib" in row:
            over = [row[f"{v}_peak_mib"] - row["alone_peak_mib"] for v in ("torch", "gradsync")]
            line += f"{over[0]:+10.0f} {over[1]:+8.0f}"
        lines.append(line)
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
    parser.add_argument("--models", default=",".join(MODELS), help="which, separated by commas")
    parser.add_argument("--out", help="write the figures to this file as JSON")
    parser.add_argument("--plot", help="write a bar chart to this file as SVG")
    options = parser.parse_args()
    names = options.models.split(",")
    figures = measure(names, 3 if options.quick else 15, memory=not options.quick)
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
