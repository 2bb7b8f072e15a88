"""Which engines there are, by name: gradsync's own, and those that others register.

``Backend`` has the names that torch users know; what carries a group's calls out is an engine with
the four verbs of ``gradsync.backends.backend``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

from gradsync.backends.backend import Backend as Engine
from gradsync.backends.backend import Bootstrap
from gradsync.backends.invitation import Invitation
from gradsync.backends.shm import ShmBackend
from gradsync.backends.threads import ThreadsBackend
from gradsync.errors import BackendUnavailable, UsageError
from gradsync.stores.store import Store

__all__ = [
    "Backend",
    "BackendConfig",
    "BackendOptions",
    "engine_of",
    "invitation_to",
    "is_known",
    "open_engine",
]

_OURS = ("shm", "gradsync")
_VERBS = ("submit", "abort", "leave", "close")


class BackendOptions(NamedTuple):
    """What a registered function of the extended kind gets to make its engine with."""

    store: Store
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: list[int]
    """World ranks of a sub-group; empty for a world."""


class _Plugin(NamedTuple):
    make: Callable[..., Any]
    extended: bool


class Backend(str):
    """The names of backends; ``Backend(name)`` is the name in lower case.

    >>> Backend("GLOO"), Backend.SHM
    ('gloo', 'shm')
    """

    __slots__ = ()

    UNDEFINED = "undefined"
    SHM = "shm"
    GRADSYNC = "gradsync"
    GLOO = "gloo"
    NCCL = "nccl"
    XCCL = "xccl"
    UCC = "ucc"
    MPI = "mpi"

    backend_list: ClassVar[list[str]] = [
        UNDEFINED,
        SHM,
        GRADSYNC,
        GLOO,
        NCCL,
        XCCL,
        UCC,
        MPI,
    ]
    default_device_backend_map: ClassVar[dict[str, str]] = {"cpu": SHM}
    backend_capability: ClassVar[dict[str, list[str]]] = {SHM: ["cpu"], GRADSYNC: ["cpu"]}
    _plugins: ClassVar[dict[str, _Plugin]] = {}

    def __new__(cls, name: str) -> str:  # type: ignore[misc]  # torch's returns a plain str, too
        """Return the name in lower case."""
        if not isinstance(name, str):
            raise UsageError(f"a backend is named by a string, got {type(name).__name__}: {name!r}")
        return name.lower()

    @classmethod
    def register_backend(
        cls,
        name: str,
        func: Callable[..., Any],
        extended_api: bool = False,
        devices: str | Sequence[str] | None = None,
    ) -> None:
        """Make ``init_process_group(name)`` and ``new_group(backend=name)`` use ``func``.

        ``func(store, rank, world_size, timeout)``, or ``func(options, pg_options)`` with
        ``extended_api``, is called on every member and returns its engine: an object with ``name``
        and the verbs of ``gradsync.backends.backend.Backend``. ``options`` is a
        ``BackendOptions``. Devices that have no default backend adopt this one.
        """
        if not callable(func):
            raise UsageError(f"register_backend needs a function, got {func!r}")
        key = cls(name)
        if not key.isidentifier():
            raise UsageError(f"a backend's name must be an identifier, got {name!r}")
        if hasattr(cls, key.upper()) or key in cls._plugins:
            raise UsageError(f"there is a backend {key!r} already")
        if devices is None:
            warnings.warn(
                f"backend {key!r} was registered without devices=; it is taken to serve the CPU",
                stacklevel=2,
            )
            devices = ["cpu"]
        served = [devices] if isinstance(devices, str) else list(devices)
        for device in served:
            cls.default_device_backend_map.setdefault(device, key)
        cls.backend_list.append(key)
        cls.backend_capability[key] = served
        cls._plugins[key] = _Plugin(func, extended_api)
        setattr(cls, key.upper(), key)


class BackendConfig:
    """Which backend serves which kind of device.

    >>> str(BackendConfig("cpu:SHM")), str(BackendConfig("gradsync")), str(BackendConfig(None))
    ('cpu:shm', 'cpu:gradsync', 'cpu:shm')
    """

    def __init__(self, backend: str | None) -> None:
        name = Backend.UNDEFINED if backend is None else Backend(backend)
        self._map: dict[str, str] = {}
        if name == Backend.UNDEFINED:
            self._map["cpu"] = Backend.default_device_backend_map["cpu"]
        elif name and ":" not in name:
            self._map.update(dict.fromkeys(Backend.backend_capability.get(name, ["cpu"]), name))
        else:
            self._parse(name)

    def _parse(self, text: str) -> None:
        for pair in text.split(","):
            device, *rest = (part.strip() for part in pair.split(":"))
            if not device or len(rest) != 1 or not rest[0]:
                raise UsageError(
                    f"{pair!r} is not a pair device:backend; give the backend as 'shm' or "
                    f"'cpu:shm', got {text!r}"
                )
            if device in self._map:
                raise UsageError(f"{device!r} is there twice in the device:backend pairs {text!r}")
            self._map[device] = rest[0]

    def get_device_backend_map(self) -> dict[str, str]:
        """Return the backend of each kind of device."""
        return dict(self._map)

    @property
    def only(self) -> str:
        """The one backend of the one device; nothing when there are more."""
        return next(iter(self._map.values())) if len(self._map) == 1 else ""

    def __str__(self) -> str:
        return ",".join(f"{device}:{name}" for device, name in self._map.items())

    __repr__ = __str__


def is_known(name: str) -> bool:
    """Return whether groups can run on a backend.

    >>> is_known("shm"), is_known("nccl")
    (True, False)
    """
    return name in _OURS or name in Backend._plugins


def engine_of(config: BackendConfig, world: Engine | None = None) -> str:
    """Return the one backend of a group; raise when it is none that there is, or more than one.

    A sub-group may have that of its ``world``, which need not be one that can be asked for.
    """
    if config.only in _OURS:
        return config.only
    names = set(config.get_device_backend_map().values())
    for name in sorted(names):
        if not is_known(name) and (world is None or name != world.name):
            known = ", ".join([*_OURS, *Backend._plugins])
            raise BackendUnavailable(
                f"backend {name!r} is not available; use 'shm' (or None) for ranks on one host, or "
                f"register it with gradsync.Backend.register_backend (there are: {known})"
            )
    if len(names) > 1:
        raise UsageError(f"a group runs on one backend, got {config}")
    return names.pop()


def invitation_to(engine: str) -> Invitation | None:
    """Return what gets an engine's memory ready while the ranks of a new world still arrive."""
    return Invitation() if engine in _OURS else None


