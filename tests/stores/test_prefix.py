"""PrefixStore: names, nesting, and delegation of everything else."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from gradsync.stores import FakeStore, HashStore, PrefixStore, Store


def test_nested_prefixes_compose_outermost_last() -> None:
    inner = HashStore()
    PrefixStore("a", PrefixStore("b", inner)).set("k", "v")
    assert inner.list_keys() == ["b/a/k"]


def test_layers_are_reachable() -> None:
    inner = HashStore()
    middle = PrefixStore("b", inner)
    outer = PrefixStore("a", middle)
    assert outer.underlying_store is middle
    assert outer._underlying_non_prefix_store is inner


def test_list_strips_only_its_own_prefix() -> None:
    inner = HashStore()
    store = PrefixStore("a", inner)
    PrefixStore("a", store).set("k", "1")
    store.set("/k", "2")
    PrefixStore("ab", inner).set("k", "3")
    inner.set("a", "4")
    assert sorted(store.list_keys()) == ["/k", "a/k"]
    assert store.num_keys() == inner.num_keys() == 4


def test_timeout_is_the_wrapped_stores() -> None:
    inner = HashStore()
    store = PrefixStore("a", PrefixStore("b", inner))
    store.set_timeout(timedelta(seconds=3))
    assert inner.timeout == timedelta(seconds=3)
    inner.set_timeout(4.0)
    assert store.timeout == timedelta(seconds=4)


def test_clone_wraps_a_clone() -> None:
    inner = HashStore()
    store = PrefixStore("a", inner)
    twin = store.clone()
    assert twin.underlying_store is not inner
    twin.set("k", "v")
    assert store.get("k") == b"v"


def test_bytes_and_empty_prefixes_work() -> None:
    inner = HashStore()
    PrefixStore(b"b", inner).set("k", "1")
    PrefixStore("", inner).set("k", "2")
    assert sorted(inner.list_keys()) == ["/k", "b/k"]


def test_torch_store_is_refused_with_advice() -> None:
    with pytest.raises(TypeError, match="from_torch"):
        PrefixStore("a", dist.HashStore())  # type: ignore[arg-type]


class Recorder(Store):
    """Writes down every call that reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []


for _name in [n for n, f in vars(Store).items() if callable(f) and not n.startswith("_")]:

    def _record(self: Recorder, *args: object, name: str = _name) -> Any:
        self.calls.append((name, *args))
        return self if name == "clone" else []

    setattr(Recorder, _name, _record)


ARGUMENTS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "set": (("k", "v"), ("p/k", "v")),
    "get": (("k",), ("p/k",)),
    "add": (("k", 3), ("p/k", 3)),
    "compare_set": (("k", "a", "b"), ("p/k", "a", "b")),
    "append": (("k", "v"), ("p/k", "v")),
    "delete_key": (("k",), ("p/k",)),
    "check": ((["k", b"l"],), (["p/k", "p/l"],)),
    "wait": ((["k"], 3.0), (["p/k"], 3.0)),
    "multi_get": ((["k"],), (["p/k"],)),
    "get_within": ((["k"], 3.0), (["p/k"], 3.0)),
    "multi_set": ((["k"], ["v"]), (["p/k"], ["v"])),
    "num_keys": ((), ()),
    "list_keys": ((), ()),
    "queue_push": (("k", "v"), ("p/k", "v")),
    "queue_pop": (("k", False), ("p/k", False)),
    "queue_len": (("k",), ("p/k",)),
    "barrier": (("k", 2, 3.0), ("p/k", 2, 3.0)),
    "clone": ((), ()),
    "has_extended_api": ((), ()),
    "set_timeout": ((3.0,), (3.0,)),
}


def test_every_operation_of_a_store_is_listed_here() -> None:
    public = {n for n, f in vars(Store).items() if callable(f) and not n.startswith("_")}
    assert public == set(ARGUMENTS)


@pytest.mark.parametrize("operation", ARGUMENTS)
def test_operation_is_delegated_as_itself(operation: str) -> None:
    given, expected = ARGUMENTS[operation]
    inner = Recorder()
    getattr(PrefixStore("p", inner), operation)(*given)
    assert inner.calls == [(operation, *expected)]


@pytest.mark.parametrize("operation", ARGUMENTS)
def test_fake_store_takes_everything_and_never_waits(operation: str) -> None:
    store = FakeStore()
    getattr(store, operation)(*ARGUMENTS[operation][0])
    assert store.list_keys() == []
    assert store.get("anything") == b""
    assert store.multi_get(["a", "b"]) == [b"", b""]
    assert store.compare_set("k", "a", "b") == b"b"
    assert store.add("n", 3) == 3
    with pytest.raises(TypeError):
        store.set("k", 3)  # type: ignore[arg-type]
