"""``TCPStore``: a store that processes on any host reach by address and port."""

from __future__ import annotations

import os
from weakref import WeakValueDictionary

from gradsync._native import StatusError, StoreClient, StoreServer
from gradsync.base.deadline import Timeout, seconds
from gradsync.errors import StoreConnectionError, StoreTimeout, UsageError
from gradsync.stores.port_owner import port_owner
from gradsync.stores.socket_store import WORKERS_KEY, SocketStore, read_token, translated
from gradsync.stores.store import DEFAULT_TIMEOUT

__all__ = ["TCPStore"]

# A queue, because queues are not counted by num_keys; it holds something once all have joined.
_READY_QUEUE = "\0gradsync/ready"

# The servers of this process that more than one store may share, by process and port.
_shared_servers: WeakValueDictionary[tuple[int, int], StoreServer] = WeakValueDictionary()


class TCPStore(SocketStore):
    """A store on a TCP port; the server lives in the master and ends with it.

    The server listens on ``host_name`` and on nothing else. Beyond loopback it needs a token
    (``GRADSYNC_TOKEN``, or ``token=``), and every client proves that it knows it.

    >>> master = TCPStore("127.0.0.1", 0, is_master=True)
    >>> worker = TCPStore("127.0.0.1", master.port)
    >>> worker.add("steps", 2)
    2
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
        *,
        token: str | None = None,
    ) -> None:
        """Connect to the store, or start it.

        Args:
            host_name: The address of the master; also the address it listens on.
            port: The port of the master; a master may pass 0 and read ``port``.
            world_size: How many stores there will be, the master's included; None if unknown.
            is_master: Start the server in this process.
            timeout: The longest wait of any call, this one included; zero waits for ever.
            wait_for_workers: The master returns when ``world_size`` stores have joined.
            multi_tenant: Share the server with other masters of this process on the same port.
            master_listen_fd: A listening socket for the server to take over.
            use_libuv: Accepted for torch's sake; there is one kind of server.
            token: The job's secret instead of ``GRADSYNC_TOKEN``.
        """
        super().__init__()
        if world_size == 0:
            raise UsageError("world_size must not be 0; pass None when it is not known")
        if not 0 <= port <= 65535:
            raise UsageError(f"port must be between 0 and 65535, got {port}")
        if port == 0 and not is_master:
            # Nobody ever answers there: it would look like a master that is late.
            raise UsageError("port 0 lets the master choose; give the others the port that it got")
        self.set_timeout(timeout)
        self._host = host_name
        self._port = port
        self._token = read_token(token)
        self._libuv = use_libuv
        self._server: StoreServer | None = None
        if is_master:
            self._server = self._serve(multi_tenant, master_listen_fd)
            self._port = self._server.port
        try:
            self._client = StoreClient.tcp(self._host, self._port, self._token, seconds(timeout))
        except StatusError as error:
            raise translated(error) from None
        if wait_for_workers and world_size is not None and world_size > 0:
            self._join(world_size, is_master)

    @property
    def host(self) -> str:
        """The master's address, as it was given."""
        return self._host

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return self._port

    @property
    def libuvBackend(self) -> bool:  # noqa: N802 - torch's spelling
        """The value of ``use_libuv``; both mean the same server here."""
        return self._libuv

    def clone(self) -> TCPStore:
        """Return another client of the same server; it does not keep the server alive."""
        return TCPStore(self._host, self._port, timeout=self._timeout_s, token=self._token)

    def _serve(self, multi_tenant: bool, listen_fd: int | None) -> StoreServer:
        tenancy = (os.getpid(), self._port)
        shared = _shared_servers.get(tenancy) if multi_tenant else None
        if shared is not None:
            return shared
        try:
            fd = -1 if listen_fd is None else listen_fd
            server = StoreServer.tcp(self._host, self._port, self._token, fd)
        except StatusError as error:
            raise self._explained(error) from None
        if multi_tenant:
            _shared_servers[os.getpid(), server.port] = server
        return server

    def _explained(self, error: StatusError) -> Exception:
        exception = translated(error)
        if "EADDRINUSE" not in str(exception):
            return exception
        owner = port_owner(self._port) or "a process that /proc does not show us"
        return StoreConnectionError(
            f"{exception}; port {self._port} is held by {owner}. "
            "End that process or choose another port (0 takes a free one)"
        )

    def _join(self, world_size: int, is_master: bool) -> None:
        if self.add(WORKERS_KEY, 1) == world_size:
            self.queue_push(_READY_QUEUE, b"")
        if not is_master:
            return
        try:
            self.wait([_READY_QUEUE])
        except StoreTimeout:
            joined = self.add(WORKERS_KEY, 0)
            raise StoreTimeout(
                f"the store at {self._host}:{self._port} waited {self._timeout_s:g} s for its "
                f"workers: {joined} of {world_size} joined. Check that the others were started "
                "with the same address, port and world_size"
            ) from None

    def __repr__(self) -> str:
        role = "master" if self._server else "client"
        return f"TCPStore({self._host!r}, {self._port}, {role})"
