"""The bytes in the file of a ``FileStore``: header, records, members; pure functions of bytes."""

from __future__ import annotations

import hashlib
import json
import struct
import uuid
import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from gradsync import config
from gradsync.base.host import host_evidence

__all__ = [
    "HEADER_BYTES",
    "Member",
    "changes_in",
    "is_header",
    "is_ours",
    "new_header",
    "record",
    "records_in",
    "this_job",
    "this_process",
]

_MAGIC = b"GRDSYNC1"
HEADER_BYTES = len(_MAGIC) + 16 + 4  # magic, generation, checksum
_RECORD = struct.Struct("<QI")  # length of the body, checksum of it
_CHANGE = struct.Struct("<cIQ")  # kind, length of the key, length of the value
_SET, _DELETE, _JOIN = b"s", b"d", b"j"


class Member(NamedTuple):
    """Who opened the file."""

    process: str
    where: str
    job: str
    world_size: int


def new_header() -> bytes:
    """Return the first bytes of a new generation, different from all earlier ones."""
    body = _MAGIC + uuid.uuid4().bytes
    return body + _checksum(body)


def is_ours(head: bytes) -> bool:
    """Return whether a file that starts so is a store file, perhaps one cut short."""
    return head[: len(_MAGIC)] == _MAGIC[: len(head)]


def is_header(head: bytes) -> bool:
    """Return whether these bytes are a whole header.

    >>> is_header(new_header()), is_header(new_header()[:-1])
    (True, False)
    """
    return len(head) == HEADER_BYTES and is_ours(head) and _checksum(head[:-4]) == head[-4:]


def record(changes: Mapping[str, bytes | Member | None]) -> bytes:
    """Return one record: values to set, keys to remove (None), members by the offset of theirs."""
    parts = []
    for key, value in changes.items():
        if value is None:
            kind, data = _DELETE, b""
        elif isinstance(value, bytes):
            kind, data = _SET, value
        else:
            kind, data = _JOIN, json.dumps(value._asdict()).encode()
        name = key.encode("utf-8", "surrogateescape")
        parts += [_CHANGE.pack(kind, len(name), len(data)), name, data]
    body = b"".join(parts)
    return _RECORD.pack(len(body), zlib.crc32(body)) + body


def records_in(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the body of each whole record and where it ends; stop before a torn one.

    >>> [end for _, end in records_in(record({"a": b"1"}) + record({"a": None})[:-1])]
    [27]
    """
    at = 0
    while len(data) >= at + _RECORD.size:
        length, checksum = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        body = data[at : at + length]
        if len(body) < length or zlib.crc32(body) != checksum:
            return
        at += length
        yield body, at


def changes_in(body: bytes) -> Iterator[tuple[str, bytes | Member | None]]:
    """Yield the changes of one record.

    >>> list(changes_in(record({"a": b"1", "b": None})[12:]))
    [('a', b'1'), ('b', None)]
    """
    at = 0
    while at < len(body):
        kind, key_bytes, value_bytes = _CHANGE.unpack_from(body, at)
        at += _CHANGE.size
        key = body[at : at + key_bytes].decode("utf-8", "surrogateescape")
        at += key_bytes
        value = body[at : at + value_bytes]
        at += value_bytes
        if kind == _JOIN:
            yield key, Member(**json.loads(value))
        else:
            yield key, value if kind == _SET else None


def _checksum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "little")


def this_process() -> tuple[str, str]:
    """Return an identity no other process ever has, and a text for messages."""
    me = host_evidence()
    identity = f"{me.boot_id or me.host} {me.pid_namespace} {me.pid} {me.started}"
    return identity, f"pid {me.pid} on {me.host}"


def this_job() -> str:
    """Return a mark of the job's token, from which the token cannot be read; empty without one."""
    token = config.read("GRADSYNC_TOKEN")
    return (
        hashlib.sha256(f"gradsync file store\0{token}".encode()).hexdigest()[:16] if token else ""
    )
