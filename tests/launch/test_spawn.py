from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest
import rank_functions as functions
from watching import is_running, wait_until

from gradsync.errors import RankFailedError, UsageError
from gradsync.launch.spawn import spawn


@pytest.fixture(autouse=True)
def nothing_left_behind():
    names = {name for name in os.environ if not name.startswith("PYTEST")}
    descriptors = len(os.listdir("/proc/self/fd"))
    before = multiprocessing.active_children()  # the kit's warm ranks, when other tests came first
    yield
    assert [p for p in multiprocessing.active_children() if p not in before] == []
    assert {name for name in os.environ if not name.startswith("PYTEST")} == names
    gc.collect()  # a caught error refers to frames that refer to processes
    # The resource tracker's pipe may have come with the first spawn.
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1


@pytest.fixture
def queue():
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    yield queue
    queue.close()


def test_ranks_know_who_they_are(queue, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert spawn(functions.tell_environment, (queue,), nprocs=2) is None
    told = sorted(queue.get() for _ in range(2))
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert [(rank, names) for rank, names, _ in told] == [
        (rank, [str(rank), "2", str(rank), "2", threads]) for rank in range(2)
    ]


def test_users_settings_are_kept(queue, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setenv("MASTER_ADDR", "head")
    monkeypatch.setenv("MASTER_PORT", "1234")
    spawn(functions.tell_environment, (queue,), nprocs=1)
    assert queue.get() == (0, ["0", "1", "0", "1", "5"], "head")


def test_ranks_meet_without_arguments(queue):
    spawn(functions.meet_all, (queue,), nprocs=3)
    told = sorted(queue.get() for _ in range(3))
    assert [rank for rank, _ in told] == [0, 1, 2]
    assert told[0][1] == told[1][1] == told[2][1]


def test_first_failure_is_raised_with_its_traceback():
    begin = time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        spawn(functions.fail_on, (1, 60.0), nprocs=3)
    assert time.monotonic() - begin < 6
    error = caught.value
    assert (error.rank, error.exit_code) == (1, 1)
    assert "rank 1 of 3 failed first" in str(error)
    assert "KeyError: 'no such batch'" in str(error)
    assert "in fail_on" in error.traceback_text
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.rank, str(copy)) == (1, str(error))


def test_rank_that_only_lost_its_peer_is_not_the_cause():
    with pytest.raises(RankFailedError, match="ZeroDivisionError: the cause") as caught:
        spawn(functions.lose_peer, nprocs=3)
    assert caught.value.rank == 2
    assert "then failed: 0, 1" in str(caught.value)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_killed_rank_is_named_with_its_signal(number):
    with pytest.raises(RankFailedError, match=f"killed by {number.name}") as caught:
        spawn(functions.kill_yourself, (1, number), nprocs=2)
    assert (caught.value.rank, caught.value.exit_code) == (1, -number)
    assert caught.value.traceback_text == ""


def test_exit_codes_count():
    assert spawn(functions.exit_with, (0,), nprocs=1) is None
    with pytest.raises(RankFailedError, match="exit code 3"):
        spawn(functions.exit_with, (3,), nprocs=1)


def test_rank_that_hangs_after_its_failure_is_ended():
    begin = time.monotonic()
    with pytest.raises(RankFailedError, match="a thread goes on"):
        spawn(functions.hang_after_failure, nprocs=1)
    assert time.monotonic() - begin < 5


def test_long_traceback_is_shortened_at_the_front():
    with pytest.raises(RankFailedError) as caught:
        spawn(functions.long_message, nprocs=1)
    text = str(caught.value)
    assert "shortened" in text[:100]
    assert text.endswith("the end\n")
    assert len(text) < 60_000


def test_context_joins_later(tmp_path):
    context = spawn(functions.write_and_wait, (str(tmp_path),), nprocs=2, join=False)
    assert context is not None
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "both ranks run")
    assert context.join(timeout=0.1) is False
    assert [process.pid for process in context.processes] == context.pids()
    for rank, pid in enumerate(context.pids()):
        wait_until(lambda path=tmp_path / str(rank): path.read_text(), "it has written")
        assert int((tmp_path / str(rank)).read_text()) == pid
    os.kill(context.pids()[0], signal.SIGKILL)
    with pytest.raises(RankFailedError, match="rank 0"):
        context.join()
    with pytest.raises(RankFailedError, match="rank 0"):
        context.join()
    assert not any(map(is_running, context.pids()))


def test_another_process_may_start_between_start_and_join():
    context = spawn(functions.exit_with, (4,), nprocs=1, join=False)
    assert context is not None
    wait_until(lambda: not is_running(context.pids()[0]), "the rank ends")
    # Starting a process lets multiprocessing reap all others, behind our back.
    assert spawn(functions.exit_with, (0,), nprocs=1) is None
    with pytest.raises(RankFailedError, match="exit code 4"):
        context.join()


