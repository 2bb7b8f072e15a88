from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from gradsync.base.deadline import Deadline
from gradsync.base.host import HostEvidence
from gradsync.errors import PeerLostError, RendezvousError
from gradsync.rendezvous.join import Joined, join, leave
from gradsync.rendezvous.member import Member
from gradsync.stores.file import FileStore
from gradsync.stores.hash import HashStore
from gradsync.stores.prefix import PrefixStore
from gradsync.stores.store import Store
from gradsync.stores.unix import UnixStore

Outcome = Joined | PeerLostError | RendezvousError


def on_threads(ranks: list[Callable[[], Joined]]) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}

    def call(index: int) -> None:
        try:
            outcomes[index] = ranks[index]()
        except (PeerLostError, RendezvousError) as error:
            outcomes[index] = error

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return [outcomes[index] for index in range(len(ranks))]


def arrive(store: Store, rank: int, size: int, timeout_s: float = 10.0, after_s: float = 0.0):
    def call() -> Joined:
        time.sleep(after_s)
        return join(store, rank, size, Deadline(timeout_s), local_rank=rank)

    return call


@pytest.fixture(params=["hash", "unix", "file"])
def store(request, tmp_path) -> Store:
    if request.param == "unix":
        return UnixStore(f"test-join-{tmp_path}", is_master=True)
    if request.param == "file":
        return FileStore(str(tmp_path / "store"), -1)
    return PrefixStore("p", HashStore())


def test_everyone_meets_everyone_again_and_again(store):
    for generation in range(6):
        outcomes = on_threads([arrive(store, rank, 3) for rank in range(3)])
        for outcome in outcomes:
            assert isinstance(outcome, Joined), outcome
            assert outcome == outcomes[0]
            assert outcome.generation == generation
            assert [member.rank for member in outcome.members] == [0, 1, 2]
            assert [member.local_rank for member in outcome.members] == [0, 1, 2]


def test_quick_rank_may_meet_again_before_slow_ones_have_left():
    store = HashStore()

    def meet_often(rank: int, pause_s: float) -> Callable[[], Joined]:
        def call() -> Joined:
            for _ in range(20):
                joined = join(store, rank, 3, Deadline(10))
                time.sleep(pause_s)
            return joined

        return call

    outcomes = on_threads([meet_often(0, 0.0), meet_often(1, 0.002), meet_often(2, 0.005)])
    assert [outcome.generation for outcome in outcomes if isinstance(outcome, Joined)] == [19] * 3


def test_timeout_lists_who_came_and_who_is_missing_on_every_rank(store):
    begin = time.monotonic()
    outcomes = on_threads(
        [arrive(store, 0, 5, 30.0), arrive(store, 2, 5, 0.7), arrive(store, 4, 5, 30.0)]
    )
    assert time.monotonic() - begin < 3.0, "the first deadline ends the round for all"
    for outcome in outcomes:
        assert isinstance(outcome, RendezvousError)
        text = str(outcome)
        assert "only 3 of 5 ranks came" in text
        assert "Missing: 1, 3." in text
        came = text.partition("Came: ")[2].partition(" Missing")[0]
        assert came.count("pid ") == 3


def test_failed_round_does_not_spoil_the_next(store):
    first = on_threads([arrive(store, 0, 3, 0.3), arrive(store, 1, 3, 0.3)])
    assert all(isinstance(outcome, RendezvousError) for outcome in first)
    second = on_threads([arrive(store, rank, 3) for rank in range(3)])
    assert all(isinstance(outcome, Joined) for outcome in second), second


def test_death_between_arrival_and_verdict_is_an_error_on_all(monkeypatch):
    """Rank 0 looks before rank 1 dies and goes on; rank 2 looks after, and must not wait for it."""
    from gradsync.rendezvous import join as module

    store = HashStore()
    gone = HostEvidence("here", "host", 4711, 1, 1, 1, 1)
    store.set("gradsync/rendezvous/0/1", Member(1, 3, 1, gone, "x").encode())
    sees_it = threading.local()
    monkeypatch.setattr(
        module, "is_dead", lambda one, observer: one == gone and hasattr(sees_it, "yes")
    )

    def early() -> Joined:
        joined = join(store, 0, 3, Deadline(20))
        time.sleep(0.2)
        leave(store, joined, 0)  # what a rank does that fails to form the group
        return joined

    def late() -> Joined:
        sees_it.yes = True
        return join(store, 2, 3, Deadline(20))

    begin = time.monotonic()
    first, second = on_threads([early, late])
    assert isinstance(first, Joined)
    assert isinstance(second, PeerLostError)
    assert second.ranks == (1,)
    assert "rank 1 (pid 4711 on host) ended before everyone had come (rank 0 has" in str(second)
    assert time.monotonic() - begin < 5


