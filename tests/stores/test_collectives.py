"""StoreCollectives: every collective, what a missing rank causes, and torch's side of the keys."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest
import torch.distributed as dist

from gradsync.errors import StoreTimeout, UsageError
from gradsync.stores import FileStore, HashStore, Store, StoreCollectives, from_torch

T = TypeVar("T")
SHORT = timedelta(milliseconds=30)
LONG = timedelta(seconds=10)


@pytest.fixture(params=["hash", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return HashStore() if request.param == "hash" else FileStore(tmp_path / "store", 1)


def on_ranks(store: Store, size: int, body: Callable[[StoreCollectives, int], T]) -> list[T]:
    with ThreadPoolExecutor(size) as pool:
        return list(
            pool.map(
                lambda rank: body(StoreCollectives(store.clone(), rank, size), rank), range(size)
            )
        )


def test_broadcast_reaches_every_rank(store: Store) -> None:
    def body(group: StoreCollectives, rank: int) -> bytes | None:
        return group.broadcast_recv("b") if rank else group.broadcast_send("b", "data")

    assert on_ranks(store, 3, body) == [None, b"data", b"data"]


def test_gather_returns_by_rank_on_one(store: Store) -> None:
    def body(group: StoreCollectives, rank: int) -> list[bytes] | None:
        own = f"rank{rank}"
        return group.gather_recv("g", own) if rank == 1 else group.gather_send("g", own)

    assert on_ranks(store, 3, body) == [None, [b"rank0", b"rank1", b"rank2"], None]


def test_scatter_gives_each_its_own(store: Store) -> None:
    def body(group: StoreCollectives, rank: int) -> bytes:
        return group.scatter_recv("s") if rank else group.scatter_send("s", ["x", b"y", "z"])

    assert on_ranks(store, 3, body) == [b"x", b"y", b"z"]


def test_all_gather_and_all_sum_answer_everyone(store: Store) -> None:
    def body(group: StoreCollectives, rank: int) -> tuple[list[bytes], int]:
        return group.all_gather("ag", str(rank)), group.all_sum("as", rank + 1)

    assert on_ranks(store, 3, body) == [([b"0", b"1", b"2"], 6)] * 3


def test_barrier_waits_for_all_unless_told(store: Store) -> None:
    first, second = (StoreCollectives(store, rank, 2) for rank in range(2))
    first.barrier("meet", block=False)
    second.barrier("meet", SHORT)
    with pytest.raises(StoreTimeout, match=r"barrier .* on rank 0 of 2 .* missing rank 1\."):
        first.barrier("alone", SHORT)


def test_timeouts_name_the_missing_ranks() -> None:
    store = HashStore()
    group = StoreCollectives(store, 1, 4)
    store.set("g/3", "here")
    with pytest.raises(StoreTimeout, match=r"gather .* missing rank 0, 2\."):
        group.gather_recv("g", "own", SHORT)
    with pytest.raises(StoreTimeout, match=r"all_sum .* missing rank 0, 2, 3\."):
        group.all_sum("s", 1, SHORT)
    with pytest.raises(StoreTimeout, match=r"broadcast .* missing the sender"):
        group.broadcast_recv("b", SHORT)
    with pytest.raises(StoreTimeout, match=r"scatter .* missing the sender"):
        group.scatter_recv("c", SHORT)
    assert store.timeout == timedelta(seconds=300)


def test_key_is_used_once_whatever_the_operation() -> None:
    group = StoreCollectives(HashStore(), 0, 1)
    group.broadcast_send("k", "v")
    for again in (
        lambda: group.broadcast_send("k", "v"),
        lambda: group.all_gather("k", "v"),
        lambda: group.all_sum("k", 1),
        lambda: group.barrier(b"k"),
        lambda: group.scatter_recv("k"),
    ):
        with pytest.raises(UsageError, match="already used"):
            again()


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="rank 2 is not in a world of 2"):
        StoreCollectives(HashStore(), 2, 2)
    group = StoreCollectives(HashStore(), 0, 2)
    with pytest.raises(UsageError, match="each of 2 ranks, got 1"):
        group.scatter_send("k", ["only one"])
    group.broadcast_send("k", "still free")


def test_ranks_of_torch_understand_ours() -> None:
    shared = dist.HashStore()
    ours = StoreCollectives(from_torch(shared), 0, 2)
    theirs = dist._StoreCollectives(shared, 1, 2)  # type: ignore[attr-defined]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(
            lambda: (
                theirs.all_gather("ag", "theirs", LONG),
                theirs.all_sum("as", 2, LONG),
                theirs.barrier("b", LONG),
                theirs.broadcast_recv("bc", LONG),
                theirs.scatter_recv("sc", LONG),
                theirs.gather_send("g", "theirs", LONG),
            )
        )
        assert ours.all_gather("ag", "ours", LONG) == [b"ours", b"theirs"]
        assert ours.all_sum("as", 1, LONG) == 3
        ours.barrier("b", LONG)
        ours.broadcast_send("bc", "news")
        assert ours.scatter_send("sc", ["0", "1"]) == b"0"
        assert ours.gather_recv("g", "ours", LONG) == [b"ours", b"theirs"]
        assert answer.result(20) == ([b"ours", b"theirs"], 3, None, b"news", b"1", None)
