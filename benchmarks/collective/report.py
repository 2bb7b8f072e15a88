"""What was measured, as tables, as JSON and as a plot."""

from __future__ import annotations

import json
import os
import platform
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from collective.worlds import MPIS, SYSTEMS

COLORS = {"gradsync": "tab:red", "gloo": "tab:gray", "openmpi": "tab:blue", "mpich": "tab:green"}


def size_text(size: int) -> str:
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size} B"


def time_text(microseconds: float | None) -> str:
    if microseconds is None:
        return "-"
    return f"{microseconds:.2f}" if microseconds < 100 else f"{microseconds:,.0f}"


def add_ratios(row: dict[str, Any]) -> None:
    """Say how many times as fast as its peers gradsync was; more than 1 is faster."""
    times = row["us"]
    mpis = [times[system] for system in MPIS if system in times]
    if "gradsync" in times:
        row["over_mpi"] = min(mpis) / times["gradsync"] if mpis else None
        row["over_gloo"] = times["gloo"] / times["gradsync"] if "gloo" in times else None


def ratio_text(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio:.2f}" if ratio >= 1 else f"[bold red]{ratio:.2f}[/]"


def show(rows: list[dict[str, Any]], costs: dict[str, Any]) -> None:
    console = Console(width=None if Console().is_terminal else 110)
    for ranks in sorted({row["ranks"] for row in rows}):
        table = Table(title=f"{ranks} ranks, float32, median µs of a call")
        for name in ("op", "size", *SYSTEMS, "faster MPI ÷ ours", "Gloo ÷ ours"):
            table.add_column(name, justify="left" if name == "op" else "right")
        last = ""
        for row in (row for row in rows if row["ranks"] == ranks):
            if row["op"] != last:
                table.add_section()
            last = row["op"]
            table.add_row(
                row["op"],
                size_text(row["bytes"]) if row["bytes"] else "",
                *(time_text(row["us"].get(system)) for system in SYSTEMS),
                ratio_text(row.get("over_mpi")),
                ratio_text(row.get("over_gloo")),
            )
        console.print(table)
    if rows:
        most = max(row["stolen"] for row in rows)
        typical = statistics.median(row["stolen"] for row in rows)
        console.print(f"stolen by the hypervisor: {typical:.1f} %, at most {most:.1f} % of a row")
    if costs:
        table = Table(title="around the calls, medians")
        for name in ("what", "gradsync", "gloo", "Gloo ÷ ours"):
            table.add_column(name, justify="left" if name == "what" else "right")
        for name, row in costs.items():
            ours, theirs = row["gradsync"], row.get("gloo")
            ratio = ratio_text(theirs / ours) if theirs else "-"
            peer = f"{theirs:.2f} {row['unit']}" if theirs else "-"
            table.add_row(name, f"{ours:.2f} {row['unit']}", peer, ratio)
        console.print(table)


def machine() -> dict[str, Any]:
    text = Path("/proc/cpuinfo").read_text()
    models = [line.split(":")[1].strip() for line in text.splitlines() if "model name" in line]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30,
        "kernel": platform.release(),
        "load_before": os.getloadavg()[0],
    }


def save(
    path: Path, about: dict[str, Any], rows: list[dict[str, Any]], costs: dict[str, Any]
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": about, "costs": costs, "rows": rows}, indent=1))
    try:
        plot(path.with_suffix(".png"), rows)
    except ImportError:
        print("no plot: matplotlib is not installed (pip install 'gradsync[bench]')")


def plot(path: Path, rows: list[dict[str, Any]]) -> None:
    """Draw time over size, one panel for each operation and number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ops = list(dict.fromkeys(row["op"] for row in rows if row["bytes"]))
    counts = sorted({row["ranks"] for row in rows})
    if not ops:
        return
    shape = (len(ops), len(counts))
    size = (5 * shape[1], 3 * shape[0])
    figure, panels = pyplot.subplots(*shape, squeeze=False, figsize=size, layout="constrained")
    for i, op in enumerate(ops):
        for j, ranks in enumerate(counts):
            panel = panels[i][j]
            mine = [row for row in rows if (row["op"], row["ranks"]) == (op, ranks)]
            for system in SYSTEMS:
                there = [row for row in mine if system in row["us"]]
                sizes, times = [r["bytes"] for r in there], [r["us"][system] for r in there]
                panel.loglog(sizes, times, "o-", color=COLORS[system], label=system)
            panel.set(title=f"{op}, {ranks} ranks", xlabel="bytes", ylabel="µs")
            panel.grid(alpha=0.3)
    panels[0][0].legend()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
