"""FileStore survives what happens to files: stale ones, racing jobs, kills at any moment."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from gradsync.errors import DistStoreError, UsageError
from gradsync.stores import FileStore, file_log
from ranks import Rank, ranks

HOLD = """
store = FileStore(sys.argv[1], int(sys.argv[2]))
store.set("from", str(os.getpid()))
say("ready"); hear()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_log, "_TAKEOVER_GRACE_S", 0.2)


# -- opening and removing -------------------------------------------------------------------------


def test_missing_folder_is_refused_at_once(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(DistStoreError, match=r"there is no directory .*/nowhere"):
        FileStore(tmp_path / "nowhere" / "store")
    assert time.monotonic() - start < 1.0


def test_folder_and_empty_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DistStoreError, match="Is a directory"):
        FileStore(tmp_path)
    with pytest.raises(UsageError, match="empty"):
        FileStore("")


def test_foreign_file_is_left_untouched(path: Path) -> None:
    path.write_text("my thesis")
    with pytest.raises(UsageError, match="no store file"):
        FileStore(path)
    assert path.read_text() == "my thesis"


def test_empty_file_is_a_fresh_store(path: Path) -> None:
    path.touch()
    assert FileStore(path).num_keys() == 0


def test_path_is_as_given_and_private(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    store = FileStore("store", 1)
    assert store.path == "store"
    assert path.stat().st_mode & 0o777 == 0o600
    monkeypatch.chdir("/")
    del store
    assert not path.exists()


@pytest.mark.parametrize(("world_size", "left"), [(-1, True), (0, False), (1, False), (2, False)])
def test_last_of_two_handles_removes_the_file(path: Path, world_size: int, left: bool) -> None:
    first, second = FileStore(path, world_size), FileStore(path, world_size)
    del first
    assert path.exists()
    del second
    assert path.exists() is left


def test_incomplete_world_leaves_the_file(path: Path) -> None:
    first, second = FileStore(path, 3), FileStore(path, 3)
    del first, second
    assert path.exists()


def test_exit_of_all_processes_removes_the_file(path: Path) -> None:
    with ranks(2, HOLD, path, 2) as both:
        for rank in both:
            rank.hear()
        for rank in both:
            rank.say()
        for rank in both:
            rank.finish()
    assert not path.exists()


def test_handles_that_leave_together_remove_the_file(path: Path) -> None:
    for _ in range(30):
        handles = [FileStore(path, 4) for _ in range(4)]
        threads = [threading.Thread(target=handle._log.leave) for handle in handles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not path.exists()


def test_survivor_removes_the_file_of_killed_ranks(path: Path) -> None:
    store = FileStore(path, 2)
    with Rank(HOLD, path, 2) as rank:
        rank.hear()
        rank.kill()
    assert path.exists()
    del store
    assert not path.exists()


def test_removed_file_does_not_disturb_its_members(path: Path) -> None:
    store, other = FileStore(path, 2), FileStore(path, 2)
    path.unlink()
    store.set("k", "v")
    assert other.get("k") == b"v"
    assert store.clone().get("k") == b"v"
    FileStore(path, 2).set("k", "another job")
    assert store.get("k") == b"v"


def test_handle_in_a_cycle_collected_under_the_lock_does_not_hang(path: Path) -> None:
    store, doomed = FileStore(path, 2), [FileStore(path, 2)]
    doomed.append(doomed)  # type: ignore[arg-type]
    del doomed
    start = time.monotonic()
    with store._log.writing(store._deadline()):
        gc.collect()
    assert time.monotonic() - start < 1.0
    del store
    assert not path.exists()


# -- stale files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [-1, 2, 3])
def test_file_of_a_killed_job_is_started_afresh(path: Path, world_size: int) -> None:
    with ranks(2, HOLD, path, world_size) as both:
        for rank in both:
            rank.hear()
    assert path.exists()
    store = FileStore(path, world_size)
    assert store.list_keys() == []
    assert store.add("n", 1) == 1


def test_file_of_a_finished_job_is_started_afresh(path: Path) -> None:
    store = FileStore(path)
    store.set("stale", "1")
    del store
    assert path.exists()
    assert not FileStore(path).check(["stale"])


def test_living_member_keeps_the_data(path: Path) -> None:
    with Rank(HOLD, path, 2) as rank:
        rank.hear()
        assert FileStore(path, 2).get("from") == str(rank.process.pid).encode()
        assert FileStore(path).get("from") == str(rank.process.pid).encode()


def test_stopped_member_counts_as_living(path: Path) -> None:
    with Rank(HOLD, path, 2) as rank:
        rank.hear()
        os.kill(rank.process.pid, signal.SIGSTOP)
        assert FileStore(path, 2).check(["from"])


# -- two jobs on one path -------------------------------------------------------------------------


def test_process_beyond_the_world_is_refused(path: Path) -> None:
    with ranks(2, HOLD, path, 2) as both:
        for rank in both:
            rank.hear()
        with pytest.raises(DistStoreError, match="another job: all 2 of its processes") as caught:
            FileStore(path, 2)
        assert f"pid {both[0].process.pid} on" in str(caught.value)
        both[0].kill()
        with pytest.raises(DistStoreError, match="another job"):
            FileStore(path, 2)
        both[1].kill()
        assert FileStore(path, 2).list_keys() == []


def test_next_job_waits_for_the_end_of_the_last(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_log, "_TAKEOVER_GRACE_S", 20.0)
    with Rank(HOLD, path, 1) as rank:
        rank.hear()
        ending = threading.Timer(0.1, rank.say)
        ending.start()
        store = FileStore(path, 1)
        ending.join()
        assert store.list_keys() == []
    store.set("k", "v")
    assert FileStore(path).get("k") == b"v"


def test_other_world_size_is_refused(path: Path) -> None:
    store = FileStore(path, 4)
    with pytest.raises(DistStoreError, match="has world_size 4, this handle has 2"):
        FileStore(path, 2)
    assert store.num_keys() == 0


def test_other_token_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(path)
    monkeypatch.setenv("GRADSYNC_TOKEN", "secret")
    with pytest.raises(DistStoreError, match="another GRADSYNC_TOKEN"):
        FileStore(path)
    del store
    assert FileStore(path).num_keys() == 0
    assert b"secret" not in path.read_bytes()


def test_racing_jobs_do_not_mix(path: Path) -> None:
    code = """
    from gradsync.stores import file_log
    from gradsync.errors import DistStoreError
    file_log._TAKEOVER_GRACE_S = 0.1
    try:
        store = FileStore(sys.argv[1], 2)
    except DistStoreError as error:
        say("refused" if "in use by another job" in str(error) else error)
    else:
        say("joined", store.add("members", 1))
        hear()
    """
    with ranks(4, code, path) as four:
        assert sorted(rank.hear() for rank in four) == [
            "joined 1",
            "joined 2",
            "refused",
            "refused",
        ]


def test_handle_that_lost_its_file_says_so(path: Path) -> None:
    store = FileStore(path)
    # What a file system that does not pass locks between hosts lets happen.
    store._log._set_lock(file_log.fcntl.F_UNLCK, file_log._MEMBER_BYTES + (store._log._slot or 0))
    other = FileStore(path)
    with pytest.raises(DistStoreError, match="taken over by a new job"):
        store.set("k", "v")
    assert other.num_keys() == 0
