"""What every store must do, as small checks that run on any implementation.

A check takes a factory of fresh, empty stores and the store's ``Traits``; it raises AssertionError
when the store misbehaves. ``check_store`` runs those that apply.
"""

from __future__ import annotations

import copy
import functools
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import pytest

from gradsync.errors import DistStoreError, QueueEmptyError, StoreTimeout
from gradsync.stores import PrefixStore, Store

Factory = Callable[[], Store]
Check = Callable[[Factory], None]


@dataclass(frozen=True)
class Traits:
    """What a store may lack; gradsync's own lack nothing but, on files, the queues."""

    queues: bool = True
    extended: bool = True
    exact_timeouts: bool = True
    truthful_delete: bool = True
    counts_only_keys: bool = True
    add_checks_value: bool = True
    own_timeout_per_clone: bool = True
    wakes_on_every_write: bool = True
    clone_keeps_timeout: bool = True
    clone_outlives: bool = True


CHECKS: list[tuple[Check, str]] = []


def needs(trait: str = "") -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        CHECKS.append((check, trait))
        return check

    return register


def applicable(traits: Traits) -> Iterator[Check]:
    for check, trait in CHECKS:
        if not trait or getattr(traits, trait):
            yield check


def check_store(make: Factory, traits: Traits) -> None:
    """Run every check that applies to stores of these traits."""
    for check in applicable(traits):
        check(make)


@contextmanager
def raises_after(seconds: float, error: type[Exception] = StoreTimeout) -> Iterator[None]:
    start = time.monotonic()
    with pytest.raises(error):
        yield
    elapsed = time.monotonic() - start
    # torch counts whole milliseconds, hence the small mercy below.
    assert seconds - 0.002 <= elapsed < seconds + 1.0, f"timed out after {elapsed:.3f} s"


@contextmanager
def later(delay: float, action: Callable[[], object]) -> Iterator[None]:
    timer = threading.Timer(delay, action)
    timer.start()
    try:
        yield
    finally:
        timer.join()


# -- single keys ----------------------------------------------------------------------------------


@needs()
def set_then_get_returns_bytes(make: Factory) -> None:
    store = make()
    assert store.set("text", "é") is None
    store.set("bytes", b"\x00\xff\x00")
    store.set("empty", "")
    store.set("", "empty key")
    store.set(b"as bytes", b"v")
    assert store.get("text") == "é".encode()
    assert store.get("bytes") == b"\x00\xff\x00"
    assert store.get("empty") == b""
    assert store.get("") == b"empty key"
    assert store.get("as bytes") == b"v"
    store.set("text", "over")
    assert store.get("text") == b"over"


@needs()
def large_value_survives(make: Factory) -> None:
    store, value = make(), bytes(range(256)) * 4096
    store.set("large", value)
    assert store.clone().get("large") == value


@needs()
def wrong_types_are_refused(make: Factory) -> None:
    store = make()
    calls: list[Callable[[], object]] = [
        lambda: store.set("k", 3),  # type: ignore[arg-type]
        lambda: store.set(3, "v"),  # type: ignore[arg-type]
        lambda: store.compare_set("k", 1, "v"),  # type: ignore[arg-type]
        lambda: store.add("k", 1.5),  # type: ignore[arg-type]
        lambda: store.check("ab"),
        lambda: store.wait("ab"),
    ]
    for call in calls:
        with pytest.raises(TypeError):
            call()
    assert store.list_keys() == [] or store.num_keys() == 1


@needs()
def add_counts_in_decimal_text(make: Factory) -> None:
    store = make()
    assert store.add("n", 0) == 0
    assert store.get("n") == b"0"
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.get("n") == b"-2"
    store.set("n", "41")
    assert store.add("n", 1) == 42


@needs("add_checks_value")
def add_to_text_is_a_value_error(make: Factory) -> None:
    store = make()
    store.set("n", "seven")
    with pytest.raises(ValueError, match=r"seven|stoll"):
        store.add("n", 1)
    assert store.get("n") == b"seven"
    store.set("n", "")
    assert store.add("n", 1) == 1


@needs()
def add_is_atomic_between_threads(make: Factory) -> None:
    store = make()
    stores = [store.clone() for _ in range(4)]

    def count(handle: Store) -> list[int]:
        return [handle.add("n", 1) for _ in range(50)]

    with ThreadPoolExecutor(4) as pool:
        answers = [n for part in pool.map(count, stores) for n in part]
    assert sorted(answers) == list(range(1, 201))
    assert store.get("n") == b"200"


@needs()
def compare_set_follows_its_table(make: Factory) -> None:
    store = make()
    assert store.compare_set("k", "something", "new") == b"something"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "first") == b"first"
    assert store.compare_set("k", "other", "second") == b"first"
    assert store.compare_set("k", "", "second") == b"first"
    assert store.compare_set("k", "first", "second") == b"second"
    assert store.get("k") == b"second"


@needs()
def append_concatenates(make: Factory) -> None:
    store = make()
    assert store.append("k", "a") is None
    store.append("k", b"\x00b")
    assert store.get("k") == b"a\x00b"


