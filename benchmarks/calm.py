"""What counts: the part of a run in which the machine was left to us.

On a shared host the hypervisor gives the cores to others now and then ("steal" in /proc/stat), for
a few per cent of the time in one minute and for a third of it in another. Ranks that wait for each
other then wait for whichever was interrupted, in every system. So rounds in which all systems have
had their turn are counted or dropped as a whole, by how much time was stolen from them, whoever's
turn it was; how much was stolen from all is told, too. (Where a host grants credits for computing,
a system that spins while it waits brings steal about, and that part of its price is hidden.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

CALM = 0.01
"""The share of all cores' time that may be stolen from a calm round. It is told in ticks of 10 ms:
rounds should last half a second."""
MOST = 3
"""For how many times as many rounds as are wanted calm ones are waited for."""


class Ticks(NamedTuple):
    """Clock ticks of all cores since the machine was started."""

    stolen: int
    all: int


@dataclass(frozen=True)
class Counted(Generic[T]):
    """The calmest rounds, in their order, and how calm they and all others were."""

    results: list[T]
    stolen: float
    stolen_from_all: float
    rounds: int


def ticks() -> Ticks:
    # user, nice, system, idle, iowait, irq, softirq, steal; guests' time is in user's.
    fields = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    return Ticks(int(fields[7]), sum(map(int, fields)))


def stolen_since(before: Ticks) -> float:
    """Return the share of time that was stolen."""
    now = ticks()
    return (now.stolen - before.stolen) / max(1, now.all - before.all)


def calmest(run: Callable[[int], T], wanted: int) -> Counted[T]:
    """Run rounds until enough of them were calm, or they are too many; return the calmest.

    ``run`` gets the number of calm ones so far: if that decides in which order systems have their
    turns, all orders count equally often, provided that enough rounds were calm.
    """
    seen: list[tuple[float, int, T]] = []
    calm, began = 0, ticks()
    while calm < wanted and len(seen) < MOST * wanted:
        before = ticks()
        result = run(calm)
        seen.append((stolen_since(before), len(seen), result))
        calm += seen[-1][0] <= CALM
    counted = sorted(seen, key=lambda each: each[:2])[:wanted]
    mean = sum(stolen for stolen, *_ in counted) / len(counted)
    results = [result for *_, result in sorted(counted, key=lambda each: each[1])]
    return Counted(results, mean, stolen_since(began), len(seen))
