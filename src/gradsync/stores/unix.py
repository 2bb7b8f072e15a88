"""``UnixStore``: a store for the processes of one host and one user, without any port or file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from gradsync._native import StatusError, StoreClient, StoreServer
from gradsync.base.deadline import Timeout, seconds
from gradsync.stores.socket_store import SocketStore, read_token, translated
from gradsync.stores.store import DEFAULT_TIMEOUT

__all__ = ["UnixStore"]


class UnixStore(SocketStore):
    """A store on a Unix socket in the abstract namespace.

    Nothing appears in the file system, and the kernel vouches that both ends run as the same user.
    The server lives in the master and ends with it.

    >>> master = UnixStore("doctest-unix-store", is_master=True)
    >>> UnixStore("doctest-unix-store").set("greeting", "hello")
    >>> master.get("greeting")
    b'hello'
    """

    def __init__(
        self,
        name: str,
        *,
        is_master: bool = False,
        timeout: Timeout = DEFAULT_TIMEOUT,
        token: str | None = None,
    ) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._name = name
        self._token = read_token(token)
        self._server: StoreServer | None = None
        try:
            if is_master:
                self._server = StoreServer.unix(name, self._token)
            self._client = StoreClient.unix(name, self._token, seconds(timeout))
        except StatusError as error:
            raise translated(error) from None

    @classmethod
    def later(
        cls, name: str, *, timeout: Timeout, token: str, is_master: bool = False
    ) -> UnixStore:
        """Return a store that connects with its first operation, which fails if nobody serves it.

        As the master it takes the name, lets others connect after ``listen``, and answers them
        after ``run``.
        """
        store: UnixStore = cls.__new__(cls)
        SocketStore.__init__(store)
        store.set_timeout(timeout)
        store._name, store._token, store._server = name, token, None
        if is_master:
            try:
                store._server = StoreServer.reserve_unix(name, token)
            except StatusError as error:
                raise translated(error) from None
        return store

    def listen(self, entries: Sequence[tuple[str, bytes]] = ()) -> None:
        """Let others connect; ``entries`` are there before anybody comes."""
        assert self._server is not None
        try:
            self._server.listen(entries)
        except StatusError as error:
            raise translated(error) from None

    def run(self) -> None:
        """Answer those who have connected."""
        assert self._server is not None
        self._server.run()

    @cached_property
    def _client(self) -> StoreClient:  # type: ignore[override]
        try:
            return StoreClient.unix(self._name, self._token, self._timeout_s, patient=False)
        except StatusError as error:
            raise translated(error) from None

    @property
    def name(self) -> str:
        """The name that others connect with."""
        return self._name

    def clone(self) -> UnixStore:
        """Return another client of the same server; it does not keep the server alive."""
        return UnixStore(self._name, timeout=self._timeout_s, token=self._token)

    def __repr__(self) -> str:
        role = "master" if self._server else "client"
        return f"UnixStore({self._name!r}, {role})"
