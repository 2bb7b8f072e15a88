"""TCPStore and UnixStore: how they are made, how masters and workers find each other, their end."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from gradsync.errors import DistStoreError, StoreConnectionError, UsageError
from gradsync.stores.tcp import TCPStore
from gradsync.stores.unix import UnixStore


def test_properties_are_torchs() -> None:
    master = TCPStore("localhost", 0, 1, True)
    assert master.host == "localhost"
    assert master.port > 0
    assert master.libuvBackend is True
    assert TCPStore("localhost", master.port, use_libuv=False).libuvBackend is False
    assert master.timeout == timedelta(seconds=300)
    assert str(master.port) in repr(master)
    with pytest.raises(AttributeError):
        master.timeout = timedelta(seconds=1)  # type: ignore[misc]
    # The internal counter is a key like any other for num_keys, and hidden from list_keys.
    assert master.num_keys() == 1
    assert master.list_keys() == []


def test_world_size_zero_is_an_error() -> None:
    with pytest.raises(ValueError, match="world_size"):
        TCPStore("127.0.0.1", 0, 0, True)


def test_master_waits_for_all_workers() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ThreadPoolExecutor() as pool:
        workers = [pool.submit(TCPStore, "127.0.0.1", port, 3) for _ in range(2)]
        master = TCPStore("127.0.0.1", port, 3, True, timedelta(seconds=30))
        assert all(worker.result(30).port == port for worker in workers)
    assert master.num_keys() == 1


def test_master_that_waits_in_vain_says_how_many_joined() -> None:
    with pytest.raises(DistStoreError, match="1 of 3 joined"):
        TCPStore("127.0.0.1", 0, 3, True, timeout=timedelta(milliseconds=100))


def test_client_waits_for_a_master_that_starts_later() -> None:
    name = f"test-{os.getpid()}-{time.monotonic_ns()}"
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(UnixStore, name, timeout=timedelta(seconds=30))
        time.sleep(0.05)
        master = UnixStore(name, is_master=True)
        waiting.result(5).set("k", "v")
        assert master.get("k") == b"v"


def test_nobody_there_is_an_error_that_names_the_address() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # bound, but nobody listens
        port = probe.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(StoreConnectionError, match=f"127.0.0.1:{port}.*nobody listens"):
            TCPStore("127.0.0.1", port, timeout=timedelta(milliseconds=200))
        assert time.monotonic() - began < 1.0


def test_unknown_host_is_an_error() -> None:
    with pytest.raises(StoreConnectionError, match=r"cannot resolve 'no\.such\.host\.invalid'"):
        TCPStore("no.such.host.invalid", 1, timeout=timedelta(milliseconds=50))


def test_multi_tenant_masters_of_one_process_share_the_server() -> None:
    first = TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True)
    second = TCPStore("127.0.0.1", first.port, is_master=True, multi_tenant=True)
    first.set("k", "v")
    assert second.get("k") == b"v"
    with pytest.raises(StoreConnectionError, match="EADDRINUSE"):
        TCPStore("127.0.0.1", first.port, is_master=True)
    del first
    gc.collect()
    assert second.get("k") == b"v"


def test_master_takes_over_a_listening_socket() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with pytest.raises(DistStoreError, match="port"):
        TCPStore("127.0.0.1", port + 1, is_master=True, master_listen_fd=listener.fileno())
    assert os.fstat(listener.fileno())  # a store that could not start did not take it
    master = TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=listener.detach())
    assert TCPStore("127.0.0.1", port).add("n", 1) == 1
    assert master.port == port


def test_descriptor_that_does_not_listen_is_refused() -> None:
    with socket.socket() as idle, pytest.raises(UsageError, match="does not listen"):
        TCPStore("127.0.0.1", 0, is_master=True, master_listen_fd=idle.fileno())


# -- lifetime --------------------------------------------------------------------------------------


def test_server_ends_with_the_last_reference() -> None:
    master = TCPStore("127.0.0.1", 0, is_master=True)
    worker = master.clone()
    port = master.port
    del master
    gc.collect()
    with pytest.raises(StoreConnectionError):
        worker.get("k")
    TCPStore("127.0.0.1", port, is_master=True)  # the port is free again


@pytest.mark.parametrize("ending", ["", "sys.exit(0)", "import gc; gc.collect()", "del store"])
def test_interpreter_ends_cleanly_with_a_store_and_a_thread_that_waits(ending: str) -> None:
    code = (
        "import sys, threading\n"
        "from gradsync.stores.tcp import TCPStore\n"
        "store = TCPStore('127.0.0.1', 0, is_master=True)\n"
        "clone = store.clone()\n"
        "threading.Thread(target=clone.get, args=('never',), daemon=True).start()\n"
        "threading.Thread(target=store.get, args=('never',), daemon=True).start()\n"
        "store.add('n', 1); clone.add('n', 1)\n"
        f"{ending}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
