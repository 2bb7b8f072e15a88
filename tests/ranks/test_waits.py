"""What errors and long waits say: the lines that asked, and where the missing ranks stand."""

import ctypes
import os
import re
import signal
import sys
import threading
import time

import pytest
import torch

import gradsync as dist
from gradsync import _native
from gradsync.backends.call import NO_BUFFER, Call
from gradsync.backends.ops import BARRIER
from gradsync.backends.translate import call_error
from gradsync.backends.waits import stack_of
from gradsync.testing import faults


def line_of(text: str) -> int:
    """Return the number of the only line of this file that ends with a mark."""
    with open(__file__) as file:
        found = [i for i, line in enumerate(file, 1) if line.rstrip().endswith(f"# {text}")]
    assert len(found) == 1
    return found[0]


@pytest.mark.ranks(3, backend=["shm", "threads"])
def test_mismatch_names_each_ranks_own_line(rank):
    def odd_one() -> None:
        dist.barrier()  # odd line

    def even_ones() -> None:
        dist.all_reduce(torch.ones(3))  # even line

    call = odd_one if rank == 1 else even_ones
    start = time.monotonic()
    with pytest.raises(dist.MismatchError) as caught:
        call()
    assert time.monotonic() - start < 1
    text = str(caught.value)
    file = re.escape(os.path.basename(__file__))
    even = rf"all_reduce\(float32\[3\], SUM\) at \S*{file}:{line_of('even line')} in even_ones"
    assert len(re.findall(rf"rank [02] \(pid \d+\): #1 {even}", text)) == 2, text
    assert re.search(rf"rank 1 .*barrier\(\) at \S*{file}:{line_of('odd line')} in odd_one", text)
    assert caught.value.group == ("world" if dist.get_backend() == "shm" else "")


@pytest.mark.ranks(2, backend=["shm", "threads"])
def test_asynchronous_calls_are_named_by_the_line_that_handed_them_in(rank, group):
    work = group.all_reduce_async(torch.ones(2 + rank))  # handed in
    with pytest.raises(dist.MismatchError) as caught:
        work.wait()
    for other in (0, 1):
        line = rf"rank {other} .*float32\[{2 + other}\].* at \S*:{line_of('handed in')} in test_asy"
        assert re.search(line, str(caught.value))


@pytest.mark.ranks(3)
def test_timeout_says_where_the_missing_rank_stands(rank, group):
    def stuck_here() -> None:
        time.sleep(1.0)  # stuck line

    halves = dist.new_group([2, 1], sort_ranks=False)
    dist.barrier()
    helper = threading.Thread(target=time.sleep, args=(1.0,), name="helper")
    if rank == 1:
        helper.start()
        stuck_here()
        helper.join()
        for where in (group, halves):
            with pytest.raises(dist.AbortedError):
                where.barrier()
        return
    # In a sub-group ranks have other numbers, and are asked all the same.
    where, missing = (group, 1) if rank == 0 else (halves, 1)
    if rank == 2:
        time.sleep(0.2)
    start = time.monotonic()
    with pytest.raises(dist.CollectiveTimeout) as caught:
        where.barrier(timeout=0.3)  # waiting line
    assert time.monotonic() - start < 0.9
    text = str(caught.value)
    me = where.rank()
    assert re.search(rf"rank {me} waits at \S*:{line_of('waiting line')} in test_timeout", text)
    here = rf"\S*:{line_of('stuck line')} in stuck_here: time\.sleep\(1\.0\)"
    assert re.search(rf"rank {missing} stands at\n(    .*\n)+    {here}", text), text
    assert "(thread 'helper' at" in text
    assert "gradsync answers" not in text


@pytest.mark.ranks(2)
def test_message_that_does_not_come_tells_where_its_sender_stands(rank, group):
    if rank == 1:
        time.sleep(0.6)  # sender line
        return
    time.sleep(0.1)
    with pytest.raises(dist.CollectiveTimeout) as caught:
        group.recv(torch.ones(1), 1, timeout=0.1)
    here = rf"rank 1 stands at\n(    .*\n)*    \S*:{line_of('sender line')} in test_message"
    assert re.search(here, str(caught.value))


@pytest.mark.ranks(2)
def test_failed_messages_name_the_lines_that_asked(rank, group):
    sub = dist.new_group([0, 1])  # nobody observes it, so calls take the lane
    for where in (group, sub):
        if rank == 1:
            where.send(torch.ones(4), 0)
            where.send_async(torch.ones(4), 0, tag=1)
            where.barrier()
            where.barrier()
            continue
        where.barrier()  # both are sent
        ways = [
            (lambda at: at.recv(torch.ones(3), 1), "now line"),  # now line
            (lambda at: at.recv_async(torch.ones(3), 1, tag=1).wait(), "async"),  # async
            (lambda at: at.recv(torch.ones(3), 1, tag=2, timeout=0.05), "vain line"),  # vain line
        ]
        for call, mark in ways:
            kind = dist.CollectiveTimeout if mark == "vain line" else dist.MismatchError
            with pytest.raises(kind) as caught:
                call(where)
            verb = "waits" if kind is dist.CollectiveTimeout else "asked for it"
            mine = rf"rank 0 {verb} at \S*:{line_of(mark)} in <lambda>"
            other = r"rank 1 stands at\n(    .*\n)*    \S*test_waits.py:\d+ in test_failed"
            assert re.search(rf"{mine}\n  {other}", str(caught.value)), str(caught.value)
        where.barrier()
    dist.destroy_process_group(sub)


