"""The output of ranks on its way to the launcher's own: by lines, prefixed, the last ones kept."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import select
import termios
from collections import deque

__all__ = ["Relay", "Sink", "open_channel"]

# A carriage return at the very end may be the first half of "\r\n": it waits for the next byte.
_LINE_END = re.compile(rb"\r\n|\n|\r(?=[^\n])")
_LONGEST_LINE = 64 * 1024
_KEPT_LINES = 200


def open_channel(terminal: int | None) -> tuple[int, int]:
    """Return the reading and the writing end for a rank's output.

    A pipe; or, when ``terminal`` is a descriptor of one, a terminal of the same size, so that what
    draws progress bars does.
    """
    if terminal is None or not os.isatty(terminal):
        return os.pipe()
    reader, writer = os.openpty()
    settings = termios.tcgetattr(writer)
    settings[1] &= ~termios.OPOST  # bytes as they are: the real terminal does the rest
    termios.tcsetattr(writer, termios.TCSANOW, settings)
    size = fcntl.ioctl(terminal, termios.TIOCGWINSZ, bytes(8))
    fcntl.ioctl(writer, termios.TIOCSWINSZ, size)
    return reader, writer


class Sink:
    """One of the launcher's own streams; output that nobody reads any more is dropped."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._open = True
        self.failure: OSError | None = None
        """Why output was lost that somebody would have read: a full disk, say."""
        self._at_line_start = True

    def write_line(self, data: bytes) -> None:
        """Write whole lines, below whatever a raw writer left unfinished."""
        if not self._at_line_start:
            self._write(b"\n")
        self._write(data)
        self._at_line_start = True

    def write_raw(self, data: bytes) -> None:
        """Write bytes as they come."""
        self._write(data)
        self._at_line_start = data.endswith(b"\n")

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and self._open:
            try:
                view = view[os.write(self._fd, view) :]
            except InterruptedError:
                continue
            except BlockingIOError:  # somebody else made our stream so; wait for the reader
                select.select([], [self._fd], [])
            except OSError as error:
                # The job's work is worth more than its output.
                self._open = False
                if error.errno != errno.EPIPE:  # that is a reader who left (`| head`)
                    self.failure = error


class Relay:
    """One stream of one rank."""

    def __init__(self, sink: Sink, prefix: bytes, *, raw: bool) -> None:
        self._sink = sink
        self._prefix = prefix
        self._raw = raw
        self._partial = b""
        self._kept: deque[str] = deque(maxlen=_KEPT_LINES)

    def feed(self, data: bytes) -> None:
        """Take what the rank wrote."""
        if self._raw:
            self._sink.write_raw(data)
        self._partial += data
        start = 0
        for match in _LINE_END.finditer(self._partial):
            self._line(self._partial[start : match.end()])
            start = match.end()
        self._partial = self._partial[start:]
        if len(self._partial) > _LONGEST_LINE:
            self._line(self._partial + b"\n")
            self._partial = b""

    def finish(self) -> None:
        """Write what the rank left without a line's end."""
        if self._partial:
            self._line(self._partial + b"\n")
            self._partial = b""

    @property
    def last_lines(self) -> list[str]:
        """The last lines that the rank wrote."""
        return list(self._kept)

    def _line(self, line: bytes) -> None:
        self._kept.append(line.rstrip(b"\r\n").decode("utf-8", "replace"))
        if not self._raw:
            self._sink.write_line(self._prefix + line)
