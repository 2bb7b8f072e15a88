"""The same random operations on our store and on torch's of the same kind give the same answers.

Where we differ on purpose stands in ``DIFFERENCES`` and nowhere else; each row is tried out, so a
row that no longer holds fails too.
"""

from __future__ import annotations

import importlib.util
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gradsync.stores import FileStore, HashStore, PrefixStore
from gradsync.stores.store import value_bytes

TIMEOUT = timedelta(milliseconds=10)
Outcome = tuple[str, Any]


def _torch_tcp() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _own_tcp() -> Any:
    from gradsync.stores.tcp import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


PAIRS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "hash": (lambda _: HashStore(), lambda _: dist.HashStore()),
    "file": (
        lambda folder: FileStore(folder / "ours", 1),
        lambda folder: dist.FileStore(str(folder / "theirs"), 1),
    ),
    "prefix": (
        lambda _: PrefixStore("p", HashStore()),
        lambda _: dist.PrefixStore("p", dist.HashStore()),
    ),
}
if importlib.util.find_spec("gradsync.stores.tcp"):
    PAIRS["tcp"] = (lambda _: _own_tcp(), lambda _: _torch_tcp())


@dataclass(frozen=True)
class Difference:
    """A deliberate difference: how to see it, and what each side answers."""

    kinds: str
    steps: tuple[tuple[Any, ...], ...]
    ours: Outcome
    theirs: Outcome
    why: str

    @property
    def operation(self) -> str:
        return str(self.steps[-1][0])


LATE = ("error", "DistStoreError")
# Two more cannot be tried in a row: a timeout of 0 is for ever on all our stores and "at once" on
# torch's TCPStore; and torch's FileStore counts whole seconds, so it waits longer than it is told.
DIFFERENCES = [
    Difference(
        "file",
        (("get", "absent"),),
        LATE,
        ("error", "RuntimeError"),
        "one class for every timeout",
    ),
    Difference(
        "file",
        (("wait", ["absent"], TIMEOUT),),
        LATE,
        ("error", "RuntimeError"),
        "one class for every timeout",
    ),
    Difference(
        "file",
        (("multi_get", ["absent"]),),
        LATE,
        ("error", "RuntimeError"),
        "one class for every timeout",
    ),
    Difference(
        "file",
        (("barrier", "b", 2, TIMEOUT),),
        LATE,
        ("error", "RuntimeError"),
        "one class for every timeout",
    ),
    Difference(
        "file", (("delete_key", "absent"),), ("is", False), ("is", True), "truth about the key"
    ),
    Difference("file", (("num_keys",),), ("is", 0), ("is", 1), "torch counts its own counter"),
    Difference(
        "file", (("list_keys",),), ("is", []), ("is", ["efcount/"]), "torch lists its own counter"
    ),
    Difference(
        "file",
        (("set", "k", "7"), ("append", "k", "7"), ("get", "k")),
        ("is", b"77"),
        ("is", b"7"),
        "what is appended is appended, also when the key holds the same",
    ),
    Difference(
        "hash file prefix",
        (("set", "n", ""), ("add", "n", 1)),
        ("error", "ValueError"),
        ("is", 1),
        "nothing is not a number",
    ),
    Difference(
        "hash file prefix",
        (("set", "n", "12abc"), ("add", "n", 1)),
        ("error", "ValueError"),
        ("is", 13),
        "a number with a tail is a mistake",
    ),
    Difference(
        "hash file prefix",
        (("set", "n", str(2**63 - 1)), ("add", "n", 1)),
        ("error", "ValueError"),
        ("is", -(2**63)),
        "a sum does not wrap around",
    ),
    Difference(
        "hash file prefix",
        (("set", "n", str(2**80)), ("add", "n", 1)),
        ("error", "ValueError"),
        ("error", "IndexError"),
        "one class for values that cannot be added to",
    ),
    Difference(
        "hash file prefix",
        (("add", "n", 2**80),),
        ("error", "ValueError"),
        ("error", "TypeError"),
        "an int is an int",
    ),
    Difference(
        "hash prefix",
        (("barrier", "b", 0, TIMEOUT),),
        ("error", "ValueError"),
        LATE,
        "nobody can be the last of none",
    ),
    Difference(
        "tcp",
        (("set", "n", "text"), ("add", "n", 1)),
        ("error", "ValueError"),
        ("error", "DistNetworkError"),
        "a mistake does not cost the connection",
    ),
    Difference(
        "tcp",
        (("barrier", "b", 1), ("list_keys",)),
        ("is", []),
        ("is", ["b"]),
        "a barrier leaves no key behind",
    ),
    Difference(
        "tcp",
        (("barrier", "b", 0, TIMEOUT),),
        ("error", "ValueError"),
        ("is", None),
        "nobody can be the last of none",
    ),
    Difference(
        "hash file prefix tcp",
        (("set_timeout", 1),),
        ("is", None),
        ("error", "TypeError"),
        "a number of seconds may be whole",
    ),
    Difference(
        "hash file prefix tcp",
        (("set_timeout", timedelta(seconds=-1)),),
        ("error", "ValueError"),
        ("is", None),
        "a negative timeout is a mistake",
    ),
    Difference(
        "hash file prefix",
        (("set", "k", bytearray(b"v")),),
        ("error", "TypeError"),
        ("is", None),
        "a value is str or bytes",
    ),
]


