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
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import gradsync

VARIANTS = ("alone", "torch", "gradsync")


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


def wrap(model: nn.Module, variant: str) -> nn.Module:
    if variant == "torch":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return gradsync.DistributedDataParallel(model) if variant == "gradsync" else model


def stepper(name: str, variant: str) -> Callable[[], None]:
    torch.manual_seed(0)
    make, data, _ = MODELS[name]
    model = wrap(make(), variant)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = data()

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


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
    found: dict[str, dict[str, list[float]]] = {}
    for name in names:
        steps = {variant: stepper(name, variant) for variant in VARIANTS}
        count = MODELS[name][2]
        times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for number in range(rounds + 1):
            for variant in VARIANTS if number % 2 else VARIANTS[::-1]:
                gradsync.barrier()
                start = time.perf_counter()
                for _ in range(count):
                    steps[variant]()
                gradsync.barrier()  # the slower rank counts
                if number:  # the first round warms up
                    times[variant].append((time.perf_counter() - start) / count)
        found[name] = times
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps(found))
    end(VARIANTS)


def memory_rank(rank: int, folder: str, name: str, variant: str) -> None:
    """Write the peak of this process's proportional share of memory over a few steps."""
    begin(rank, folder, (variant,))
    step, peak, done = stepper(name, variant), 0, threading.Event()

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


def gradient_mib(name: str) -> float:
    return sum(p.numel() * p.element_size() for p in MODELS[name][0]().parameters()) / 2**20


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