@needs()
def deleted_key_is_gone(make: Factory) -> None:
    store = make()
    store.set("k", "v")
    assert store.delete_key("k") is True
    assert not store.check(["k"])
    assert "k" not in store.list_keys()
    store.set_timeout(0.05)
    with pytest.raises(StoreTimeout):
        store.get("k")
    store.set("k", "again")
    assert store.get("k") == b"again"


@needs("truthful_delete")
def deleting_nothing_says_so(make: Factory) -> None:
    store = make()
    assert store.delete_key("never") is False
    store.set("k", "v")
    assert store.delete_key("k") is True
    assert store.delete_key("k") is False


# -- many keys ------------------------------------------------------------------------------------


@needs()
def check_and_wait_want_all_keys(make: Factory) -> None:
    store = make()
    store.set("a", "1")
    assert store.check([]) is True
    assert store.check(["a"]) is True
    assert store.check(["a", "b"]) is False
    store.wait([])
    store.wait(["a"])
    with pytest.raises(StoreTimeout):
        store.wait(["a", "b"], timedelta(milliseconds=20))
    store.set("b", "2")
    store.wait(["a", "b"], timedelta(milliseconds=20))


@needs()
def multi_set_and_multi_get_keep_order(make: Factory) -> None:
    store = make()
    store.multi_set(["a", "b", "c"], ["1", b"2", "3"])
    assert store.multi_get(["c", "a", "b", "a"]) == [b"3", b"1", b"2", b"1"]
    assert store.multi_get([]) == []
    store.multi_set([], [])
    with pytest.raises(ValueError, match="as many values as keys"):
        store.multi_set(["a", "b"], ["1"])
    store.set_timeout(0.02)
    with pytest.raises(StoreTimeout):
        store.multi_get(["a", "missing"])


@needs()
def keys_are_listed(make: Factory) -> None:
    store = make()
    before = store.num_keys()
    store.multi_set(["a", "b/c", "/d"], ["1", "2", "3"])
    store.set("a", "again")
    assert store.num_keys() == before + 3
    assert {"a", "b/c", "/d"} <= set(store.list_keys())


@needs("counts_only_keys")
def nothing_but_keys_is_listed(make: Factory) -> None:
    store = make()
    store.clone()
    assert store.num_keys() == 0
    assert store.list_keys() == []
    store.set("a", "1")
    assert store.list_keys() == ["a"]


@needs("extended")
def extended_api_is_announced(make: Factory) -> None:
    assert make().has_extended_api() is True


# -- waiting --------------------------------------------------------------------------------------


def _assert_woken(make: Factory, *ways: Callable[[Store, str], object]) -> None:
    store = make()
    other = store.clone()
    store.set_timeout(3.0)
    for number, way in enumerate(ways):
        key, start = f"woken{number}", time.monotonic()
        with later(0.02, functools.partial(way, other, key)):
            assert store.get(key) == b"1"
        assert 0.015 < time.monotonic() - start < 1.0, f"way {number} woke nobody"


@needs()
def get_is_woken_by_set_and_compare_set(make: Factory) -> None:
    _assert_woken(
        make,
        lambda other, key: other.set(key, "1"),
        lambda other, key: other.compare_set(key, "", "1"),
    )


@needs("wakes_on_every_write")
def get_is_woken_by_every_other_write(make: Factory) -> None:
    _assert_woken(
        make,
        lambda other, key: other.add(key, 1),
        lambda other, key: other.append(key, "1"),
        lambda other, key: other.multi_set([key], ["1"]),
    )


@needs()
def wait_is_woken_by_the_last_key(make: Factory) -> None:
    store = make()
    other = store.clone()
    with later(0.01, lambda: other.set("a", "1")), later(0.04, lambda: other.set("b", "1")):
        store.wait(["a", "b"], 10.0)
    assert store.check(["a", "b"])


@needs("exact_timeouts")
def timeouts_are_exact(make: Factory) -> None:
    store = make()
    store.set_timeout(timedelta(milliseconds=100))
    with raises_after(0.1):
        store.get("never")
    with raises_after(0.1):
        store.multi_get(["never"])
    with raises_after(0.05):
        store.wait(["never"], timedelta(milliseconds=50))
    with raises_after(0.05):
        store.barrier("meet", 2, timedelta(milliseconds=50))
    assert store.timeout == timedelta(milliseconds=100)
    store.set("still", "usable")
    assert store.get("still") == b"usable"


@needs()
def timeout_names_the_missing_keys(make: Factory) -> None:
    store = make()
    store.set("there", "1")
    with pytest.raises(StoreTimeout, match="absent") as caught:
        store.wait(["there", "absent"], 0.02)
    assert isinstance(caught.value, (RuntimeError, TimeoutError))
    assert isinstance(caught.value, DistStoreError)


