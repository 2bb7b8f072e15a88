from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pexpect
import pytest
from watching import is_running, wait_until

from gradsync import _native


@pytest.fixture
def script(tmp_path: Path):
    def write(code: str, name: str = "program.py") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(code))
        return path

    return write


def test_help_is_quick_and_without_torch(start):
    code = """
import sys
sys.argv = ["gradsync", "run", "--help"]
from gradsync.cli.main import main
try:
    main()
except SystemExit:
    pass
assert "torch" not in sys.modules
assert "gradsync._native" not in sys.modules
"""
    begin = time.monotonic()
    out, err = start(sys.executable, "-c", code).communicate(timeout=10)
    elapsed = time.monotonic() - begin
    assert "usage: gradsync run" in out
    assert err == ""
    assert elapsed < 1.0, "alone it takes 0.05 s"


def test_launchers_live_without_torch(start):
    code = """
import sys
import gradsync.launch.run, gradsync.launch.spawn, gradsync.rendezvous
assert "torch" not in sys.modules, "torch"
"""
    process = start(sys.executable, "-c", code)
    assert process.communicate(timeout=10)[1] == ""


@pytest.mark.parametrize("word", ["auto", "cpu"])
def test_a_rank_for_each_core(gradsync_run, script, word):
    path = script("import os; print(os.environ['WORLD_SIZE'])")
    out, err = gradsync_run("-n", word, path).communicate()
    cores = _native.usable_cores()
    assert err == ""
    assert sorted(out.splitlines()) == sorted(f"[{rank}] {cores}" for rank in range(cores))