def open_engine(name: str, bootstrap: Bootstrap, options: Any = None) -> Engine:
    """Make the engine of one member of a group; the other members do the same."""
    plugin = Backend._plugins.get(name)
    if plugin is None:
        among_threads = isinstance(bootstrap.world, ThreadsBackend)
        return ThreadsBackend.open(bootstrap) if among_threads else ShmBackend.open(bootstrap)
    size = len(bootstrap.evidence)
    # The longest that a timedelta can say stands for no limit.
    timeout = timedelta(seconds=min(bootstrap.timeout_s, 1e9))
    made: Any
    if plugin.extended:
        ranks = [] if bootstrap.world is None else list(bootstrap.places)
        made = plugin.make(
            BackendOptions(bootstrap.store, bootstrap.rank, size, timeout, bootstrap.group, ranks),
            options,
        )
    else:
        made = plugin.make(bootstrap.store, bootstrap.rank, size, timeout)
    missing = [verb for verb in _VERBS if not callable(getattr(made, verb, None))]
    if missing or not isinstance(getattr(made, "name", None), str):
        raise UsageError(
            f"the function of backend {name!r} returned {made!r}, which is no backend: it lacks "
            f"{', '.join(missing) or 'a name'}"
        )
    return made  # type: ignore[no-any-return]