@pytest.mark.ranks(2, timeout=30)
@pytest.mark.parametrize("how", ["stopped", "holding"])
def test_rank_that_cannot_answer_is_described_by_the_system(rank, group, how):
    dist.barrier()
    if rank == 1:
        if how == "holding":
            ctypes.PyDLL(None).usleep(900_000)  # PyDLL keeps Python's lock
        else:
            stop_myself(0.9)
        with pytest.raises(dist.AbortedError):
            dist.barrier()
        return
    start = time.monotonic()
    with pytest.raises(dist.CollectiveTimeout) as caught:
        group.barrier(timeout=0.2)
    assert time.monotonic() - start < 0.8
    state = "stopped by a signal" if how == "stopped" else "asleep in native code"
    assert f"it does not answer: its process is {state}" in str(caught.value)


def stop_myself(seconds: float) -> None:
    script = f"sleep {seconds}; kill -CONT {os.getpid()}"
    child = os.posix_spawn("/bin/sh", ["sh", "-c", script], {"PATH": os.defpath})
    os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(child, 0)


@pytest.mark.ranks(3, faults=[faults.kill(rank=1, at="barrier#3")])
def test_lost_rank_and_those_who_miss_it_are_named_with_their_lines(rank, group):
    dist.barrier()
    dist.barrier()
    with pytest.raises(dist.PeerLostError) as caught:
        dist.barrier()  # lost line
    here = rf"rank {rank}: #3 barrier\(\) at \S*:{line_of('lost line')} in test_lost"
    assert re.search(here, str(caught.value))


@pytest.fixture
def told(rank, world_size, store, monkeypatch, caplog):
    """A world that says after 0.4 s that it waits; call it for what was said."""
    monkeypatch.setenv("GRADSYNC_LATE_AFTER", "0.4")
    dist.init_process_group(store=store, rank=rank, world_size=world_size)
    dist.barrier()
    caplog.clear()
    yield lambda: [r.getMessage() for r in caplog.records if r.name == "gradsync"]
    dist.destroy_process_group()


@pytest.mark.ranks(3, group=False)
def test_long_wait_is_told_once(rank, told):
    if rank == 1:
        time.sleep(1.0)
    dist.barrier()  # told line
    if rank == 0:
        (line,) = told()
        assert "ranks 0, 2 of group 'world' wait since 0 s in call #2 barrier() for rank 1" in line
        assert f":{line_of('told line')} in" in line
    else:
        assert told() == []


@pytest.mark.ranks(2, group=False)
def test_long_wait_for_a_message_is_told_once(rank, told):
    if rank == 1:
        time.sleep(0.8)
        dist.send(torch.ones(3), 0, tag=5)
    else:
        dist.recv(torch.ones(3), 1, tag=5)  # told message
    if rank == 0:
        (line,) = told()
        assert "rank 0 of group 'world' waits since 0 s in recv(float32[3], 12 by" in line
        assert re.search(rf"from rank 1 \(rank 0 at \S*:{line_of('told message')} in test_", line)
    else:
        assert told() == []


@pytest.mark.ranks(3, group=False)
@pytest.mark.parametrize("late", [0, 2])
def test_long_wait_for_a_member_of_a_new_group_is_told_once(rank, told, late):
    if rank == late:
        time.sleep(0.9)
    dist.new_group([0, 2])  # told group
    if rank == 2 - late:
        (line,) = told()
        assert f"rank {rank} for rank {late} in forming the group '1' (at " in line
        assert f":{line_of('told group')} in test_long_wait" in line
    else:
        assert told() == []


def test_nonsense_as_patience_is_refused(monkeypatch):
    for value in ("soon", "-1", "nan", "inf"):
        monkeypatch.setenv("GRADSYNC_LATE_AFTER", value)
        with pytest.raises(dist.UsageError, match="GRADSYNC_LATE_AFTER must be a number of sec"):
            dist.init_process_group(world_size=1)
        assert not dist.is_initialized()


def test_failure_that_cannot_be_is_called_a_bug():
    dist.init_process_group(world_size=1)
    session = dist.group.WORLD.backend._session
    call = Call(BARRIER, NO_BUFFER, 1.0)
    error = call_error(_native.StatusError("queue_empty", "of all things", []), session, call)
    assert isinstance(error, dist.InternalError)
    assert "barrier #0 on rank 0 of 1: the native core failed in an unknown way (queue_empty)" in (
        str(error)
    )
    dist.destroy_process_group()


def test_frames_inside_of_gradsync_do_not_crowd_out_the_callers_line():
    inside = {"stack_of": stack_of, "sys": sys}
    text = "def call(deep):\n    return call(deep - 1) if deep else stack_of(sys._getframe())"
    exec(compile(text, dist.__file__, "exec"), inside)
    lines = inside["call"](20)
    assert "test_waits.py" in lines[-1]
    assert 'inside["call"](20)' in lines[-1]
