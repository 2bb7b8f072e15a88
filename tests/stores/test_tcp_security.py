"""Strangers, liars and slow peers: what they cannot do to a store."""

from __future__ import annotations

import hashlib
import hmac
import os
import random
import secrets
import socket
import struct
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from gradsync.errors import DistNetworkError, StoreConnectionError, UsageError
from gradsync.stores.tcp import TCPStore
from gradsync.stores.unix import UnixStore

TOKEN = "a secret"


def _master(token: str = TOKEN) -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, token=token, timeout=timedelta(seconds=30))


def _connect(port: int) -> socket.socket:
    peer = socket.create_connection(("127.0.0.1", port), timeout=20)
    # Closing with a reset leaves no TIME_WAIT behind; there will be thousands.
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return peer


def _receive(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = peer.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def _is_dropped(peer: socket.socket) -> bool:
    """Read until the server closes; anything else within the socket's timeout is a failure."""
    try:
        while peer.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


def _authenticated(port: int, token: str = TOKEN) -> socket.socket:
    """Shake hands by the book, as a client written by somebody else would."""
    peer = _connect(port)
    server_hello = _receive(peer, 48)
    hello = b"gradsync" + secrets.token_bytes(16) + secrets.token_bytes(16) + struct.pack("<Q", 0)
    proof = hmac.digest(token.encode(), b"client" + server_hello + hello, hashlib.sha256)
    peer.sendall(hello + proof)
    answer = _receive(peer, 40)
    expected = b"server" + server_hello + hello + proof + answer[:8]
    assert answer[0] == 1
    assert answer[8:] == hmac.digest(token.encode(), expected, hashlib.sha256)
    return peer


def _request(op: int, seq: int, *strings: bytes, keys: int = 0, values: int = 0) -> bytes:
    body = b"".join(struct.pack("<I", len(s)) + s for s in strings)
    return struct.pack("<IB3xQQqqII", len(body), op, seq, 0, 0, 0, keys, values) + body


SET, GET, PING = 1, 2, 17


def _listening_addresses(port: int) -> list[str]:
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, _, hex_port = fields[1].rpartition(":")
            if fields[3] == "0A" and int(hex_port, 16) == port:
                found.append(address)
    return found


# -- the token -------------------------------------------------------------------------------------


def test_right_token_is_let_in() -> None:
    master = _master()
    worker = TCPStore("127.0.0.1", master.port, token=TOKEN)
    worker.set("k", "v")
    assert master.get("k") == b"v"
    assert master.clone().get("k") == b"v"


@pytest.mark.parametrize(("server", "client"), [("a", "b"), ("a", ""), ("", "b")])
def test_other_token_is_refused_at_once_and_says_what_to_set(server: str, client: str) -> None:
    master = _master(server)
    began = time.monotonic()
    with pytest.raises(StoreConnectionError, match="GRADSYNC_TOKEN") as caught:
        TCPStore("127.0.0.1", master.port, token=client)
    assert isinstance(caught.value, DistNetworkError)
    assert time.monotonic() - began < 2
    assert master.add("n", 1) == 1


def test_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSYNC_TOKEN", "of the job")
    master = TCPStore("127.0.0.1", 0, is_master=True)
    TCPStore("127.0.0.1", master.port).set("k", "v")
    monkeypatch.delenv("GRADSYNC_TOKEN")
    with pytest.raises(StoreConnectionError, match="which has none"):
        TCPStore("127.0.0.1", master.port)


def test_unix_store_checks_the_token_too() -> None:
    name = f"token-{os.getpid()}"
    master = UnixStore(name, is_master=True, token="a")
    with pytest.raises(StoreConnectionError, match="token"):
        UnixStore(name, token="b")
    assert master.add("n", 1) == 1


def test_client_does_not_trust_a_server_that_cannot_prove_itself() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def answer_yes() -> None:
            peer, _ = impostor.accept()
            with peer:
                peer.sendall(b"gradsync" + struct.pack("<II", 1, 0) + bytes(32))
                _receive(peer, 80)
                peer.sendall(b"\x01" + bytes(39))

        thread = threading.Thread(target=answer_yes)
        thread.start()
        with pytest.raises(StoreConnectionError, match="token"):
            TCPStore("127.0.0.1", impostor.getsockname()[1], token=TOKEN)
        thread.join()


def test_something_else_on_the_port_is_named_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet() -> None:
            peer, _ = other.accept()
            with peer:
                peer.sendall(b"220 mail.example.org ESMTP ready, what can I do for you today?\r\n")
                assert _is_dropped(peer)

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(StoreConnectionError, match="not a gradsync store"):
            TCPStore("127.0.0.1", other.getsockname()[1])
        thread.join()


# -- what it listens on ----------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_listens_on_loopback_and_nothing_else(host: str) -> None:
    master = TCPStore(host, 0, is_master=True)
    assert _listening_addresses(master.port) == ["0100007F"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_beyond_loopback_without_a_token_is_refused(host: str) -> None:
    if host == "::" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 on this machine")
    with pytest.raises(UsageError, match="GRADSYNC_TOKEN"):
        TCPStore(host, 0, is_master=True, token="")
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match="GRADSYNC_TOKEN"):
            TCPStore("0.0.0.0", port, is_master=True, master_listen_fd=listener.fileno(), token="")


def test_all_addresses_with_a_token_is_fine() -> None:
    master = TCPStore("0.0.0.0", 0, is_master=True, token=TOKEN)
    assert _listening_addresses(master.port) == ["00000000"]
    assert TCPStore("127.0.0.1", master.port, token=TOKEN).add("n", 1) == 1


def test_address_of_another_machine_is_an_error_that_says_so() -> None:
    with pytest.raises(StoreConnectionError, match="no such address"):
        TCPStore("192.0.2.1", 0, is_master=True, token=TOKEN)


def _own_descriptors() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the listing's own
            pass
    return found


def test_unix_store_opens_no_port_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = _own_descriptors()
    master = UnixStore(f"no-port-{os.getpid()}", is_master=True)
    opened = _own_descriptors() - before
    assert len(opened) >= 2
    tables = [table.read_text() for table in Path("/proc/net").glob("[tu][cd]p*")]
    fields = [line.split() for table in tables for line in table.splitlines()]
    listed = {f"socket:[{line[9]}]" for line in fields if len(line) > 9}
    assert not listed & opened
    assert list(tmp_path.iterdir()) == []
    assert master.add("n", 1) == 1


# -- strangers -------------------------------------------------------------------------------------


def test_ten_thousand_random_streams_disturb_nobody() -> None:
    master = _master()
    worker = master.clone()
    stop = threading.Event()
    done = [0]

    def work() -> None:
        while not stop.is_set():
            done[0] += 1
            assert worker.add("n", 1) == done[0]

    thread = threading.Thread(target=work)
    thread.start()
    source = random.Random(1)
    for _ in range(10_000):
        with _connect(master.port) as peer:
            size = source.choice((0, 1, 8, 79, 80, 81, 200, 3000))
            data = source.randbytes(size)
            if source.random() < 0.5:
                data = b"gradsync" + data  # gets a little further
            try:
                peer.sendall(data)
            except ConnectionError:
                pass
    stop.set()
    thread.join()
    assert done[0] > 0
    assert master.add("n", 0) == done[0]


def test_random_requests_of_a_member_cost_only_its_own_connection() -> None:
    master = _master()
    source = random.Random(2)
    for _ in range(500):
        with _authenticated(master.port) as peer:
            try:
                peer.sendall(source.randbytes(source.choice((48, 100, 1000))))
                peer.shutdown(socket.SHUT_WR)
            except ConnectionError:
                continue
            assert _is_dropped(peer)
    assert master.add("n", 1) == 1


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<IB3xQQqqII", 0xFFFFFFFF, SET, 1, 0, 0, 0, 1, 1),  # declares 4 GiB
        struct.pack("<IB3xQQqqII", 100, 5, 1, 0, 0, 0, 0xFFFFFFFF, 1),  # so many keys
        _request(SET, 1, b"k" * 65537, b"v", keys=1, values=1),
        _request(SET, 1, b"k", b"v", b"more", keys=1, values=1),
        _request(0, 1),
        _request(200, 1),
        struct.pack("<IB3xQQqqII", 0, PING, 1, 5, 0, 0, 0, 0),  # claims replies it never got
    ],
)
def test_request_against_the_rules_drops_its_connection_only(data: bytes) -> None:
    master = _master()
    with _authenticated(master.port) as peer:
        peer.sendall(data)
        assert _is_dropped(peer)
    assert master.add("n", 1) == 1


