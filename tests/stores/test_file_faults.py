"""FileStore under kills, damage, forks and many users at once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from gradsync.errors import DistStoreError, StoreTimeout
from gradsync.stores import FileStore
from ranks import Rank, ranks


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


# -- kills ----------------------------------------------------------------------------------------


def test_kills_at_random_moments_tear_nothing(path: Path) -> None:
    code = """
    store = FileStore(sys.argv[1])
    say("ready")
    number = 0
    while True:
        number += 1
        value = str(number).encode() * 3000
        store.multi_set(["a", "b"], [value, value])
        store.add("n", 1)
    """
    chance = random.Random(7)
    store, last = FileStore(path), 0
    with ranks(12, code, path) as victims:
        for victim in victims:
            victim.hear()
        for victim in victims:
            time.sleep(chance.uniform(0, 0.02))
            victim.kill()
            a, b = store.multi_get(["a", "b"])
            assert a == b
            count = store.add("n", 1)
            assert count > last
            last = count
    assert sorted(store.list_keys()) == ["a", "b", "n"]
    assert FileStore(path).multi_get(["a", "n"]) == store.multi_get(["a", "n"])


@pytest.mark.parametrize("kept", [1, 11, 12, 20, -1])
def test_torn_record_is_ignored_and_cut_off(path: Path, kept: int) -> None:
    store, other = FileStore(path), FileStore(path)
    store.set("k", "before")
    whole = path.stat().st_size
    store.set("k", "torn record")
    torn = path.read_bytes()[whole:][:kept]
    os.truncate(path, whole + len(torn))
    reader = FileStore(path)
    assert other.get("k") == b"before"
    reader.set("l", "after")
    assert other.multi_get(["k", "l"]) == [b"before", b"after"]
    assert FileStore(path).multi_get(["k", "l"]) == [b"before", b"after"]


def test_flipped_bit_at_the_end_is_noticed(path: Path) -> None:
    store, other = FileStore(path), FileStore(path)
    store.set("k", "before")
    store.set("k", "damaged")
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    assert other.get("k") == b"before"


def test_lock_of_a_killed_holder_is_free_at_once(path: Path) -> None:
    code = """
    store = FileStore(sys.argv[1])
    with store._log.writing(store._deadline()):
        say("locked"); hear()
    """
    store = FileStore(path)
    with Rank(code, path) as holder:
        holder.hear()
        store.set_timeout(0.1)
        start = time.monotonic()
        with pytest.raises(StoreTimeout, match=rf"could not lock .* pid {holder.process.pid} on"):
            store.set("k", "v")
        assert 0.1 <= time.monotonic() - start < 1.0
        holder.kill()
        store.set("k", "v")
    assert store.get("k") == b"v"


def test_full_disk_is_a_clear_error_and_passes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(path)
    store.set("k", "v")
    real = os.pwrite

    def short_of_space(fd: int, data: memoryview, at: int) -> int:
        if len(data) < 20:
            raise OSError(28, "No space left on device")
        return real(fd, data[:20], at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", short_of_space)
        with pytest.raises(DistStoreError, match="No space left"):
            store.set("k", "a longer value than fits")
    assert store.get("k") == b"v"
    store.set("k", "w")
    assert FileStore(path).get("k") == b"w"


# -- forks and threads ----------------------------------------------------------------------------


def run_forked(code: str, path: Path) -> str:
    """Run a snippet that forks in a process of its own: pytest has threads."""
    with Rank(code, path) as rank:
        return rank.finish()


def test_forked_child_leaves_the_parents_file_alone(path: Path) -> None:
    code = """
    store = FileStore(sys.argv[1], 1)
    store.set("k", "v")
    for use in (False, True):
        pid = os.fork()
        if not pid:
            if use:
                store.set("from child", store.get("k"))
            sys.exit(0)  # runs the finalizers, as a plain end of the script would
        assert os.waitpid(pid, 0)[1] == 0
        assert os.path.exists(sys.argv[1])
    say(store.get("from child"), store.add("n", 1), sorted(store.list_keys()))
    """
    assert run_forked(code, path) == "b'v' 1 ['from child', 'k', 'n']"
    assert not path.exists()


def test_forked_child_keeps_no_lock_of_a_killed_parent(path: Path) -> None:
    code = """
    store = FileStore(sys.argv[1])
    locked, go = threading.Event(), threading.Event()
    def hold():
        with store._log.writing(store._deadline()):
            locked.set(); go.wait()
    threading.Thread(target=hold, daemon=True).start()
    locked.wait()
    child = os.fork()
    if not child:
        sys.stdin.close(); time.sleep(30); os._exit(0)
    say(child); hear()
    """
    with Rank(code, path) as parent:
        child = int(parent.hear())
        try:
            parent.process.kill()
            parent.process.wait()
            store = FileStore(path)
            store.set_timeout(2.0)
            store.set("k", "v")
            assert store.list_keys() == ["k"]
        finally:
            os.kill(child, signal.SIGKILL)


def test_child_that_uses_the_handle_keeps_the_job_alive(path: Path) -> None:
    code = """
    store = FileStore(sys.argv[1], 1)
    store.set("k", "v")
    if os.fork():
        os._exit(0)
    store.set("child", str(os.getpid()))
    say("ready"); hear(); os._exit(0)
    """
    with Rank(code, path) as rank:
        rank.hear()
        assert FileStore(path).get("k") == b"v"
        rank.say()
        rank.process.stdout.read()  # type: ignore[union-attr]  # ends with the child


def test_subprocess_inherits_nothing(path: Path) -> None:
    store = FileStore(path, 1)
    inside = "import os; print([os.readlink(f'/proc/self/fd/{n}') for n in range(3, 20) " + (
        "if os.path.exists(f'/proc/self/fd/{n}')])"
    )
    out = subprocess.run(["python3", "-c", inside], capture_output=True, text=True, check=True)
    assert str(path) not in out.stdout
    assert store.num_keys() == 0


def test_counts_of_many_processes_add_up(path: Path) -> None:
    code = """
    store = FileStore(sys.argv[1], 4)
    for _ in range(100):
        store.add("n", 1)
    store.barrier("done", 4)
    say(store.get("n"))
    """
    with ranks(4, code, path) as four:
        assert [rank.finish() for rank in four] == ["b'400'"] * 4
    assert not path.exists()


def test_one_handle_serves_many_threads(path: Path) -> None:
    store = FileStore(path)

    def work(number: int) -> None:
        for _ in range(25):
            store.add("n", 1)
        store.set(f"done{number}", "1")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    store.wait([f"done{n}" for n in range(4)], timedelta(seconds=20))
    for thread in threads:
        thread.join()
    assert store.get("n") == b"100"


def test_reads_are_incremental(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = FileStore(path), FileStore(path)
    store.set("large", b"x" * 1_000_000)
    other.get("large")
    read: list[int] = []
    real = os.pread
    monkeypatch.setattr(
        os, "pread", lambda fd, length, at: read.append(length) or real(fd, length, at)
    )
    store.set("small", b"y")
    assert other.get("small") == b"y"
    assert 0 < sum(read) < 500
