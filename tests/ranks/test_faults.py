"""What the others see when one rank dies, raises, leaves, is late or does something else."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import gradsync as dist
from gradsync.testing import faults

LOST = r"rank 1 on .* is gone \(pid \d+: "


def expect_lost(match: str) -> None:
    def reduce_on() -> None:
        for _ in range(5):
            dist.all_reduce(torch.ones(10))

    with pytest.raises(dist.PeerLostError, match=match) as caught:
        reduce_on()
    assert caught.value.ranks == (1,)
    assert caught.value.op == "all_reduce"
    # The group is broken, and says so at once.
    with pytest.raises(dist.PeerLostError):
        dist.barrier()


@pytest.mark.ranks(3, faults=[faults.kill(rank=1, at="all_reduce#3")])
def test_killed_rank_is_named():
    expect_lost(LOST + r"its process is gone: killed by signal 9 \(SIGKILL\); last call: #2")


@pytest.mark.ranks(3, faults=[faults.exit_(rank=1, at="all_reduce#1", code=3)])
def test_rank_that_exits_is_named():
    expect_lost(LOST + "its process is gone: exited with code 3; no call yet")


@pytest.mark.ranks(3)
def test_rank_that_leaves_is_named(rank):
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group()
        return
    expect_lost(LOST + "left the group before this call; last call: #1")


@pytest.mark.ranks(2, 4, faults=[faults.kill(rank=1, at="broadcast#1")])
@pytest.mark.parametrize("count", [10, 1_000_000])
def test_death_during_a_large_call_is_noticed_quickly(count):
    start = time.monotonic()
    with pytest.raises(dist.PeerLostError):
        dist.broadcast(torch.ones(count), src=0)
    assert time.monotonic() - start < 1


@pytest.mark.ranks(3)
def test_mismatch_is_raised_on_every_rank_with_the_table(rank):
    tensor = torch.full((10 + (rank == 1),), float(rank))
    before = tensor.clone()
    with pytest.raises(dist.MismatchError) as caught:
        dist.all_reduce(tensor)
    assert "all_reduce(float32[10], SUM)" in str(caught.value)
    assert "all_reduce(float32[11], SUM)" in str(caught.value)
    assert torch.equal(tensor, before)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["dtype", "reduce", "op", "root"])
def test_every_difference_is_a_mismatch(rank, kind):
    odd = rank == 1
    tensor = torch.ones(4, dtype=torch.float64 if odd and kind == "dtype" else torch.float32)
    calls = {
        "dtype": lambda: dist.all_reduce(tensor),
        "reduce": lambda: dist.all_reduce(tensor, dist.ReduceOp(rank)),
        "op": lambda: dist.barrier() if odd else dist.all_reduce(tensor),
        "root": lambda: dist.broadcast(tensor, src=rank),
    }
    with pytest.raises(dist.MismatchError):
        calls[kind]()


@pytest.mark.ranks(3, faults=[faults.delay(rank=1, at="barrier#2", seconds=1.0)])
def test_late_rank_is_named_at_the_deadline(rank, group):
    dist.barrier()
    if rank == 1:
        with pytest.raises(dist.AbortedError, match=r"gave up on call #2.*missing: 1"):
            dist.barrier()
        return
    with pytest.raises(dist.CollectiveTimeout) as caught:
        group.barrier(timeout=0.3)
    assert caught.value.ranks == (1,)
    assert isinstance(caught.value, TimeoutError)
    text = str(caught.value)
    # The first to lose patience says so for the others too.
    assert "timed out after 0.3 s." in text or "gave up on call #2" in text
    assert "Arrived: ranks 0, 2. Missing: rank 1 (pid" in text
    assert "last call: #1 barrier()" in text


@pytest.mark.ranks(2)
def test_call_that_comes_after_the_others_gave_up_has_its_own_number(rank, group):
    dist.barrier()
    if rank == 1:
        time.sleep(0.6)
        with pytest.raises(dist.AbortedError, match=r"^barrier #2 .*gave up on call #2") as caught:
            dist.barrier()
        assert caught.value.seq == 2
        return
    with pytest.raises(dist.CollectiveTimeout, match=r"^barrier #2"):
        group.barrier(timeout=0.1)
    with pytest.raises(dist.AbortedError, match="gave up on call #2"):
        group.send(torch.ones(1), 1)  # who gives up ends messages as well


@pytest.mark.ranks(2, faults=[faults.stop(rank=1, at="all_reduce#2", seconds=0.3)])
def test_stopped_rank_is_waited_for():
    for _ in range(3):
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 2


@pytest.mark.ranks(2)
def test_forked_child_gets_a_clear_error_and_harms_nobody():
    child = os.fork()
    if child == 0:
        try:
            dist.barrier()
        except dist.UsageError as error:
            os._exit(0 if "fork of rank" in str(error) else 2)
        os._exit(3)
    assert os.waitpid(child, 0)[1] == 0
    dist.barrier()  # the child's end was nobody's end


@pytest.mark.ranks(2)
def test_abort_reaches_everyone_with_its_reason(rank, group):
    if rank == 0:
        group.abort("the disk is full")
    with pytest.raises(dist.AbortedError, match="rank 0 aborted the group: the disk is full"):
        dist.barrier()


def raise_on_one(rank: int) -> None:
    dist.init_process_group(timeout=30)
    if rank == 1:
        raise ValueError("bad batch 17")
    with pytest.raises(dist.PeerLostError, match="bad batch 17"):
        dist.barrier()
    os._exit(42)  # tells the parent that all was as expected


def test_traceback_of_a_spawned_rank_reaches_the_others():
    context = dist.spawn(raise_on_one, nprocs=2, join=False)
    assert context is not None
    with pytest.raises(dist.RankFailedError, match="bad batch 17") as caught:
        context.join(grace_period=20)
    assert caught.value.rank == 1
    assert context.processes[0].exitcode == 42


def start(folder: Path, code: str, *runner: str, **env: str) -> subprocess.Popen[str]:
    """Start a script, with no launcher's variables but those given."""
    # A file of its own for each rank: one that is written again is empty for a moment, and a rank
    # that has just been started would run that, and end in silence.
    script = folder / f"script{env.get('RANK', '')}.py"
    script.write_text(code)
    rest = {k: v for k, v in os.environ.items() if not k.startswith("GRADSYNC_")}
    return subprocess.Popen(
        [sys.executable, *runner, str(script)],
        env={**rest, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


SCRIPT = """
import sys
import gradsync as dist
dist.init_process_group()
rank = dist.get_rank()
dist.barrier()
if rank == 1:
    {act}
try:
    dist.barrier()
except dist.PeerLostError as error:
    print("lost:", error)
"""


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        ("raise KeyError('the real cause')", "KeyError: 'the real cause'"),
        ("sys.exit(0)", "left the group before this call"),
    ],
)
def test_script_that_ends_early_tells_the_others_why(tmp_path, act, expected):
    script = start(tmp_path, SCRIPT.format(act=act), "-m", "gradsync", "run", "-n", "2")
    output, errors = script.communicate(timeout=60)
    assert expected in output + errors
    assert "rank 1" in output