# Ours, from the most special class to the root, as torch would call it.
CLASSES = (
    ("QueueEmptyError", "QueueEmptyError"),
    ("StoreConnectionError", "DistNetworkError"),
    ("StoreTimeout", "DistStoreError"),
    ("UsageError", "ValueError"),
)


def outcome(store: Any, operation: str, *args: Any) -> Outcome:
    try:
        answer = getattr(store, operation)(*args)
    except Exception as error:  # what is raised is what is compared
        name = type(error).__name__
        return "error", dict(CLASSES).get(name, name)
    return "is", sorted(answer) if operation == "list_keys" else answer


def pair(kind: str, folder: Path) -> tuple[Any, Any]:
    stores = tuple(make(folder) for make in PAIRS[kind])
    for store in stores:
        store.set_timeout(TIMEOUT)
    return stores[0], stores[1]


ROWS = [(kind, row) for row in DIFFERENCES for kind in row.kinds.split() if kind in PAIRS]


@pytest.mark.parametrize(
    ("kind", "row"), ROWS, ids=[f"{k}-{n}-{r.operation}" for n, (k, r) in enumerate(ROWS)]
)
def test_difference_is_as_written(kind: str, row: Difference, tmp_path: Path) -> None:
    ours, theirs = pair(kind, tmp_path)
    for step in row.steps[:-1]:
        assert outcome(ours, *step) == outcome(theirs, *step)
    assert (outcome(ours, *row.steps[-1]), outcome(theirs, *row.steps[-1])) == (
        row.ours,
        row.theirs,
    )


KEYS = ["a", "b", "c/d", "", "é"]
VALUES = ["", "x", "7", b"-3", b"\x00\xff", "é"]


def some_call(chance: random.Random) -> tuple[Any, ...]:
    key, value = chance.choice(KEYS), chance.choice(VALUES)
    keys = chance.sample(KEYS, chance.randint(0, 3))
    queue = f"queue {key}"
    calls: list[tuple[Any, ...]] = [
        ("set", key, value),
        ("set", key, str(chance.randint(-9, 9))),
        ("set", key.encode(), value),
        ("get", key),
        ("add", key, chance.randint(-5, 5)),
        ("compare_set", key, chance.choice(VALUES), value),
        ("append", key, value),
        ("delete_key", key),
        ("check", keys),
        ("wait", keys),
        ("wait", keys, TIMEOUT),
        ("multi_get", keys),
        ("multi_set", keys, [chance.choice(VALUES) for _ in keys]),
        ("num_keys",),
        ("list_keys",),
        ("has_extended_api",),
        ("queue_push", queue, value),
        ("queue_pop", queue),
        ("queue_pop", queue, False),
        ("queue_len", queue),
        ("check", [queue, *keys]),
        ("delete_key", queue),
        ("barrier", f"barrier {key}", 1),
        ("set", key, 3),
        ("set", 3, value),
        ("add", key, 1.5),
        ("check", key),
    ]
    return chance.choice(calls)


def is_left_out(ours: Any, kind: str, call: tuple[Any, ...]) -> bool:
    """Whether a row of the table covers this call, which costs too much or splits the states."""
    operation, *args = call
    if kind == "file" and operation in ("get", "wait", "multi_get"):
        return not ours.check(args[0] if isinstance(args[0], list) else [args[0]])
    if kind == "file" and operation == "append" and ours.check([args[0]]):
        return bool(ours.get(args[0]) == value_bytes(args[1]))
    if operation == "add" and ours.check([args[0]]):
        value = ours.get(args[0])
        number = re.match(rb"[+-]?\d+", value)
        return number.group() != value if number else kind == "tcp" or not value
    return kind == "tcp" and operation == "barrier"


def normal(kind: str, operation: str, theirs: Outcome) -> Outcome:
    """Take torch's own counter out of what its FileStore counts and lists."""
    if kind != "file" or theirs[0] == "error":
        return theirs
    if operation == "num_keys":
        return "is", theirs[1] - 1
    if operation == "list_keys":
        return "is", [key for key in theirs[1] if key != "efcount/"]
    return theirs


def is_deliberate(kind: str, operation: str, ours: Outcome, theirs: Outcome) -> bool:
    return any(
        kind in row.kinds.split()
        and (row.operation, row.ours, row.theirs) == (operation, ours, theirs)
        for row in DIFFERENCES
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", PAIRS)
def test_random_operations_agree(kind: str, seed: int, tmp_path: Path) -> None:
    chance = random.Random(f"{kind} {seed}")
    ours, theirs = pair(kind, tmp_path)
    done: list[tuple[Any, ...]] = []
    for _ in range(120):
        call = some_call(chance)
        if is_left_out(ours, kind, call):
            continue
        done.append(call)
        a, b = outcome(ours, *call), normal(kind, call[0], outcome(theirs, *call))
        assert a == b or is_deliberate(kind, call[0], a, b), f"{a} != {b} after {done}"
