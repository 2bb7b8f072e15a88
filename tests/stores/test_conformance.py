"""Every store, and a PrefixStore over each, does what every store must do."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from gradsync.stores import FileStore, HashStore, PrefixStore, Store, from_torch
from gradsync.stores.tcp import TCPStore
from gradsync.stores.unix import UnixStore
from gradsync.testing.conformance import StoreTraits, check_store, store_checks

_numbers = itertools.count()


def _torch_tcp(_: Path) -> Store:
    return from_torch(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))


def _own_tcp(_: Path) -> Store:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _own_unix(_: Path) -> Store:
    # The names are the machine's, and these tests run in several processes.
    return UnixStore(f"conformance-{os.getpid()}-{next(_numbers)}", is_master=True)


STORES: dict[str, tuple[Callable[[Path], Store], StoreTraits]] = {
    "hash": (lambda _: HashStore(), StoreTraits()),
    "file": (
        lambda folder: FileStore(folder / f"store{next(_numbers)}", world_size=1),
        StoreTraits(queues=False, one_pop_per_push=False, extended=False),
    ),
    "torch-hash": (
        lambda _: from_torch(dist.HashStore()),
        StoreTraits(own_timeout_per_clone=False, wakes_on_every_write=False),
    ),
    "torch-tcp": (
        _torch_tcp,
        # A woken popper of torch's that finds the value gone says "empty" instead of waiting on.
        StoreTraits(add_checks_value=False, clone_outlives=False, one_pop_per_push=False),
    ),
    "torch-file": (
        lambda folder: from_torch(dist.FileStore(str(folder / f"store{next(_numbers)}"), 1)),
        StoreTraits(
            queues=False,
            one_pop_per_push=False,
            extended=False,
            exact_timeouts=False,
            truthful_delete=False,
            counts_only_keys=False,
            clone_keeps_timeout=False,
        ),
    ),
}
STORES |= {
    "tcp": (_own_tcp, StoreTraits(clone_outlives=False)),
    "unix": (_own_unix, StoreTraits(clone_outlives=False)),
}

STORES |= {
    f"prefix-{name}": (lambda folder, make=make: PrefixStore("pre", make(folder)), traits)
    for name, (make, traits) in STORES.items()
    if not name.startswith("torch")
}


@pytest.fixture
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    build, _ = STORES[request.param]
    return lambda: build(tmp_path)


@pytest.mark.parametrize(
    ("make", "check"),
    [
        pytest.param(name, check, id=f"{name}-{check.__name__}")
        for name, (_, traits) in STORES.items()
        for check in store_checks(traits)
    ],
    indirect=["make"],
)
def test_store_conforms(make: Callable[[], Store], check: Callable[..., None]) -> None:
    check(make)


def test_check_store_says_which_check_a_bad_store_fails() -> None:
    class Miscounting(HashStore):
        def num_keys(self) -> int:
            return super().num_keys() + 1

    with pytest.raises(AssertionError, match=r"the store fails \w*keys"):
        check_store(Miscounting)
    check_store(HashStore)


@pytest.mark.parametrize("operation", ["queue_push", "queue_pop", "queue_len"])
def test_file_store_has_no_queues(tmp_path: Path, operation: str) -> None:
    store = FileStore(tmp_path / "store")
    arguments = ("q", "v") if operation == "queue_push" else ("q",)
    with pytest.raises(NotImplementedError, match=f"FileStore does not support {operation}"):
        getattr(store, operation)(*arguments)
    assert store.has_extended_api() is False
