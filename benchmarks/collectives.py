"""Collectives of gradsync beside torch's Gloo and mpi4py on Open MPI and MPICH, on one host.

All systems are started at once and take turns in every round, so that whatever else the machine
does hits them alike; while one works, the ranks of the others sleep. Each turn is a few calls that
do not count, because the system before has left its tensors in the caches, a barrier, and a batch
of calls, timed on every rank: the slowest rank counts. Reported is the median over turns; a row
from which the hypervisor took time is measured again, up to twice (calm.py).

Tensors are used again and again, as in training: those of all_reduce have been adopted by shared
memory after a few calls, before any is counted (docs/collectives.md; GRADSYNC_ADOPT=0 shows how
long the first ones take).

Private memory has pages of the ordinary size in all systems (collective/worlds.py: pages()); with
--huge-pages all ask for huge ones.

The size of a call is that of its larger side in bytes: a rank's whole tensor, or all ranks' pieces
together. Where there is a root, the ranks take turns at being it, because with a fixed one a batch
would show how far the root runs ahead, and not how long a call takes (--root 0 shows that).

    python benchmarks/collectives.py [--quick] [--ops all_reduce barrier] [--sizes 4 64K 25M]
        [--ranks 2 4] [--out build/bench/collectives.json]

Needs rich and numpy, for the plot matplotlib (the extra "bench"). The two MPIs are installed under
build/bench when they are not there; how they are run is in collective/worlds.py: settings().
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from pathlib import Path
from typing import Any

from calm import calmest
from collective.report import add_ratios, machine, save, show
from collective.worlds import SYSTEMS, World, free_port, settings

OPS = (
    "all_reduce",
    "all_reduce_shared",
    "broadcast",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "ping_pong",
)
SIZES = ("4", "256", "4K", "16K", "64K", "256K", "1M", "4M", "25M", "100M")
QUICK_SIZES = ("4", "64K", "1M", "25M")
MOST_REPEATS = 2000
WARM_UP = 10
"""Calls before any is counted: what a system does for memory that comes again is done by then."""
START_AFTER_S = 0.02


def size_of(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


class Contest:
    """All systems with the same number of ranks, taking turns."""

    def __init__(self, worlds: dict[str, World], options: argparse.Namespace) -> None:
        self.worlds = worlds
        self.root = options.root
        self.rounds = options.rounds or (7 if options.quick else 21)
        self.batch_s = 0.002 if options.quick else 0.005

    def turn(self, system: str, repeats: int) -> float:
        """Return the seconds of one call."""
        return max(self.worlds[system].ask("run", repeats=repeats, root=self.root)) / repeats

    def measure(self, op: str, size: int) -> dict[str, Any] | None:
        """Return a row of the table, or None when there is nothing to compare with."""
        lacking = {
            system: world.ask("prepare", op=op, total_bytes=size)[0]
            for system, world in self.worlds.items()
        }
        able = [system for system in self.worlds if not lacking[system]]
        if lacking.get("gradsync"):
            return None
        for system in able:
            self.turn(system, WARM_UP)
        repeats = {system: self.calibrate(system) for system in able}

        def run(_: int) -> dict[str, list[float]]:
            samples: dict[str, list[float]] = {system: [] for system in able}
            for number in range(self.rounds):
                shift = number % len(able)
                for system in able[shift:] + able[:shift]:
                    samples[system].append(self.turn(system, repeats[system]) * 1e6)
            return samples

        # All of them together: a round alone is too short to see what was stolen from it.
        counted = calmest(run, 1)
        samples = counted.results[0]
        # A ping-pong is two messages; what is wanted is the time of one.
        share = 2 if op == "ping_pong" else 1
        row: dict[str, Any] = {
            "op": op,
            "bytes": 0 if op == "barrier" else size,
            "us": {system: statistics.median(samples[system]) / share for system in able},
            "best_us": {system: min(samples[system]) / share for system in able},
            "repeats": repeats,
            "rounds": self.rounds,
            "stolen": 100 * counted.stolen,
            "stolen_from_all": 100 * counted.stolen_from_all,
        }
        add_ratios(row)
        return row

    def calibrate(self, system: str) -> int:
        """Return how many calls make a batch."""
        took = self.turn(system, 2)
        if took < self.batch_s / 4:
            took = self.turn(system, max(2, min(MOST_REPEATS, int(self.batch_s / took / 2))))
        # An even number, at least: with two ranks each is the root equally often.
        return max(2, min(MOST_REPEATS, int(self.batch_s / took))) if took < 0.2 else 1


def compare(ranks: int, options: argparse.Namespace, about: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    with contextlib.ExitStack() as stack:
        worlds = {
            system: stack.enter_context(World(system, ranks, options.huge_pages))
            for system in options.systems
        }
        for system, world in worlds.items():
            command, variables = settings(system, ranks)
            said = {**world.about, "options": command, "environment": variables | world.pages}
            about.setdefault(system, {})[f"{ranks} ranks"] = said
        contest = Contest(worlds, options)
        for op in options.ops:
            for size in options.sizes if op != "barrier" else options.sizes[:1]:
                row = contest.measure(op, size)
                if row is None:
                    print(f"{op}: gradsync does not have it")
                    break
                rows.append({"ranks": ranks, **row})
    return rows


def span_ms(world: World, order: str) -> float:
    """Return how long something takes that all do together.

    From the moment when the last rank calls it until the last has returned; one host, one clock.
    """
    arguments: dict[str, Any] = {}
    if order == "init":
        world.ask("leave")
        # Until then the order has reached every rank, and each sleeps.
        arguments = {"port": free_port(), "at": time.monotonic() + START_AFTER_S}
    began, ended = zip(*world.ask(order, **arguments), strict=True)
    return float(max(ended) - max(began)) * 1e3


def around_the_calls(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what forming groups costs, and what Python adds to a native call.

    ``init_process_group`` is that of a process which has done it before: everything is imported,
    and the world before is destroyed. All ranks are woken at one moment, at a new port each time,
    with a new store. gradsync and Gloo take turns. ``new_group`` is a group of all ranks, after a
    barrier.
    """
    rounds = 5 if options.quick else 21
    costs: dict[str, Any] = {}
    for ranks, order, name in (
        (2, "init", "init_process_group, 2 ranks"),
        (4, "init", "init_process_group, 4 ranks"),
        (8, "init", "init_process_group, 8 ranks"),
        (8, "new_group", "new_group, 8 ranks"),
    ):
        with World("gradsync", ranks) as gradsync, World("gloo", ranks) as gloo:
            worlds = {"gradsync": gradsync, "gloo": gloo}

            def run(_: int, worlds: dict[str, World] = worlds, order: str = order) -> list[Any]:
                spans = [[span_ms(w, order) for w in worlds.values()] for _ in range(rounds)]
                return [statistics.median(each) for each in zip(*spans, strict=True)]

            counted = calmest(run, 1)
        medians = dict(zip(worlds, counted.results[0], strict=True))
        costs[name] = {"unit": "ms", **medians, "stolen": 100 * counted.stolen}
    with World("gradsync", 1) as alone:
        cost = alone.ask("python_cost", rounds=rounds * 10, repeats=1000)[0]
    costs["native all_reduce, 1 rank"] = {"unit": "µs", "gradsync": cost["native"]}
    added = cost["public"] - cost["native"]
    costs["Python on top of it"] = {"unit": "µs", "gradsync": added}
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few sizes and rounds")
    parser.add_argument("--ops", nargs="*", choices=OPS, default=list(OPS))
    parser.add_argument("--sizes", nargs="*", help="in bytes; K and M are 2^10 and 2^20")
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, help="turns of each system")
    parser.add_argument("--huge-pages", action="store_true", help="for private memory of all")
    parser.add_argument("--root", type=int, help="instead of taking turns")
    parser.add_argument("--no-costs", action="store_true", help="only the collectives")
    parser.add_argument("--out", type=Path, help="save JSON here and a plot beside it")
    options = parser.parse_args()
    sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    options.sizes = [size_of(text) for text in sizes]

    about = machine()
    rows = [row for ranks in options.ranks for row in compare(ranks, options, about)]
    costs = {} if options.no_costs else around_the_calls(options)
    show(rows, costs)
    if options.out:
        save(options.out, about, rows, costs)


if __name__ == "__main__":
    main()
