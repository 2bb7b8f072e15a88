"""What users see when a server dies, a connection breaks, a port is taken, a process forks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from gradsync.errors import (
    DistNetworkError,
    DistStoreError,
    StoreConnectionError,
    StoreTimeout,
)
from gradsync.stores.port_owner import port_owner
from gradsync.stores.socket_store import SocketStore
from gradsync.stores.tcp import TCPStore
from gradsync.stores.unix import UnixStore

SERVER = """
import sys
from gradsync.stores.tcp import TCPStore
from gradsync.stores.unix import UnixStore
kind, where = sys.argv[1:]
if kind == "tcp":
    store = TCPStore("127.0.0.1", int(where), is_master=True)
    print(store.port, flush=True)
else:
    store = UnixStore(where, is_master=True)
    print(where, flush=True)
sys.stdin.read()
"""


class _Server:
    """A master in a process of its own."""

    def __init__(self, kind: str, where: str) -> None:
        self.kind = kind
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, kind, where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.where = self.process.stdout.readline().strip()

    def connect(self, timeout: timedelta = timedelta(seconds=60)) -> SocketStore:
        if self.kind == "tcp":
            return TCPStore("127.0.0.1", int(self.where), timeout=timeout)
        return UnixStore(self.where, timeout=timeout)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(params=["tcp", "unix"])
def server(request: pytest.FixtureRequest) -> Iterator[_Server]:
    where = "0" if request.param == "tcp" else f"failing-{os.getpid()}-{time.monotonic_ns()}"
    running = _Server(request.param, where)
    yield running
    running.close()


# -- the server goes -------------------------------------------------------------------------------


def test_killed_server_fails_every_waiting_thread_at_once(server: _Server) -> None:
    store = server.connect()
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(store.get, f"never{i}") for i in range(3)]
        waiting.append(pool.submit(store.wait, ["never"], timedelta(0)))
        waiting.append(pool.submit(store.queue_pop, "never"))
        store.add("n", 1)
        killed_at = time.monotonic()
        server.process.kill()
        for future in waiting:
            with pytest.raises(DistStoreError) as caught:
                future.result(10)
            assert isinstance(caught.value, DistNetworkError)
            assert not isinstance(caught.value, StoreTimeout)
        assert time.monotonic() - killed_at < 2
    for call in (lambda: store.add("n", 1), lambda: store.set("k", "v"), store.num_keys):
        with pytest.raises(StoreConnectionError, match="lost"):
            call()


def test_restarted_server_is_not_taken_for_the_old_one() -> None:
    first = _Server("unix", f"restarted-{os.getpid()}")
    store = first.connect()
    store.set("k", "v")
    assert store.get("k") == b"v"
    first.close()
    second = _Server("unix", first.where)
    try:
        with pytest.raises(StoreConnectionError, match="restarted, its data is gone"):
            store.get("k")
        assert not second.connect().check(["k"])
    finally:
        second.close()


def test_stopped_server_is_a_timeout_and_not_a_hang(server: _Server) -> None:
    store = server.connect()
    store.set("k", "v")
    store.set_timeout(timedelta(milliseconds=100))
    server.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, server.process.pid, os.WSTOPPED)  # until it has really stopped
    try:
        for call in (lambda: store.get("k"), lambda: store.add("n", 1)):
            began = time.monotonic()
            with pytest.raises(StoreTimeout, match="does not answer"):
                call()
            assert time.monotonic() - began < 5
    finally:
        server.process.send_signal(signal.SIGCONT)
    store.set_timeout(timedelta(seconds=60))
    assert store.get("k") == b"v"


def test_master_that_ends_frees_its_port_though_its_forked_child_lives_on() -> None:
    master = TCPStore("127.0.0.1", 0, is_master=True)
    worker = master.clone()
    worker.add("n", 1)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)  # until the parent is done
        os._exit(0)
    os.close(read_end)
    port = master.port
    del master
    with pytest.raises(StoreConnectionError):
        worker.get("k")
    TCPStore("127.0.0.1", port, is_master=True)
    os.close(write_end)
    assert os.waitpid(child, 0)[1] == 0


# -- the connection goes ---------------------------------------------------------------------------


def test_cut_connection_is_mended_and_adds_count_exactly_once(server: _Server) -> None:
    store = server.connect()
    for expected in range(1, 201):
        if expected % 3 == 0:
            store._client.cut()
        assert store.add("n", 1) == expected


def test_threads_with_a_connection_that_is_cut_all_the_time_count_exactly(server: _Server) -> None:
    store = server.connect()
    stop = threading.Event()

    def sabotage() -> None:
        while not stop.wait(0.002):
            store._client.cut()

    def count() -> None:
        for _ in range(300):
            store.add("n", 1)
            store.append("log", "x")
            store.queue_push("q", "x")
            assert store.queue_pop("q") == b"x"

    saboteur = threading.Thread(target=sabotage)
    saboteur.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(count) for _ in range(4)]:
                future.result(60)
    finally:
        stop.set()
        saboteur.join()
    assert store.add("n", 0) == len(store.get("log")) == 1200


def test_waiting_thread_survives_a_cut_connection(server: _Server) -> None:
    store = server.connect()
    other = server.connect()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(store.get, "late")
        popping = pool.submit(store.queue_pop, "q")
        store.add("n", 1)
        store._client.cut()
        other.set("late", "v")
        other.queue_push("q", "x")
        assert waiting.result(10) == b"v"
        assert popping.result(10) == b"x"
    assert other.queue_len("q") == 0


def test_sets_before_a_cut_arrive(server: _Server) -> None:
    store = server.connect()
    for i in range(100):
        store.set(f"k{i}", str(i))
        if i % 10 == 5:
            store._client.cut()
    assert store.multi_get([f"k{i}" for i in range(100)]) == [str(i).encode() for i in range(100)]


def test_barrier_of_a_member_that_died_does_not_open(server: _Server) -> None:
    store = server.connect()
    dying = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\n"
            "from gradsync.stores.tcp import TCPStore\n"
            "from gradsync.stores.unix import UnixStore\n"
            "kind, where = sys.argv[1:]\n"
            "store = TCPStore('127.0.0.1', int(where)) if kind == 'tcp' else UnixStore(where)\n"
            "store.add('started', 1)\n"
            "store.barrier('b', 2)\n",
            server.kind,
            server.where,
        ]
    )
    store.wait(["started"])
    dying.kill()
    dying.wait()
    with pytest.raises(StoreTimeout, match="1 of 2"):
        store.barrier("b", 2, timedelta(milliseconds=300))


# -- the port is taken -----------------------------------------------------------------------------


def test_taken_port_names_the_process_that_holds_it() -> None:
    holder = _Server("tcp", "0")
    try:
        port = int(holder.where)
        with pytest.raises(DistNetworkError) as caught:
            TCPStore("127.0.0.1", port, is_master=True)
        text = str(caught.value)
        assert "EADDRINUSE" in text
        assert str(port) in text
        assert f"pid {holder.process.pid}" in text
        assert "python" in text
    finally:
        holder.close()


def test_owner_of_a_port_that_nobody_holds_is_empty() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        assert port_owner(probe.getsockname()[1]) == ""


# -- fork ------------------------------------------------------------------------------------------


def test_forked_child_gets_a_clear_error_and_the_parent_goes_on(server: _Server) -> None:
    store = server.connect()
    store.add("n", 1)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        text = "no error"
        try:
            store.add("n", 1)
        except StoreConnectionError as error:
            text = str(error)
        os.write(write_end, text.encode())
        del store
        fresh = server.connect()
        os.write(write_end, f" / {fresh.add('child', 5)}".encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        said = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    assert "forked" in said
    assert said.endswith("/ 5")
    assert store.add("n", 1) == 2
    assert store.add("child", 0) == 5


def test_child_of_a_master_can_end_without_harm_to_the_server() -> None:
    master = TCPStore("127.0.0.1", 0, is_master=True)
    child = os.fork()
    if child == 0:
        del master
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert master.clone().add("n", 1) == 1
