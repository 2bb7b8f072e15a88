"""Rounds that count: those in which the machine was left to us.

On a shared host the hypervisor gives the cores to others now and then ("steal" in /proc/stat), for
a few per cent of the time in one minute and for a third of it in another. Ranks that wait for each
other then wait for whichever was interrupted, in every system. So rounds in which all systems have
had their turn are counted or dropped as a whole, by how much time was stolen and by nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

CALM = 0.01
"""The share of all cores' time that may be stolen from a calm round."""
MOST = 3
"""For how many times as many rounds as are wanted calm ones are waited for."""


class Ticks(NamedTuple):
    """Clock ticks of all cores since the machine was started."""

    stolen: int
    all: int


def ticks() -> Ticks:
    # user, nice, system, idle, iowait, irq, softirq, steal; guests' time is in user's.
    fields = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    return Ticks(int(fields[7]), sum(map(int, fields)))


def stolen_since(before: Ticks) -> float:
    """Return the share of time that was stolen."""
    now = ticks()
    return (now.stolen - before.stolen) / max(1, now.all - before.all)


def calmest(run: Callable[[int], T], rounds: int) -> tuple[list[T], float]:
    """Run rounds, given their number, until enough of them were calm or they are too many.

    Returns what the calmest had for a result, in their order, and the mean share stolen from them.
    """
    seen: list[tuple[float, int, T]] = []
    while len(seen) < MOST * rounds and sum(stolen <= CALM for stolen, *_ in seen) < rounds:
        before, number = ticks(), len(seen)
        result = run(number)
        seen.append((stolen_since(before), number, result))
    counted = sorted(seen, key=lambda each: each[:2])[:rounds]
    mean = sum(stolen for stolen, *_ in counted) / len(counted)
    return [result for *_, result in sorted(counted, key=lambda each: each[1])], mean
