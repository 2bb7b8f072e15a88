from __future__ import annotations

import os
import tempfile

import pytest

from gradsync import _native
from gradsync.cli.main import main
from gradsync.errors import PeerLostError
from gradsync.launch.job import _usual_threads
from gradsync.launch.output import Relay, Sink
from gradsync.launch.verdict import (
    Failure,
    describe_end,
    first_failure,
    follows_from_another,
    last_traceback,
    says_it_follows,
)


def failure(rank: int, at: float, *, follows: bool = False) -> Failure:
    return Failure(rank, 100 + rank, 1, "", follows, at)


def test_first_failure_is_the_earliest_of_its_own_making():
    assert first_failure([failure(2, 3.0), failure(1, 2.0)]).rank == 1
    assert first_failure([failure(0, 1.0, follows=True), failure(1, 2.0)]).rank == 1
    lost = [failure(0, 2.0, follows=True), failure(3, 1.0, follows=True)]
    assert first_failure(lost).rank == 3


def test_consequences_are_found_through_the_chain():
    assert follows_from_another(PeerLostError("rank 1 is gone"))
    assert not follows_from_another(ValueError("mine"))
    error = OSError("could not save")
    error.__context__ = PeerLostError("rank 1 is gone")
    assert follows_from_another(error)


@pytest.mark.parametrize(
    ("line", "follows"),
    [
        ("gradsync.errors.PeerLostError: rank 1 is gone", True),
        ("[rank0]: gradsync.errors.PeerLostError: rank 1 is gone", True),
        ("[rank 0] AbortedError: rank 1 aborted", True),
        ("ValueError: no PeerLostError here", False),
    ],
)
def test_consequences_are_read_from_stderr(line, follows):
    assert says_it_follows(["Traceback (most recent call last):", "  x", line]) is follows


def test_last_lines_reach_back_to_the_traceback():
    noise = [f"noise {n}" for n in range(30)]
    trace = ["Traceback (most recent call last):", *[f"  frame {n}" for n in range(40)], "E: x"]
    assert last_traceback(noise + trace) == trace
    assert last_traceback(noise) == noise[-20:]
    assert len(last_traceback([*trace, *noise, *noise])) == 20


def test_ends_in_words():
    assert describe_end(3) == "exit code 3"
    assert "SIGKILL" in describe_end(-9)
    assert describe_end(-64) in ("killed by signal 64", "killed by SIGRTMAX")


def test_threads_are_an_even_share_of_the_cores():
    cores = len(os.sched_getaffinity(0))
    assert 1 <= _native.usable_cores() <= cores
    assert _usual_threads(1, {}) == str(_native.usable_cores())
    assert _usual_threads(10 * cores, {}) == "1"
    assert _usual_threads(2, {"OMP_NUM_THREADS": "7"}) == "7"


def relay(chunks: list[bytes], *, raw: bool = False) -> tuple[bytes, list[str]]:
    with tempfile.TemporaryFile() as file:
        stream = Relay(Sink(file.fileno()), b"[1] ", raw=raw)
        for chunk in chunks:
            stream.feed(chunk)
        stream.finish()
        file.seek(0)
        return file.read(), stream.last_lines


def test_lines_are_prefixed_whatever_the_chunks():
    assert relay([b"a\nb", b"c\n", b"", b"d"])[0] == b"[1] a\n[1] bc\n[1] d\n"
    assert relay([b"a\r", b"\nb\r\n"])[0] == b"[1] a\r\n[1] b\r\n"


def test_progress_bars_stay_progress_bars():
    assert relay([b"10%\r20%", b"\r30%\n"])[0] == b"[1] 10%\r[1] 20%\r[1] 30%\n"
    written, lines = relay([b"10%\r", b"20%\n"], raw=True)
    assert written == b"10%\r20%\n"
    assert lines == ["10%", "20%"]


def test_endless_line_is_cut_and_bad_bytes_are_kept():
    written, lines = relay([b"x" * 70_000, b"\xff\n"])
    assert written == b"[1] " + b"x" * 70_000 + b"\n[1] \xff\n"
    assert lines[-1] == "\ufffd"


def test_reader_that_left_does_not_stop_the_job():
    reader, writer = os.pipe()
    os.close(reader)
    stream = Relay(Sink(writer), b"", raw=False)
    stream.feed(b"lost\n")
    stream.feed(b"lost too\n")
    assert stream.last_lines == ["lost", "lost too"]
    os.close(writer)


def test_grace_is_a_number_of_seconds(capsys):
    for text in ("nan", "inf", "-1", "soon"):
        with pytest.raises(SystemExit):
            main(["run", f"--grace={text}", "script.py"])
        assert "argument --grace: must be a number of seconds" in capsys.readouterr().err
