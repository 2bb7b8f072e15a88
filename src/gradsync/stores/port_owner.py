"""Who listens on a TCP port of this machine, as far as ``/proc`` tells; for error messages."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["port_owner"]

_LISTENING = "0A"


def port_owner(port: int, proc: Path = Path("/proc")) -> str:
    """Return "pid 123 (command line)" of the process that listens on ``port``, or ""."""
    inodes = _listening_inodes(port, proc)
    if not inodes:
        return ""
    sockets = {f"socket:[{inode}]" for inode in inodes}
    for process in proc.iterdir():
        if process.name.isdigit() and _holds(process, sockets):
            command = _command(process)
            return f"pid {process.name} ({command})" if command else f"pid {process.name}"
    return ""


def _listening_inodes(port: int, proc: Path) -> set[str]:
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            # sl local_address rem_address st ... inode
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes


def _holds(process: Path, sockets: set[str]) -> bool:
    try:
        for fd in (process / "fd").iterdir():
            try:
                if os.readlink(fd) in sockets:
                    return True
            except OSError:
                continue
    except OSError:  # another user's process, or one that has just ended
        pass
    return False


def _command(process: Path) -> str:
    try:
        line = (process / "cmdline").read_bytes()
    except OSError:
        return ""
    return line.replace(b"\0", b" ").decode(errors="replace").strip()