def test_ranks_get_torchruns_environment_and_ours(gradsync_run, script):
    path = script("import json, os; print(json.dumps(dict(os.environ)))")
    words = ("--standalone", "--nproc-per-node=2", path)
    out, err = gradsync_run(*words, TORCHELASTIC_USE_AGENT_STORE=True).communicate()
    assert err == ""
    ranks = {}
    for line in out.splitlines():
        prefix, _, text = line.partition(" ")
        ranks[prefix] = json.loads(text)
    assert sorted(ranks) == ["[0]", "[1]"]
    for number, env in enumerate((ranks["[0]"], ranks["[1]"])):
        for name in ("RANK", "LOCAL_RANK", "ROLE_RANK"):
            assert env[name] == str(number)
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"):
            assert env[name] == "2"
        assert (env["GROUP_RANK"], env["GROUP_WORLD_SIZE"]) == ("0", "1")
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert env["TORCHELASTIC_RESTART_COUNT"] == env["TORCHELASTIC_MAX_RESTARTS"] == "0"
        assert env["TORCHELASTIC_USE_AGENT_STORE"] == "False"
        assert env["GRADSYNC_STORE"].startswith("unix:gradsync-")
        assert int(env["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)
    for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "GRADSYNC_STORE", "GRADSYNC_TOKEN"):
        assert ranks["[0]"][name] == ranks["[1]"][name]
    assert len(ranks["[0]"]["GRADSYNC_TOKEN"]) >= 32


@pytest.mark.parametrize(
    ("words", "env", "threads"),
    [(("--threads", "3"), {"OMP_NUM_THREADS": "7"}, "3"), ((), {"OMP_NUM_THREADS": "7"}, "7")],
)
def test_threads_are_the_users_choice(gradsync_run, script, words, env, threads):
    path = script("import os; print(os.environ['OMP_NUM_THREADS'])")
    assert gradsync_run(*words, path, **env).communicate()[0] == f"{threads}\n"


def test_one_rank_writes_as_if_alone(gradsync_run, script):
    path = script(
        """
        import sys
        sys.stdout.write("10%\\r20%\\n" + sys.stdin.readline())
        sys.stderr.write("no line end")
        print(sys.argv[1:])
        """
    )
    out, err = gradsync_run(path, "-n", "5", "--threads=2").communicate("typed\n")
    assert out == "10%\n20%\ntyped\n['-n', '5', '--threads=2']\n"  # text mode reads \\r as \\n
    assert err == "no line end"


def test_modules_and_other_programs_run_too(gradsync_run, script):
    script("import sys; print('module', sys.argv[1])", "my_module.py")
    out, _ = gradsync_run("-n", 2, "-m", "my_module", "x").communicate()
    assert sorted(out.splitlines()) == ["[0] module x", "[1] module x"]
    out, _ = gradsync_run("-n", 2, "--no-python", "sh", "-c", "echo $RANK").communicate()
    assert sorted(out.splitlines()) == ["[0] 0", "[1] 1"]


def test_streams_stay_apart_and_whole_lines_stay_whole(gradsync_run, script):
    path = script(
        """
        import os, sys
        for n in range(300):
            print("o" * 200, n)
            print("e" * 200, n, file=sys.stderr)
        """
    )
    out, err = gradsync_run("-n", 3, path).communicate()
    for text, letter in ((out, "o"), (err, "e")):
        lines = text.splitlines()
        assert len(lines) == 900
        assert all(re.fullmatch(rf"\[[012]\] {letter}{{200}} \d+", line) for line in lines)


def test_lines_appear_while_ranks_run(gradsync_run, script):
    path = script("print('early'); input()")
    launcher = gradsync_run(path)
    assert launcher.stdout.readline() == "early\n"
    assert launcher.poll() is None
    launcher.communicate("\n")
    assert launcher.returncode == 0


def test_first_failure_is_reported_once_and_the_others_are_ended(gradsync_run, script):
    path = script(
        """
        import os, time
        def training():
            if os.environ["RANK"] == "1":
                raise ValueError("no such data")
            time.sleep(60)
        training()
        """
    )
    begin = time.monotonic()
    launcher = gradsync_run("-n", 3, path)
    _, err = launcher.communicate(timeout=20)
    assert launcher.returncode == 1
    assert time.monotonic() - begin < 5
    report = err[err.index("gradsync run:") :]
    assert re.search(r"rank 1 of 3 failed first: exit code 1 \(pid \d+", report)
    assert "Traceback (most recent call last):" in report
    assert "in training" in report
    assert "ValueError: no such data" in report
    assert "the other ranks were ended" in report
    assert err.count("gradsync run:") == 1


SAVING = """
    import os, sys, time
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
    time.sleep(0.5)  # until it has noticed, and has saved its work
    print("saved", flush=True)
    sys.exit(0)
"""


def test_others_may_end_by_themselves_when_a_rank_fails(gradsync_run, script):
    out, err = gradsync_run("-n", 3, "--linger", 20, script(SAVING)).communicate(timeout=15)
    assert sorted(out.split("\n")) == ["", "[0] saved", "[2] saved"]
    assert "rank 1 of 3 failed first: killed by SIGKILL" in err
    assert "the other ranks were ended" not in err
    out, _ = gradsync_run("-n", 3, script(SAVING)).communicate(timeout=15)
    assert out == ""


def test_closed_and_full_streams(start, script):
    path = script("import sys; print('out'); print('err', file=sys.stderr)")
    run = f"{sys.executable} -m gradsync run -n 2 {path}"
    closed = start("bash", "-c", f"{run} >&- <&-")
    out, err = closed.communicate(timeout=15)
    assert (closed.returncode, out) == (0, "")
    assert sorted(err.split()) == ["[0]", "[1]", "err", "err"]
    full = start("bash", "-c", f"{run} > /dev/full")
    _, err = full.communicate(timeout=15)
    assert full.returncode == 1
    assert "standard output was lost: No space left on device" in err
    nobody = start("bash", "-c", f"{run} 2>&1 | true")
    nobody.communicate(timeout=15)
    assert nobody.returncode == 0


def test_rank_that_only_lost_its_peer_is_not_the_cause(gradsync_run, script):
    path = script(
        """
        import os, signal, time
        from gradsync.errors import PeerLostError
        if os.environ["RANK"] != "1":
            raise PeerLostError("rank 1 is gone")
        time.sleep(0.6)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    launcher = gradsync_run("-n", 3, path)
    _, err = launcher.communicate(timeout=20)
    assert launcher.returncode == 1
    report = err[err.index("gradsync run:") :]
    assert "rank 1 of 3 failed first: killed by SIGKILL" in report
    assert "it wrote nothing on stderr" in report
    assert "then rank 0" in report
    assert "then rank 2" in report


TREE = """
    import os, signal, subprocess, sys, time
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    children = [
        subprocess.Popen(sleep),
        subprocess.Popen(sleep, start_new_session=True),
        subprocess.Popen(["sh", "-c", "sleep 60 & wait"]),
    ]
    print("pids", os.getpid(), *[child.pid for child in children], flush=True)
    if "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf", flush=True)
    time.sleep(60)
"""


def read_tree(launcher, ranks: int) -> list[int]:
    pids: list[int] = []
    for _ in range(ranks):
        pids += map(int, re.findall(r"\d+", launcher.stdout.readline().partition("pids")[2]))
    assert len(pids) == 4 * ranks
    assert all(map(is_running, pids))
    return pids


def test_sigkill_of_the_launcher_leaves_nothing(gradsync_run, script):
    launcher = gradsync_run("-n", 2, script(TREE))
    pids = read_tree(launcher, 2)
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not any(map(is_running, pids)), "all processes of the job are gone", 5)


def test_sigkill_of_the_launcher_at_any_moment_leaves_nothing(gradsync_run, script):
    # The fixture counts the survivors.
    path = script(TREE)
    for delay in (0.03, 0.06, 0.09, 0.12, 0.15, 0.2):
        launcher = gradsync_run("-n", 2, path)
        time.sleep(delay)
        launcher.kill()
        launcher.wait()
    time.sleep(0.3)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_end_all_and_tell_the_shell(gradsync_run, script, number, status):
    launcher = gradsync_run("-n", 2, script(TREE))
    pids = read_tree(launcher, 2)
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=10)
    assert launcher.returncode == status
    assert "gradsync run:" not in err
    assert not any(map(is_running, pids))


def test_ranks_may_clean_up_after_a_signal(gradsync_run, script):
    path = script(
        """
        import signal, sys, time
        def save(*_):
            print("saved"); sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        signal.signal(signal.SIGUSR1, lambda *_: print("warned"))
        print("ready")
        while True: time.sleep(1)
        """
    )
    launcher = gradsync_run("-n", 2, path)
    assert {launcher.stdout.readline() for _ in range(2)} == {"[0] ready\n", "[1] ready\n"}
    launcher.send_signal(signal.SIGUSR1)
    assert {launcher.stdout.readline() for _ in range(2)} == {"[0] warned\n", "[1] warned\n"}
    launcher.send_signal(signal.SIGTERM)
    out, _ = launcher.communicate(timeout=10)
    assert sorted(out.splitlines()) == ["[0] saved", "[1] saved"]
    assert launcher.returncode == 143


@pytest.mark.parametrize("how", ["grace", "twice"])
def test_deaf_ranks_are_killed(gradsync_run, script, how):
    launcher = gradsync_run("-n", 1, "--grace", 0.5 if how == "grace" else 60, script(TREE), "deaf")
    pids = read_tree(launcher, 1)
    assert launcher.stdout.readline() == "deaf\n"
    launcher.send_signal(signal.SIGTERM)
    if how == "twice":
        time.sleep(0.1)
        launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=10)
    assert launcher.returncode == 143
    assert not any(map(is_running, pids))


def test_two_jobs_at_once_never_meet_and_open_no_port(gradsync_run, script):
    path = script(
        """
        import os
        from gradsync.rendezvous import meet
        meeting = meet(timeout=20)
        meeting.store.set(str(meeting.rank), os.environ["JOB"])
        print(*[meeting.store.get(str(rank)).decode() for rank in range(2)])
        inodes = {os.readlink(f"/proc/{p}/fd/{f}") for p in (os.getpid(), os.getppid())
                  for f in os.listdir(f"/proc/{p}/fd") if os.path.islink(f"/proc/{p}/fd/{f}")}
        for table in ("tcp", "tcp6"):
            for row in open(f"/proc/net/{table}").readlines()[1:]:
                assert f"socket:[{row.split()[9]}]" not in inodes, row
        """
    )
    jobs = [gradsync_run("-n", 2, path, JOB=name) for name in "abc"]
    for name, job in zip("abc", jobs, strict=True):
        out, err = job.communicate(timeout=20)
        assert err == ""
        assert sorted(out.splitlines()) == [f"[0] {name} {name}", f"[1] {name} {name}"]


def test_job_inside_a_job_is_ended_with_it(gradsync_run, script):
    inner = script(TREE, "inner.py")
    outer = script(
        f"""
        import subprocess, sys
        subprocess.run([sys.executable, "-m", "gradsync", "run", {str(inner)!r}])
        """
    )
    launcher = gradsync_run(outer)
    pids = read_tree(launcher, 1)
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not any(map(is_running, pids)), "the inner job is gone too", 5)


def test_terminal_shows_rank_0_as_it_is(start, script):
    path = script("import os, sys; sys.stdout.write(f'{os.environ[\"RANK\"]}\\r'); print()")
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "gradsync", "run", "-n", "2", str(path)],
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=subprocess.DEVNULL,
    )
    process.wait(20)
    os.close(slave)
    text = os.read(master, 4096).decode()
    os.close(master)
    assert "[1] 1\r" in text
    assert re.search(r"(?<!\[0\] )0\r", text)
    assert "[0]" not in text


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("-n", "0", "x.py"), 2, "at least 1"),
        (("-n", "gpu", "x.py"), 2, "at least 1, or auto, got 'gpu'"),
        (("--threads", "0", "x.py"), 2, "thread"),
        (("-n", "two", "x.py"), 2, "at least 1, or auto, got"),
        ((), 2, "program"),
        (("-m", "--no-python", "x"), 2, "not allowed"),
        (("--no-python", "no-such-program"), 127, "no-such-program"),
        (("no-such-script.py",), 1, "failed first: exit code 2"),
    ],
)
def test_mistakes_on_the_command_line(gradsync_run, words, status, message):
    launcher = gradsync_run(*words)
    _, err = launcher.communicate(timeout=10)
    assert launcher.returncode == status
    assert message in err


def test_rank_0_has_a_terminal_when_the_launcher_has_one(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "size = os.get_terminal_size(1).columns if os.isatty(1) else 0\n"
        "print('rank', os.environ['RANK'], os.isatty(1), os.isatty(2), size, flush=True)\n"
    )
    command = ["-m", "gradsync", "run", "-n", "2", str(script)]
    child = pexpect.spawn(sys.executable, command, timeout=30, dimensions=(24, 97))
    try:
        child.expect(pexpect.EOF)
    finally:
        child.close(force=True)
    output = child.before.decode()
    assert "rank 0 True True 97" in output
    assert "[1] rank 1 False False 0" in output
    assert child.exitstatus == 0
