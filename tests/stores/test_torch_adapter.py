"""The adapters: torch's process groups run on our stores, errors cross over, nothing dies early."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from gradsync.errors import (
    DistNetworkError,
    DistStoreError,
    QueueEmptyError,
    StoreConnectionError,
    StoreTimeout,
)
from gradsync.stores import FileStore, HashStore, PrefixStore, Store, from_torch, to_torch
from ranks import ranks


def test_importing_the_stores_leaves_torch_out() -> None:
    code = "import sys, gradsync.stores; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_gloo_of_two_processes_runs_on_a_file_store(tmp_path: Path) -> None:
    code = """
    import warnings; warnings.simplefilter("ignore")
    import torch, torch.distributed as dist
    rank = int(sys.argv[2])
    # No name holds the adapter: torch must be able to rely on it all the same.
    store = PrefixStore("job", FileStore(sys.argv[1], 2))
    dist.init_process_group("gloo", store=to_torch(store), rank=rank, world_size=2)
    tensor = torch.tensor([1.0, 10.0]) * (rank + 1)
    dist.all_reduce(tensor)
    names = [None, None]
    dist.all_gather_object(names, f"rank{rank}")
    dist.barrier()
    later = dist.new_group([0, 1])
    more = torch.ones(1); dist.all_reduce(more, group=later)
    dist.destroy_process_group()
    say(tensor.tolist(), names, more.item())
    """
    path = tmp_path / "store"
    with ranks(2, code, path) as both:
        for rank in both:
            assert rank.finish() == "[3.0, 30.0] ['rank0', 'rank1'] 2.0"
    assert not path.exists()


def test_torchs_self_check_passes() -> None:
    from torch._C._distributed_c10d import _test_python_store

    _test_python_store(to_torch(HashStore()))


# Reached through torch's own PrefixStore, so that every call crosses into C++ and back.
def test_every_call_from_torchs_side_arrives() -> None:
    ours = HashStore()
    theirs = dist.PrefixStore("p", to_torch(ours))
    theirs.set("k", "v")
    theirs.set("b", b"\x00\xff")
    assert theirs.get("k") == b"v"
    assert ours.get("p/b") == b"\x00\xff"
    assert theirs.add("n", 3) == 3
    assert theirs.compare_set("k", "v", "w") == b"w"
    theirs.append("k", "x")
    assert theirs.multi_get(["k", "n"]) == [b"wx", b"3"]
    theirs.multi_set(["c", "d"], ["1", "2"])
    assert theirs.check(["c", "d"])
    theirs.wait(["c"])
    theirs.wait(["c"], timedelta(seconds=1))
    assert theirs.num_keys() == ours.num_keys() == 5
    assert theirs.delete_key("k") is True
    assert theirs.delete_key("k") is False
    assert theirs.has_extended_api() is True
    theirs.barrier("meet", 1)
    assert not ours.check(["p/k"])


def test_every_call_from_python_arrives() -> None:
    ours = HashStore()
    theirs = to_torch(ours)
    assert isinstance(theirs, dist.Store)
    theirs.queue_push("q", "1")
    assert theirs.queue_len("q") == 1
    assert theirs.queue_pop("q") == b"1"
    theirs.set("k", "v")
    assert theirs.list_keys() == ["k"]
    assert theirs.num_keys() == 1
    assert theirs.clone().get("k") == b"v"


def test_adapter_outlives_its_python_names() -> None:
    theirs = dist.PrefixStore("p", to_torch(HashStore()))
    twin = theirs.clone()
    gc.collect()
    theirs.set("k", "v")
    assert twin.get("k") == b"v"


def test_timeouts_agree_whoever_sets_them() -> None:
    ours = HashStore()
    theirs = to_torch(ours)
    beyond = dist.PrefixStore("p", theirs)
    assert theirs.timeout == beyond.timeout == timedelta(seconds=300)
    beyond.set_timeout(timedelta(milliseconds=40))
    with pytest.raises(dist.DistStoreError):
        beyond.get("never")
    assert ours.timeout == theirs.timeout == timedelta(milliseconds=40)
    ours.set_timeout(0.02)
    with pytest.raises(dist.DistStoreError, match=r"0\.02 s"):
        beyond.get("never")
    assert beyond.timeout == timedelta(milliseconds=20)
    theirs.set_timeout(timedelta(seconds=7))
    assert ours.timeout == beyond.timeout == timedelta(seconds=7)


def test_round_trips_unwrap() -> None:
    ours, theirs = HashStore(), dist.HashStore()
    assert from_torch(to_torch(ours)) is ours
    assert to_torch(from_torch(theirs)) is theirs
    assert to_torch(ours) is to_torch(ours)
    with pytest.raises(TypeError, match="store of gradsync"):
        to_torch(theirs)
    with pytest.raises(TypeError, match="store of torch"):
        from_torch(ours)


class Failing(Store):
    """Raises what it is told."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def get(self, key: str | bytes) -> bytes:
        raise self.error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (StoreTimeout("late"), dist.DistStoreError),
        (DistStoreError("odd"), dist.DistStoreError),
        (QueueEmptyError("none"), dist.QueueEmptyError),  # type: ignore[attr-defined]
        (StoreConnectionError("gone"), dist.DistNetworkError),
        (DistNetworkError("net"), dist.DistNetworkError),
        (ValueError("value"), ValueError),
        (NotImplementedError("no"), NotImplementedError),
    ],
)
def test_our_errors_become_torchs(error: Exception, expected: type[Exception]) -> None:
    adapter = to_torch(Failing(error))
    for store in (adapter, dist.PrefixStore("p", adapter)):
        with pytest.raises(expected) as caught:
            store.get("k")
        assert type(caught.value) is expected
        assert str(error) in str(caught.value)


def test_operation_that_our_store_lacks_is_not_implemented(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError):
        to_torch(FileStore(tmp_path / "store", 1)).queue_push("q", "v")


@pytest.mark.parametrize("make", [dist.HashStore, None], ids=["hash", "file"])
def test_torchs_errors_become_ours(make: Callable[[], object] | None, tmp_path: Path) -> None:
    theirs = make() if make else dist.FileStore(str(tmp_path / "store"), 1)
    store = from_torch(theirs)
    with pytest.raises(StoreTimeout, match="'missing'"):
        store.wait(["missing"], 0.01)
    with pytest.raises(ValueError, match="stoll"):
        store.set("k", "text") or store.add("k", 1)
    if make:
        with pytest.raises(QueueEmptyError):
            store.queue_pop("q", block=False)
    else:
        with pytest.raises(NotImplementedError):
            store.queue_pop("q", block=False)


def test_waiting_in_vain_at_a_torch_server_leaves_stderr_alone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    # Ranks that wait for a late one look up now and then; torch would warn of sockets each time.
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = from_torch(dist.PrefixStore("inner", dist.PrefixStore("outer", server)))
    store.set("there", "v")
    store.wait(["there"], 1)
    store.wait([], 1)
    with pytest.raises(StoreTimeout, match="'missing'"):
        store.wait(["there", "missing"], 0.05)
    assert capfd.readouterr().err == ""


def test_lost_torch_server_is_a_connection_error() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = from_torch(dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=5)))
    client.set("k", "v")
    del server
    gc.collect()
    with pytest.raises(StoreConnectionError):
        client.get("k")


def test_torch_process_group_runs_over_our_own_view_of_its_store() -> None:
    # gradsync wraps what torch gave, torch gets it back: one prefix in between.
    theirs = dist.HashStore()
    view = to_torch(PrefixStore("a", from_torch(theirs)))
    view.set("k", "v")
    assert theirs.get("a/k") == b"v"
