"""What the ranks of the tests of ``spawn`` do; imports little, because every rank imports it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

from gradsync.errors import PeerLostError


def tell_environment(rank, queue):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    queue.put((rank, [os.environ[name] for name in names], os.environ["MASTER_ADDR"]))


def meet_all(rank, queue):
    from gradsync.rendezvous import meet

    meeting = meet(timeout=20)
    queue.put((meeting.rank, [member.evidence.pid for member in meeting.members]))


def meet_late(rank):
    from gradsync.rendezvous import meet

    time.sleep(0.3)
    sys.stdout.write(f"met {meet(timeout=10).rank}\n")


def fail_on(rank, failing, others_sleep_s):
    if rank == failing:
        raise KeyError("no such batch")
    time.sleep(others_sleep_s)


def lose_peer(rank):
    if rank != 2:
        raise PeerLostError("rank 2 is gone", ranks=[2])
    time.sleep(0.5)
    raise ZeroDivisionError("the cause")


def kill_yourself(rank, victim, number):
    if rank == victim:
        os.kill(os.getpid(), number)
    time.sleep(60)


def exit_with(rank, code):
    sys.exit(code)


def hang_after_failure(rank):
    threading.Thread(target=time.sleep, args=(60,)).start()
    raise ValueError("but a thread goes on")


def long_message(rank):
    raise ValueError("x" * 200_000 + "the end")


def write_and_wait(rank, folder):
    with open(f"{folder}/{rank}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(60)


def grow_tree(rank, folder):
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
    with open(f"{folder}/{rank}.tmp", "w") as file:
        file.write(" ".join(str(pid) for pid in (os.getpid(), *[c.pid for c in children])))
    os.rename(f"{folder}/{rank}.tmp", f"{folder}/{rank}")
    time.sleep(60)


def finish_late(rank, folder):
    if rank == 0:
        raise ValueError("first")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(0.3)
    with open(f"{folder}/finished", "w"):
        pass


def leave_child_behind(rank):
    # A fork that keeps every descriptor of the rank open must not keep the parent waiting.
    if os.fork() == 0:
        time.sleep(2)
        os._exit(0)


def clean_up_after_ctrl_c(rank, folder):
    open(f"{folder}/{rank}", "w").close()
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        open(f"{folder}/interrupted {rank}", "w").close()
        raise
    finally:
        time.sleep(0.3)  # to save something
        open(f"{folder}/saved {rank}", "w").close()
