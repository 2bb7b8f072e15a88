"""``UnixStore``: a store for the processes of one host and one user, without any port or file."""

from __future__ import annotations

import os
import threading

from gradsync._native import StatusError, StoreClient, StoreServer
from gradsync.base.deadline import Timeout, seconds
from gradsync.errors import StoreConnectionError
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

    instance: bytes
    """The one server that is meant; nothing for whichever there is."""
    _server: StoreServer | None
    _connected: StoreClient | None

    def __init__(
        self,
        name: str,
        *,
        is_master: bool = False,
        timeout: Timeout = DEFAULT_TIMEOUT,
        token: str | None = None,
    ) -> None:
        self._prepare(name, timeout, read_token(token))
        try:
            if is_master:
                self._server = StoreServer.unix(name, self._token)
            self._connected = StoreClient.unix(name, self._token, seconds(timeout))
        except StatusError as error:
            raise translated(error) from None

    def _prepare(self, name: str, timeout: Timeout, token: str) -> None:
        self.set_timeout(timeout)
        self._name = name
        self._token = token
        self._server = None
        self.instance = b""
        self._connected = None
        self._connecting = threading.Lock()
        self._opened_by = os.getpid()

    @classmethod
    def later(
        cls, name: str, *, timeout: Timeout, token: str, is_master: bool = False
    ) -> UnixStore:
        """Return a store that connects with its first operation, which fails if nobody serves it.

        As the master it takes the name; its ``server`` is yet to let others connect. It answers
        them when it runs, from the first operation of the master on at the latest.
        """
        store: UnixStore = cls.__new__(cls)
        store._prepare(name, timeout, token)
        if is_master:
            try:
                store._server = StoreServer.reserve_unix(name, token)
            except StatusError as error:
                raise translated(error) from None
            store.instance = store._server.instance
        return store

    def give_up(self) -> None:
        """Give the name back, whoever still holds this object."""
        self._server = None

    def connect(self, limit_s: float | None = None, *, if_served: bool = False) -> bool:
        """Connect, unless that was done, to the server of this ``instance`` and no other.

        ``if_served`` makes it return False when there is none.
        """
        if self._opened_by != os.getpid():  # before the lock, which nobody may be there to unlock
            raise StoreConnectionError(
                "this store was opened before the process was forked, and belongs to the parent. "
                "Open a new store in the child"
            )
        with self._connecting:
            if self._connected is not None:
                return True
            limit_s = self._timeout_s if limit_s is None else limit_s
            try:
                if self._server is not None:
                    self._server.run()
                self._connected = StoreClient.unix_at_once(
                    self._name, self._token, limit_s, self.instance
                )
            except StatusError as error:
                if if_served and error.args[0] == "connection":
                    return False
                raise translated(error) from None
            return True

    @property
    def _client(self) -> StoreClient:  # type: ignore[override]
        if self._connected is None:
            self.connect()
        assert self._connected is not None
        return self._connected

    @property
    def name(self) -> str:
        """The name that others connect with."""
        return self._name

    @property
    def server(self) -> StoreServer:
        """What serves it, as the master."""
        assert self._server is not None
        return self._server

    def clone(self) -> UnixStore:
        """Return another client of the same server; it does not keep the server alive."""
        return UnixStore(self._name, timeout=self._timeout_s, token=self._token)

    def __repr__(self) -> str:
        role = "master" if self._server else "client"
        return f"UnixStore({self._name!r}, {role})"
