"""The native core as Python sees it; ``tests/meta/test_stub.py`` compares it with the extension."""

from collections.abc import Callable, Sequence
from typing import Any

class StatusError(RuntimeError):
    """A failure inside the native core; ``args`` is ``(code, message, ranks)``."""

    args: tuple[str, str, list[int]]

class Lobby:
    """Where the ranks of one host come to get their shared memory."""

    def __init__(self) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def secret(self) -> bytes: ...
    def host(
        self, pids: list[int], staging_bytes: int, timeout_s: float, world: Session | None = None
    ) -> Session: ...

class Link:
    """The way to another rank's lobby; fails at once when there is none."""

    def __init__(self, name: str) -> None: ...
    def join(
        self, secret: bytes, rank: int, ranks: int, timeout_s: float, world: Session | None = None
    ) -> Session: ...

class Pending:
    """A call that was handed in."""

    def done(self) -> bool: ...
    def wait(self, timeout_s: float) -> bool: ...
    def on_done(self, callback: Callable[[], object]) -> None: ...

class Session:
    """A group in shared memory."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    def enter(self, timeout_s: float) -> None: ...
    def close(self, timeout_s: float) -> None: ...

    # Asynchronous calls are handed in and return what to wait for.
    def barrier(self, timeout_s: float, asynchronous: bool = False) -> Pending | None: ...
    def broadcast(
        self,
        address: int,
        count: int,
        dtype: int,
        root: int,
        timeout_s: float,
        asynchronous: bool = False,
    ) -> Pending | None: ...
    def all_reduce(
        self,
        address: int,
        count: int,
        dtype: int,
        reduce: int,
        timeout_s: float,
        asynchronous: bool = False,
    ) -> Pending | None: ...
    def reduce(
        self,
        address: int,
        count: int,
        dtype: int,
        reduce: int,
        root: int,
        timeout_s: float,
        asynchronous: bool = False,
    ) -> Pending | None: ...

    # Lists have one address (or count, in elements) per rank; ``gather``'s outputs and
    # ``scatter``'s inputs are empty on ranks other than the root.
    def all_gather(
        self,
        address: int,
        count: int,
        dtype: int,
        outputs: Sequence[int],
        timeout_s: float,
        asynchronous: bool = False,
    ) -> Pending | None: ...
    def gather(
        self,
        address: int,
        count: int,
        dtype: int,
        outputs: Sequence[int],
        root: int,
        timeout_s: float,
        asynchronous: bool = False,
    ) -> Pending | None: ...
    def scatter(
        self,
        inputs: Sequence[int],
        address: int,
        count: int,
        dtype: int,
        root: int,
        timeout_s: float,
        asynchronous: bool = False,
    ) -> Pending | None: ...
    def reduce_scatter(
        self,
        inputs: Sequence[int],
        counts: Sequence[int],
        address: int,
        dtype: int,
        reduce: int,
        timeout_s: float,
        asynchronous: bool = False,
    ) -> Pending | None: ...
    def all_to_all(
        self,
        inputs: Sequence[int],
        input_counts: Sequence[int],
        outputs: Sequence[int],
        output_counts: Sequence[int],
        dtype: int,
        timeout_s: float,
        asynchronous: bool = False,
    ) -> Pending | None: ...
    def abort(self, reason: str) -> None: ...
    def leave(self, note: str) -> None: ...
    def allocate(self, nbytes: int) -> Any: ...
    def is_shared(self, address: int, nbytes: int) -> bool: ...
    def report(self) -> list[tuple[int, int, int, int, int, int]]: ...

class StoreServer:
    @staticmethod
    def tcp(host: str, port: int, token: str, listen_fd: int = -1) -> StoreServer: ...
    @staticmethod
    def unix(name: str, token: str) -> StoreServer: ...
    @property
    def port(self) -> int: ...

class StoreClient:
    @staticmethod
    def tcp(host: str, port: int, token: str, timeout_s: float) -> StoreClient: ...
    @staticmethod
    def unix(name: str, token: str, timeout_s: float) -> StoreClient: ...
    def set(self, key: str | bytes, value: str | bytes, timeout_s: float, /) -> None: ...
    def get(self, key: str | bytes, timeout_s: float, /) -> bytes: ...
    def add(self, key: str | bytes, amount: int, timeout_s: float, /) -> int: ...
    def compare_set(
        self, key: str | bytes, expected: str | bytes, desired: str | bytes, timeout_s: float, /
    ) -> bytes: ...
    def append(self, key: str | bytes, value: str | bytes, timeout_s: float, /) -> None: ...
    def delete_key(self, key: str | bytes, timeout_s: float, /) -> bool: ...
    def check(self, keys: Sequence[str | bytes], timeout_s: float, /) -> bool: ...
    def wait(self, keys: Sequence[str | bytes], timeout_s: float, /) -> None: ...
    def multi_get(self, keys: Sequence[str | bytes], timeout_s: float, /) -> list[bytes]: ...
    def multi_set(
        self, keys: Sequence[str | bytes], values: Sequence[str | bytes], timeout_s: float, /
    ) -> None: ...
    def num_keys(self, timeout_s: float, /) -> int: ...
    def list_keys(self, timeout_s: float, /) -> list[bytes]: ...
    def queue_push(self, key: str | bytes, value: str | bytes, timeout_s: float, /) -> None: ...
    def queue_pop(self, key: str | bytes, block: bool, timeout_s: float, /) -> bytes: ...
    def queue_len(self, key: str | bytes, timeout_s: float, /) -> int: ...
    def barrier(self, key: str | bytes, participants: int, timeout_s: float, /) -> None: ...
    def cut(self) -> None: ...

def local_sessions(ranks: int, staging_bytes: int) -> list[Session]: ...
def usable_cores() -> int: ...
