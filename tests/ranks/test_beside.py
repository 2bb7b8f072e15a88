"""What lives beside a rank: worker processes, subprocesses, threads; and how a rank ends."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import gradsync as dist
from gradsync.testing import faults


class Squares(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index * index


class Meddlers(Squares):
    """Items whose workers touch the group, which is their rank's alone."""

    def __getitem__(self, index):
        try:
            dist.all_reduce(torch.ones(1))
        except dist.UsageError as error:
            return str(error)
        return "no error"


# Start methods bring a server and a tracker of their own, which stay with the process.
@pytest.mark.ranks(2, timeout=60, may_leave=["process"])
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_collectives_go_on_while_data_loaders_work(rank, method):
    # One rank with workers is enough where each has to import torch.
    workers = int(rank == 0 or method == "fork")
    loader = DataLoader(
        Squares(),
        batch_size=2,
        num_workers=workers,
        multiprocessing_context=method if workers else None,
    )
    seen = []
    for batch in loader:
        total = batch.sum()
        dist.all_reduce(total)
        seen.append(int(total))
        work = dist.all_reduce(torch.ones(1), async_op=True)  # its thread is not in the workers
        assert work.wait()
    assert seen == [2, 26, 82, 170]


@pytest.mark.ranks(2)
def test_workers_that_touch_the_group_are_told_not_to():
    for text in DataLoader(Meddlers(), num_workers=1, batch_size=None):
        assert "is a fork of rank" in text
    dist.barrier()


@pytest.mark.ranks(3, faults=[faults.kill(rank=1, at="barrier#2")], timeout=30)
def test_children_do_not_keep_a_dead_rank_alive(rank, shared, tmp_path):
    """A data loader's worker, a forked child and a subprocess outlive their rank for a second."""
    folder = shared(lambda: str(tmp_path))
    if rank == 1:
        pids = []
        if (pid := os.fork()) == 0:
            time.sleep(1.5)
            os._exit(0)
        pids.append(pid)
        pids.append(subprocess.Popen(["sleep", "1.5"], close_fds=False).pid)
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1.5,))
        process.start()
        pids.append(process.pid)
        with open(f"{folder}/pids", "w") as file:
            file.write(" ".join(map(str, pids)))
    dist.barrier()
    with open(f"{folder}/pids") as file:
        pids = [int(pid) for pid in file.read().split()]
    start = time.monotonic()
    with pytest.raises(dist.PeerLostError, match="SIGKILL"):
        dist.barrier()
    assert time.monotonic() - start < 1
    for pid in pids:
        os.kill(pid, 0)  # is still there
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        time.sleep(0.05)


@pytest.mark.ranks(2, backend=["shm", "threads"])
def test_threads_use_groups_of_their_own_at_the_same_time(rank):
    groups = [dist.new_group() for _ in range(4)]
    sums: dict[int, float] = {}

    def body(number: int) -> None:
        where = groups[number % len(groups)]
        total = torch.zeros(100)
        for step in range(50):
            tensor = torch.full((100,), float(step))
            where.all_reduce(tensor)
            total += tensor
        sums[number] = total.sum().item()

    threads = [threading.Thread(target=body, args=(i,)) for i in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == dict.fromkeys(range(len(groups)), 2 * 100 * 1225.0)


def launch(tmp_path, text: str, ranks: int) -> subprocess.Popen:
    script = tmp_path / "script.py"
    script.write_text(text)
    return subprocess.Popen(
        [sys.executable, "-m", "gradsync", "run", "-n", str(ranks), str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


WAITING = """
import sys, time
import gradsync as dist
dist.init_process_group()
dist.barrier()
rank = dist.get_rank()
open(f"{sys.argv[1]}/{rank}", "w").close()
if rank == 1:
    time.sleep(60)
dist.barrier()
"""


def test_ctrl_c_ends_all_ranks_with_few_words(tmp_path):
    job = launch(tmp_path, WAITING, 2)
    while not all((tmp_path / str(rank)).exists() for rank in range(2)):
        time.sleep(0.05)
        assert job.poll() is None, job.communicate()
    time.sleep(0.1)
    start = time.monotonic()
    os.killpg(job.pid, signal.SIGINT)
    output, errors = job.communicate(timeout=30)
    assert time.monotonic() - start < 10
    assert (job.returncode, output) == (130, "")
    assert errors.count("Traceback") == 1  # that of rank 0
    assert "[1] KeyboardInterrupt at" in errors
    assert "StatusError" not in errors
    assert len(errors.splitlines()) < 20


FORKING = """
import os, sys, threading, time
import gradsync as dist
dist.init_process_group()
dist.barrier(async_op=True).wait()
child = os.fork()
if child == 0:
    assert threading.active_count() == 1
    sys.exit(3)  # runs what is registered for the end, as a rank does
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
dist.barrier()
# Worlds that are dropped while a call is in flight: its thread is the last to hold them.
for number in range(20):
    meet = f"file://{sys.argv[1]}/{dist.get_rank()}-{number}"
    world = dist.create_world(init_method=meet, rank=0, world_size=1)
    world.barrier_async().get_future().add_done_callback(lambda _: time.sleep(0.01))
    del world
# destroy_process_group is forgotten, and an asynchronous call is never waited for; the callback
# of the last world still sleeps
dist.barrier(async_op=True)
"""


def test_forks_that_exit_and_groups_that_are_forgotten_are_silent(tmp_path):
    job = launch(tmp_path, FORKING, 2)
    output, errors = job.communicate(timeout=60)
    assert (job.returncode, output, errors) == (0, "", "")