def test_grace_period_lets_the_others_finish(tmp_path):
    context = spawn(functions.finish_late, (str(tmp_path),), nprocs=2, join=False)
    assert context is not None
    with pytest.raises(RankFailedError, match="ValueError: first"):
        context.join(grace_period=10)
    assert (tmp_path / "finished").exists()


def test_child_of_a_rank_does_not_keep_the_parent_waiting():
    begin = time.monotonic()
    spawn(functions.leave_child_behind, nprocs=1)
    assert time.monotonic() - begin < 1.9


def test_sandbox_without_pidfds_still_sees_ranks_end(monkeypatch):
    def unknown(pid: int) -> int:
        raise OSError(errno.ENOSYS, "no such system call")

    monkeypatch.setattr(os, "pidfd_open", unknown)
    assert spawn(functions.exit_with, (0,), nprocs=2) is None
    with pytest.raises(RankFailedError, match="exit code 3"):
        spawn(functions.exit_with, (3,), nprocs=1)


def test_forgotten_context_keeps_serving_until_its_ranks_have_met(start, tmp_path):
    program = tmp_path / "parent.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            import rank_functions as functions
            from gradsync.launch.spawn import spawn

            if __name__ == "__main__":
                spawn(functions.meet_late, nprocs=2, join=False)
            """
        )
    )
    out, err = start(sys.executable, program).communicate(timeout=20)
    assert (sorted(out.splitlines()), err) == (["met 0", "met 1"], "")


@pytest.mark.parametrize(
    "arguments",
    [
        {"fn": print, "nprocs": 0},
        {"fn": print, "nprocs": -1},
        {"fn": "print"},
        {"fn": print, "start_method": "fork"},
    ],
)
def test_mistakes_are_refused(arguments):
    with pytest.raises(UsageError):
        spawn(**arguments)


def test_function_that_cannot_be_sent_leaves_nothing_running():
    with pytest.raises((AttributeError, pickle.PicklingError, TypeError)):
        spawn(lambda rank: None, nprocs=2)


PARENT = """
    import sys, threading
    sys.path.insert(0, {folder!r})
    import rank_functions as functions
    from gradsync.launch.spawn import spawn

    def main():
        try:
            spawn(functions.{function}, ({place!r},), nprocs=2)
        except KeyboardInterrupt:
            sys.exit(7)

    if __name__ == "__main__":
        if {threaded}:
            thread = threading.Thread(target=main)
            thread.start()
            thread.join()
        else:
            main()
"""


def start_parent(start, tmp_path: Path, *, threaded: bool, function: str = "grow_tree"):
    place = tmp_path / "pids"
    place.mkdir()
    code = PARENT.format(
        folder=str(Path(__file__).parent),
        function=function,
        place=str(place),
        threaded=threaded,
    )
    program = tmp_path / "parent.py"
    program.write_text(textwrap.dedent(code))
    parent = start(sys.executable, program)
    wait_until(lambda: {p.name for p in place.iterdir()} >= {"0", "1"}, "the ranks run", 20)
    pids = [int(word) for rank in "01" for word in (place / rank).read_text().split()]
    assert len(pids) == (6 if function == "grow_tree" else 0)
    assert all(map(is_running, pids))
    return parent, pids


@pytest.mark.parametrize("threaded", [False, True])
def test_sigkill_of_the_parent_leaves_nothing(start, tmp_path, threaded):
    parent, pids = start_parent(start, tmp_path, threaded=threaded)
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(map(is_running, pids)), "all processes of the job are gone", 5)


def test_sigkill_of_a_rank_takes_its_children(start, tmp_path):
    parent, pids = start_parent(start, tmp_path, threaded=False)
    os.kill(pids[0], signal.SIGKILL)
    _, err = parent.communicate(timeout=10)
    assert "rank 0 of 2 failed first: killed by SIGKILL" in err
    assert not any(map(is_running, pids))


def test_ctrl_c_ends_all_in_silence(start, tmp_path):
    parent, pids = start_parent(start, tmp_path, threaded=False)
    # As a terminal does it: to every process of the foreground group.
    os.killpg(parent.pid, signal.SIGINT)
    out, err = parent.communicate(timeout=10)
    assert (parent.returncode, out, err) == (7, "", "")
    assert not any(map(is_running, pids))


def test_ctrl_c_lets_ranks_save_their_work(start, tmp_path):
    parent, _ = start_parent(start, tmp_path, threaded=False, function="clean_up_after_ctrl_c")
    os.killpg(parent.pid, signal.SIGINT)
    out, err = parent.communicate(timeout=20)
    assert (parent.returncode, out, err) == (7, "", "")
    left = {path.name for path in (tmp_path / "pids").iterdir()}
    assert left >= {f"{what} {rank}" for what in ("interrupted", "saved") for rank in (0, 1)}
