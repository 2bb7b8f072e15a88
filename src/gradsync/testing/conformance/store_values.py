"""Checks of keys and values: what is stored is what is read, and every write is atomic."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from gradsync.errors import StoreTimeout
from gradsync.stores import Store
from gradsync.testing.conformance.store_traits import Factory, needs

# -- single keys ----------------------------------------------------------------------------------


@needs()
def set_then_get_returns_bytes(make: Factory) -> None:
    store = make()
    store.set("text", "é")
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
    store.append("k", "a")
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