def test_declared_length_takes_no_memory() -> None:
    master = _master()
    before = _resident_bytes()
    peers = [_authenticated(master.port) for _ in range(20)]
    for peer in peers:
        # 256 MiB are announced, a little arrives.
        head = struct.pack("<IB3xQQqqII", 256 << 20, SET, 1, 0, 0, 0, 1, 1)
        peer.sendall(
            head + struct.pack("<I", 1) + b"k" + struct.pack("<I", 200 << 20) + b"x" * 1000
        )
    assert master.add("n", 1) == 1
    assert _resident_bytes() - before < 64 << 20
    for peer in peers:
        peer.close()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_silent_stranger_is_dropped_after_the_handshake_timeout() -> None:
    master = _master()
    with _connect(master.port) as silent, _connect(master.port) as slow:
        began = time.monotonic()
        slow.sendall(b"grads")
        assert _is_dropped(silent)
        assert _is_dropped(slow)
        assert 3 < time.monotonic() - began < 15
    assert master.add("n", 1) == 1


def test_strangers_are_bounded_and_members_still_get_in() -> None:
    master = _master()
    peers = [_connect(master.port) for _ in range(1100)]
    try:
        assert _is_dropped(peers[0])
        assert TCPStore("127.0.0.1", master.port, token=TOKEN).add("n", 1) == 1
    finally:
        for peer in peers:
            peer.close()


def test_byte_by_byte_member_is_served_and_delays_nobody() -> None:
    master = _master()
    with _authenticated(master.port) as slow:
        for byte in _request(SET, 1, b"slow", b"v", keys=1, values=1):
            slow.sendall(bytes([byte]))
            master.add("n", 1)
        assert master.get("slow") == b"v"


def test_member_that_does_not_read_its_replies_is_not_read_from() -> None:
    master = _master()
    master.set("large", bytes(1 << 20))
    before = _resident_bytes()
    with _authenticated(master.port) as greedy:
        greedy.settimeout(2)
        requests = b"".join(_request(GET, seq, b"large", keys=1) for seq in range(1, 1001))
        try:
            for _ in range(1000):  # a terabyte of answers is asked for and never read
                greedy.sendall(requests)
            pytest.fail("the server reads on from a peer that does not read its answers")
        except TimeoutError:
            pass
        assert master.add("n", 1) == 1
        assert _resident_bytes() - before < 128 << 20
