"""Checks of everything that waits: timeouts, wake-ups, barriers, queues, clones."""

from __future__ import annotations

import copy
import functools
import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from gradsync.errors import DistStoreError, QueueEmptyError, StoreTimeout
from gradsync.stores import PrefixStore, Store
from gradsync.testing.conformance.store_traits import Factory, later, needs, raises_after

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
    assert other.queue_len("q") == 3  # pushes need no answer: this one says that they have arrived
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


@needs("one_pop_per_push")
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
    store.set_timeout(30.0)
    assert store.clone().timeout == timedelta(seconds=30)


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
