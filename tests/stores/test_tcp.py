"""TCPStore and UnixStore: what every operation does, from one thread and from many."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from gradsync.errors import (
    QueueEmptyError,
    StoreTimeout,
    UsageError,
)
from gradsync.stores.socket_store import SocketStore
from gradsync.stores.tcp import TCPStore
from gradsync.stores.unix import UnixStore

SHORT = timedelta(milliseconds=50)


def _unix_name() -> str:
    return f"test-{os.getpid()}-{time.monotonic_ns()}"


@pytest.fixture(params=["tcp", "unix"])
def store(request: pytest.FixtureRequest) -> Iterator[SocketStore]:
    if request.param == "tcp":
        yield TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))
    else:
        yield UnixStore(_unix_name(), is_master=True, timeout=timedelta(seconds=30))


def _times_out(call: Callable[[], object], within_s: float = 2.0) -> str:
    began = time.monotonic()
    with pytest.raises(StoreTimeout) as caught:
        call()
    assert 0.04 < time.monotonic() - began < within_s
    return str(caught.value)


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [b"", b"\x00\xff\x80 bytes", "text ä€", "\udcff".encode(errors="surrogateescape")]
)
def test_set_then_get_returns_the_bytes(store: SocketStore, value: str | bytes) -> None:
    store.set("key", value)
    expected = value.encode() if isinstance(value, str) else value
    assert store.get("key") == expected
    assert store.get(b"key") == expected


@pytest.mark.parametrize("key", ["", "ä/€", "with\0nul", "x" * 65536])
def test_any_text_is_a_key(store: SocketStore, key: str) -> None:
    store.set(key, "v")
    assert store.get(key) == b"v"
    assert store.list_keys() == [key]


def test_bytes_key_that_is_no_text_survives(store: SocketStore) -> None:
    store.set(b"\xff\xfe", "v")
    (key,) = store.list_keys()
    assert store.get(key) == b"v"


@pytest.mark.parametrize("value", [1, 1.5, ["x"], bytearray(b"x")])
def test_other_types_are_refused_before_anything_is_sent(store: SocketStore, value: object) -> None:
    with pytest.raises(TypeError, match="must be str or bytes"):
        store.set("key", value)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be str or bytes"):
        store.get(value)  # type: ignore[arg-type]
    assert store.num_keys() == 0


def test_none_is_refused_too(store: SocketStore) -> None:
    with pytest.raises(TypeError):
        store.set("key", None)  # type: ignore[arg-type]


def test_one_text_is_not_taken_for_a_list_of_keys(store: SocketStore) -> None:
    with pytest.raises(TypeError, match="expected a list"):
        store.wait("key")


@pytest.mark.parametrize("size", [100_000, 1_000_000, 30_000_000])
def test_large_values_survive(store: SocketStore, size: int) -> None:
    value = os.urandom(1000) * (size // 1000)
    store.set("large", value)
    assert store.get("large") == value
    assert store.compare_set("large", value, b"small") == b"small"


# -- operations ------------------------------------------------------------------------------------


def test_get_waits_for_set_of_another_client(store: SocketStore) -> None:
    other = store.clone()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(store.get, "key")
        other.set("key", "value")
        assert waiting.result(5) == b"value"


def test_timeouts_name_the_missing_keys_and_leave_the_store_usable(store: SocketStore) -> None:
    store.set("there", "v")
    store.set_timeout(SHORT)
    assert "'gone'" in _times_out(lambda: store.get("gone"))
    assert "'a', 'b'" in _times_out(lambda: store.wait(["a", "there", "b"]))
    assert "'a'" in _times_out(lambda: store.multi_get(["there", "a"]))
    assert "'q'" in _times_out(lambda: store.queue_pop("q"))
    assert "1 of 3" in _times_out(lambda: store.barrier("b", 3))
    assert store.get("there") == b"v"
    store.set_timeout(timedelta(seconds=30))
    _times_out(lambda: store.wait(["gone"], SHORT))
    assert store.timeout == timedelta(seconds=30)


def test_zero_timeout_waits_for_ever(store: SocketStore) -> None:
    other = store.clone()
    store.set_timeout(timedelta(0))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(store.get, "key")
        time.sleep(0.2)
        assert not waiting.done()
        other.set("key", "v")
        assert waiting.result(5) == b"v"
    assert store.clone().get("key") == b"v"


def test_add_keeps_decimal_text(store: SocketStore) -> None:
    assert store.add("n", 0) == 0
    assert store.get("n") == b"0"
    assert store.add("n", -2) == -2
    store.set("n", "41")
    assert store.add("n", 1) == 42


def test_add_to_text_or_beyond_64_bits_is_an_error_and_the_store_lives_on(
    store: SocketStore,
) -> None:
    store.set("text", "4x")
    with pytest.raises(UsageError, match="decimal integer") as caught:
        store.add("text", 1)
    assert isinstance(caught.value, ValueError)
    store.set("big", str(2**63 - 1))
    with pytest.raises(UsageError, match="64-bit"):
        store.add("big", 1)
    with pytest.raises(UsageError, match="64 bits"):
        store.add("big", 2**70)
    assert store.get("text") == b"4x"


def test_compare_set_decision_table(store: SocketStore) -> None:
    assert store.compare_set("k", "old", "new") == b"old"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "a") == b"a"
    assert store.compare_set("k", "x", "b") == b"a"
    assert store.compare_set("k", "a", "b") == b"b"
    assert store.get("k") == b"b"


def test_append_delete_check_and_counts(store: SocketStore) -> None:
    store.append("k", "a")
    store.append("k", b"b")
    assert store.get("k") == b"ab"
    assert store.check(["k"])
    assert not store.check(["k", "other"])
    assert store.check([])
    store.wait([])
    assert store.num_keys() == 1
    assert store.delete_key("k") is True
    assert store.delete_key("k") is False
    assert store.num_keys() == 0
    _times_out(lambda: store.wait(["k"], SHORT))


def test_multi_operations(store: SocketStore) -> None:
    assert store.has_extended_api()
    store.multi_set(["a", "b"], ["1", b"2"])
    assert store.multi_get(["b", "a", "b"]) == [b"2", b"1", b"2"]
    assert store.multi_get([]) == []
    assert sorted(store.list_keys()) == ["a", "b"]
    with pytest.raises(UsageError, match="as many values as keys"):
        store.multi_set(["a"], [])


def test_queues_are_first_in_first_out_across_clients(store: SocketStore) -> None:
    other = store.clone()
    for i in range(5):
        (store if i % 2 else other).queue_push("q", str(i))
    assert store.queue_len("q") == 5
    assert store.check(["q"])
    assert store.num_keys() == 0
    assert [other.queue_pop("q") for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
    assert store.queue_len("q") == store.queue_len("never used") == 0
    assert not store.check(["q"])
    with pytest.raises(QueueEmptyError):
        store.queue_pop("q", block=False)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(store.queue_pop, "q")
        other.queue_push("q", "late")
        assert waiting.result(5) == b"late"


def test_barrier_can_be_used_again(store: SocketStore) -> None:
    clones = [store.clone() for _ in range(3)]
    counter = iter(range(100))
    arrived: list[int] = []

    def member(own: SocketStore) -> None:
        for round_number in range(1, 6):
            arrived.append(next(counter))
            own.barrier("b", 3)
            assert len(arrived) >= 3 * round_number

    with ThreadPoolExecutor() as pool:
        for result in [pool.submit(member, clone) for clone in clones]:
            result.result(20)
    with pytest.raises(UsageError):
        store.barrier("b", 0)


def test_over_the_limits_is_refused_and_the_store_lives_on(store: SocketStore) -> None:
    with pytest.raises(UsageError, match="over the store's limit"):
        store.set("k" * 65537, "v")
    with pytest.raises(UsageError, match="over the store's limit"):
        store.get("k" * 65537)
    with pytest.raises(UsageError, match="over the store's limit"):
        store.check(["k"] * 200_000)
    with pytest.raises(UsageError, match="over the store's limit"):
        store.set("k", bytes((256 << 20) + 1))
    assert store.add("n", 1) == 1


def test_threads_share_one_client_without_waiting_for_each_other(store: SocketStore) -> None:
    with ThreadPoolExecutor(9) as pool:
        waiting = [pool.submit(store.get, f"late{i}") for i in range(8)]
        assert [store.add("n", 1) for _ in range(100)] == list(range(1, 101))
        assert not any(future.done() for future in waiting)
        for i in range(8):
            store.set(f"late{i}", str(i))
        assert [future.result(5) for future in waiting] == [str(i).encode() for i in range(8)]


def test_add_from_many_processes_sums_exactly() -> None:
    master = TCPStore("127.0.0.1", 0, is_master=True)
    code = (
        "import sys; from gradsync.stores.tcp import TCPStore\n"
        "store = TCPStore('127.0.0.1', int(sys.argv[1]))\n"
        "for _ in range(500): store.add('n', 1)\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", code, str(master.port)]) for _ in range(4)]
    assert [child.wait(60) for child in children] == [0] * 4
    assert master.add("n", 0) == 2000


# -- as an object ----------------------------------------------------------------------------------


def test_stores_cannot_be_copied(store: SocketStore) -> None:
    with pytest.raises(TypeError):
        pickle.dumps(store)
    with pytest.raises(TypeError):
        copy.deepcopy(store)


def test_waiting_call_is_interrupted_by_a_signal(store: SocketStore) -> None:
    class Interrupted(Exception):
        pass

    def handler(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(Interrupted):
            store.queue_pop("q")
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    # The abandoned pop takes nothing.
    store.queue_push("q", "x")
    assert store.queue_len("q") == 1


def test_signal_handler_may_use_the_store_that_its_thread_waits_in(store: SocketStore) -> None:
    def handler(*_: object) -> None:
        store.add("handled", 1)
        store.set("late", "v")

    before = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        assert store.get("late") == b"v"
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert store.add("handled", 0) == 1


def test_ports_that_nobody_can_serve_are_refused_at_once() -> None:
    with pytest.raises(UsageError, match="lets the master choose"):
        TCPStore("127.0.0.1", 0)
    with pytest.raises(UsageError, match="between 0 and 65535"):
        TCPStore("127.0.0.1", 65536)
