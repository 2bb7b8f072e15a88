"""Every store, and a PrefixStore over each, does what every store must do."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from conformance import CHECKS, Check, Factory, Traits

from gradsync.stores import FileStore, HashStore, PrefixStore, Store, from_torch

_numbers = itertools.count()


def _torch_tcp(_: Path) -> Store:
    return from_torch(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))


def _own_tcp(_: Path) -> Store:
    from gradsync.stores.tcp import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _own_unix(_: Path) -> Store:
    from gradsync.stores.unix import UnixStore

    return UnixStore(f"conformance-{next(_numbers)}", is_master=True)


STORES: dict[str, tuple[Callable[[Path], Store], Traits]] = {
    "hash": (lambda _: HashStore(), Traits()),
    "file": (
        lambda folder: FileStore(folder / f"store{next(_numbers)}", world_size=1),
        Traits(queues=False, one_pop_per_push=False, extended=False),
    ),
    "torch-hash": (
        lambda _: from_torch(dist.HashStore()),
        Traits(own_timeout_per_clone=False, wakes_on_every_write=False),
    ),
    "torch-tcp": (
        _torch_tcp,
        # A woken popper of torch's that finds the value gone says "empty" instead of waiting on.
        Traits(add_checks_value=False, clone_outlives=False, one_pop_per_push=False),
    ),
    "torch-file": (
        lambda folder: from_torch(dist.FileStore(str(folder / f"store{next(_numbers)}"), 1)),
        Traits(
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
if importlib.util.find_spec("gradsync.stores.tcp"):
    STORES |= {
        "tcp": (_own_tcp, Traits(clone_outlives=False)),
        "unix": (_own_unix, Traits(clone_outlives=False)),
    }

STORES |= {
    f"prefix-{name}": (lambda folder, make=make: PrefixStore("pre", make(folder)), traits)
    for name, (make, traits) in STORES.items()
    if not name.startswith("torch")
}


@pytest.fixture
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Factory:
    build, _ = STORES[request.param]
    return lambda: build(tmp_path)


@pytest.mark.parametrize(
    ("make", "check"),
    [
        pytest.param(name, check, id=f"{name}-{check.__name__}")
        for name, (_, traits) in STORES.items()
        for check, trait in CHECKS
        if not trait or getattr(traits, trait)
    ],
    indirect=["make"],
)
def test_store_conforms(make: Factory, check: Check) -> None:
    check(make)


@pytest.mark.parametrize("operation", ["queue_push", "queue_pop", "queue_len"])
def test_file_store_has_no_queues(tmp_path: Path, operation: str) -> None:
    store = FileStore(tmp_path / "store")
    arguments = ("q", "v") if operation == "queue_push" else ("q",)
    with pytest.raises(NotImplementedError, match=f"FileStore does not support {operation}"):
        getattr(store, operation)(*arguments)
    assert store.has_extended_api() is False