@needs()
def timeout_is_five_minutes_and_read_only(make: Factory) -> None:
    store = make()
    assert store.timeout == timedelta(seconds=300)
    store.set_timeout(timedelta(seconds=7))
    assert store.timeout == timedelta(seconds=7)
    store.set_timeout(1.5)
    assert store.timeout == timedelta(seconds=1.5)
    with pytest.raises(AttributeError):
        store.timeout = timedelta(seconds=1)  # type: ignore[misc]
    with pytest.raises(ValueError, match="negative"):
        store.set_timeout(-1.0)
    with pytest.raises(TypeError):
        store.set_timeout("1")  # type: ignore[arg-type]


@needs()
def zero_timeout_waits_for_ever(make: Factory) -> None:
    store = make()
    other = store.clone()
    store.set_timeout(0.02)
    with later(0.15, lambda: other.set("a", "1")):
        store.wait(["a"], timedelta(0))
    store.set_timeout(0)
    assert store.timeout == timedelta(0)
    with later(0.15, lambda: other.set("b", "2")):
        assert store.get("b") == b"2"


@needs()
def barrier_lets_all_go_together(make: Factory) -> None:
    store = make()
    stores = [store.clone() for _ in range(3)]
    arrived: list[int] = []

    def meet(number: int) -> int:
        time.sleep(0.02 * number)
        arrived.append(number)
        stores[number].barrier("meet", 3, 10.0)
        return len(arrived)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(meet, range(3))) == [3, 3, 3]
    store.barrier("alone", 1)
    with pytest.raises(ValueError, match="at least 1"):
        store.barrier("none", 0)


# -- queues ---------------------------------------------------------------------------------------


@needs("queues")
def queue_is_first_in_first_out(make: Factory) -> None:
    store = make()
    other = store.clone()
    assert store.queue_len("q") == 0
    for value in ("1", b"2", "3"):
        other.queue_push("q", value)
    assert store.queue_len("q") == 3
    assert [store.queue_pop("q"), other.queue_pop("q"), store.queue_pop("q", False)] == [
        b"1",
        b"2",
        b"3",
    ]
    assert store.queue_len("q") == 0
    with pytest.raises(QueueEmptyError):
        store.queue_pop("q", block=False)
    store.set_timeout(0.05)
    with raises_after(0.05):
        store.queue_pop("q")


@needs("queues")
def queue_is_seen_by_check_but_not_listed(make: Factory) -> None:
    store = make()
    before = store.num_keys()
    store.queue_push("q", "1")
    assert store.check(["q"])
    store.wait(["q"], 1.0)
    assert store.num_keys() == before
    assert "q" not in store.list_keys()
    assert store.delete_key("q") is False
    assert store.queue_pop("q") == b"1"
    assert not store.check(["q"])


@needs("queues")
def blocked_pop_is_woken_once_per_push(make: Factory) -> None:
    store = make()
    stores = [store.clone() for _ in range(3)]
    for handle in stores:
        handle.set_timeout(10.0)
    with ThreadPoolExecutor(3) as pool:
        results = [pool.submit(handle.queue_pop, "q") for handle in stores]
        for value in ("a", "b", "c"):
            store.queue_push("q", value)
        assert sorted(result.result() for result in results) == [b"a", b"b", b"c"]


# -- whole store ----------------------------------------------------------------------------------


@needs()
def clone_shares_data(make: Factory) -> None:
    store = make()
    other = store.clone()
    other.set("k", "v")
    assert store.get("k") == b"v"
    assert other.add("n", 1) + store.add("n", 1) == 3


@needs("clone_outlives")
def clone_outlives_the_first_handle(make: Factory) -> None:
    store = make()
    store.set("k", "v")
    other = store.clone()
    del store
    assert other.get("k") == b"v"


@needs("clone_keeps_timeout")
def clone_starts_with_the_same_timeout(make: Factory) -> None:
    store = make()
    store.set_timeout(3.0)
    assert store.clone().timeout == timedelta(seconds=3)


@needs("own_timeout_per_clone")
def clone_has_its_own_timeout(make: Factory) -> None:
    store = make()
    store.clone().set_timeout(3.0)
    assert store.timeout == timedelta(seconds=300)


@needs()
def blocked_get_leaves_a_clone_free(make: Factory) -> None:
    store = make()
    other = store.clone()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "k")
        time.sleep(0.02)
        assert other.add("n", 1) == 1
        other.set("k", "v")
        assert waiting.result(10) == b"v"


@needs()
def store_is_not_copied_or_pickled(make: Factory) -> None:
    store = make()
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            attempt(store)


@needs()
def prefixes_do_not_meet(make: Factory) -> None:
    store = make()
    left, right = PrefixStore("l", store), PrefixStore("r", store)
    left.set("k", "left")
    right.set("k", "right")
    assert (left.get("k"), right.get("k")) == (b"left", b"right")
    assert left.list_keys() == ["k"]
    assert left.delete_key("k")
    assert right.check(["k"])


@needs()
def independent_stores_share_nothing(make: Factory) -> None:
    first, second = make(), make()
    first.set("k", "v")
    assert not second.check(["k"])