FORMING = """
import os, sys, time
import gradsync as dist
from gradsync.backends import forming
if os.environ["RANK"] == "1":
    def fail(*args):
        time.sleep(0.3)  # until the others have seen it arrive
        {act}
    forming.reach = fail
else:
    forming._LOOK_S = {look_s}
start = time.monotonic()
try:
    dist.init_process_group(init_method="file://{tmp_path}/meet", rank=int(os.environ["RANK"]),
                            world_size=3, timeout=40)
except dist.PeerLostError as error:
    assert time.monotonic() - start < 20  # of which most is waiting for slow starters
    print("told:", error)
    sys.exit(0)
except ValueError:
    os._exit(1)  # before the others look what it had to say
"""


@pytest.mark.parametrize(
    ("act", "look_s", "expected"),
    [
        ("os.kill(os.getpid(), 9)", 0.1, "ended before the group was formed"),
        ("raise ValueError('no map')", 0.1, "failed before the group was formed: ValueError"),
        # They see its end before they look what it had to say.
        ("raise ValueError('no map')", 1.0, "failed before the group was formed: ValueError"),
    ],
)
def test_rank_that_is_lost_between_arrival_and_group_is_named(tmp_path, act, look_s, expected):
    script = FORMING.format(act=act, look_s=look_s, tmp_path=tmp_path)
    ranks = [start(tmp_path, script, RANK=str(rank)) for rank in range(3)]
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    for rank in (0, 2):
        assert f"told: rank 1 (pid {ranks[1].pid}" in outputs[rank][0], outputs
        assert expected in outputs[rank][0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("text", ["\u00e9" * 3000, "x" + "\u00e9" * 3000, "bad name \udc80"])
def test_reason_in_any_script_reaches_the_others(rank, group, text):
    if rank == 1:
        group.leave(text)
        return
    with pytest.raises(dist.PeerLostError, match=r"é{2}|udc80"):
        group.barrier()


@pytest.mark.ranks(2)
def test_broken_group_repeats_what_broke_it(rank, group):
    with pytest.raises(dist.MismatchError):
        dist.all_reduce(torch.ones(rank + 1))
    with pytest.raises(dist.MismatchError, match=r"broken since an earlier call failed: all_red"):
        dist.barrier()
    # Messages are none of its business, and serve to agree on what to do now.
    received = torch.empty(1)
    dist.isend(torch.full((1,), float(rank)), 1 - rank)
    dist.recv(received, 1 - rank)
    assert received.item() == 1 - rank


@pytest.mark.ranks(2)
def test_error_that_is_shown_but_ends_nothing_is_no_end(rank, group):
    if rank == 1:
        # What C++ code does that has nobody to raise to: torch, with a warning that is an error.
        sys.excepthook(UserWarning, UserWarning("only shown"), None)
        time.sleep(0.2)  # long enough for the other to look at us
    dist.barrier()


def test_hooks_of_others_are_called_once_after_initialising_again(tmp_path):
    script = start(
        tmp_path,
        "import sys, gradsync as dist\n"
        "dist.init_process_group()\n"
        "old = sys.excepthook\n"
        "def hook(*args):\n"
        "    print('mine')\n"
        "    old(*args)\n"
        "sys.excepthook = hook\n"
        "dist.destroy_process_group()\n"
        "dist.init_process_group()\n"
        "raise ValueError('once')\n",
    )
    output, errors = script.communicate(timeout=60)
    assert output == "mine\n"
    assert errors.count("ValueError: once") == 1