def test_long_wait_for_a_rank_is_told_once_by_the_lowest_that_came(monkeypatch, caplog):
    monkeypatch.setenv("GRADSYNC_LATE_AFTER", "0.3")
    store = HashStore()

    def late() -> Joined:
        time.sleep(1.7)  # two looks of those who wait
        return join(store, 0, 3, Deadline(20))

    outcomes = on_threads([arrive(store, 1, 3), arrive(store, 2, 3), late])
    assert all(isinstance(outcome, Joined) for outcome in outcomes)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "gradsync"]
    assert "2 of 3 ranks have come to form the world. Came: 1 (pid" in line
    assert line.endswith("Missing: 0")


def test_late_rank_learns_that_the_others_gave_up():
    store = HashStore()
    with pytest.raises(RendezvousError):
        join(store, 0, 2, Deadline(0.1))
    with pytest.raises(RendezvousError, match=r"Missing: 0.*earlier attempt.*Missing: 1"):
        join(store, 1, 2, Deadline(0.1))


@pytest.mark.parametrize("sizes", [(2, 3), (3, 4), (4, 2)])
def test_disagreeing_world_sizes_fail_on_all(store, sizes):
    begin = time.monotonic()
    outcomes = on_threads([arrive(store, rank, size) for rank, size in enumerate(sizes)])
    assert time.monotonic() - begin < 4.0
    for outcome in outcomes:
        assert isinstance(outcome, RendezvousError)
        assert "disagree on the world size" in str(outcome)
        for size in sizes:
            assert f"{size} say" in str(outcome)


@pytest.mark.parametrize("sizes", [(2, 4), (1, 3, 2)])
def test_world_may_grow_and_shrink_from_round_to_round(store, sizes):
    for size in sizes:
        # The highest rank comes first: its slot is free in the rounds of a smaller world.
        ranks = [arrive(store, rank, size, 10.0, 0.05 * (size - rank)) for rank in range(size)]
        outcomes = on_threads(ranks)
        for outcome in outcomes:
            assert isinstance(outcome, Joined), outcome
            assert outcome == outcomes[0]


def test_dead_processes_of_an_earlier_run_are_not_met(tmp_path):
    store = FileStore(str(tmp_path / "left-behind"), -1)
    me = join(HashStore(), 0, 1, Deadline(1)).members[0].evidence
    ghost = HostEvidence(me.boot_id, me.host, 1 << 22, 1, me.uid, 1, me.pid_namespace)
    store.set("gradsync/rendezvous/0/1", Member(1, 3, 1, ghost).encode())
    outcomes = on_threads([arrive(store, rank, 3) for rank in range(3)])
    for outcome in outcomes:
        assert isinstance(outcome, Joined)
        assert {member.evidence.pid for member in outcome.members} == {me.pid}


class CountingStore(HashStore):
    def __init__(self) -> None:
        super().__init__()
        self.trips: list[str] = []

    def compare_set(self, *args):
        self.trips.append("compare_set")
        return super().compare_set(*args)

    def get_within(self, *args):
        self.trips.append("get_within")
        return super().get_within(*args)

    def check(self, *args):
        self.trips.append("check")
        return super().check(*args)

    def wait(self, *args):
        self.trips.append("wait")
        return super().wait(*args)

    def add(self, *args):
        self.trips.append("add")
        return super().add(*args)


def test_arrival_costs_two_round_trips():
    store = CountingStore()
    first = threading.Thread(target=arrive(store, 0, 2))
    first.start()
    while not store.check(["gradsync/rendezvous/0/0"]):
        time.sleep(0.01)
    store.trips.clear()
    join(store, 1, 2, Deadline(10))
    first.join()
    assert store.trips[:2] == ["compare_set", "get_within"]
    assert store.trips.count("compare_set") == 1


def test_strangers_keys_are_reported():
    store = HashStore()
    store.set("gradsync/rendezvous/0/1", b"\x80\x04.")
    with pytest.raises(RendezvousError, match="another program"):
        join(store, 0, 2, Deadline(5))
