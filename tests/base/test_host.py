from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gradsync.base.host import (
    HostEvidence,
    host_evidence,
    is_dead,
    islands,
    start_time,
)
from gradsync.errors import RendezvousError, UsageError
from gradsync.rendezvous.member import Member, Party, Tombstone, decode, join_ranks


def evidence(boot_id: str, host: str = "node") -> HostEvidence:
    return HostEvidence(boot_id, host, 10, 20, 0, 4026531840, 4026531836)


def test_one_host_is_one_island():
    assert islands([evidence("A")] * 4, {0: 0, 1: 0, 2: 0, 3: 0}) == [[0, 1, 2, 3]]


def test_equal_host_names_never_make_an_island():
    twins = [evidence("A", "node"), evidence("B", "node")]
    assert islands(twins, {0: 0, 1: 0}) == [[0], [1]]
    assert islands([evidence("A", "x"), evidence("A", "y")], {0: 0, 1: 0}) == [[0, 1]]


def test_memory_that_cannot_be_mapped_splits_a_host():
    containers = [evidence("A")] * 4
    assert islands(containers, {0: 0, 1: 1, 2: 0, 3: 1}) == [[0, 2], [1, 3]]
    assert islands(containers, {}) == [[0], [1], [2], [3]]


def test_reaching_a_rank_is_reaching_its_island():
    assert islands([evidence("A")] * 3, {0: 0, 1: 0, 2: 1}) == [[0, 1, 2]]


def test_unknown_kernel_is_never_shared():
    assert islands([evidence(""), evidence("")], {0: 0, 1: 0}) == [[0], [1]]


def test_impossible_rank_is_refused():
    with pytest.raises(UsageError, match="rank 7"):
        islands([evidence("A")], {0: 7})


def test_evidence_of_this_process():
    me = host_evidence()
    assert me.pid == os.getpid()
    assert me.started == start_time(os.getpid()) > 0
    assert me.boot_id
    assert me.net_namespace == os.stat("/proc/self/ns/net").st_ino
    assert host_evidence() == me


def test_evidence_is_looked_for_anew_where_it_decides(monkeypatch):
    me = host_evidence()
    monkeypatch.setattr(os, "getuid", lambda: me.uid + 1)
    assert host_evidence() == me  # at a door, which has shown that ranks reach each other
    assert host_evidence(anew=True).uid == me.uid + 1
    monkeypatch.undo()
    assert host_evidence(anew=True) == me


def test_dead_means_seen_to_be_dead():
    me = host_evidence()
    assert not is_dead(me, me)
    assert is_dead(me._replace(started=me.started + 1), me)  # the pid was given to another
    assert not is_dead(me._replace(boot_id="elsewhere", pid=1 << 22), me)
    assert not is_dead(me._replace(pid_namespace=1, pid=1 << 22), me)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    other = me._replace(pid=child.pid, started=start_time(child.pid))
    assert not is_dead(other, me)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_dead(other, me)  # already as a zombie
    child.communicate()
    assert is_dead(other, me)


def test_records_survive_the_store():
    member = Member(1, 2, 0, host_evidence(), "ab")
    assert decode(member.encode()) == member
    tombstone = Tombstone("it rained", failed=True)
    assert decode(tombstone.encode()) == tombstone


@pytest.mark.parametrize(
    "value", [b"", b"1", b"[]", b"{}", b"\x80\x04", b'{"rank":1}', b'{"reason":1}']
)
def test_strangers_data_is_not_a_record(value):
    with pytest.raises(RendezvousError, match="introduction"):
        decode(value)


def test_lists_for_people():
    many = [Member(rank, 40, rank, evidence("A")) for rank in range(40)]
    assert Party().names(many[:1]) == "0 (pid 10 on node)"
    assert Party(called=(7,)).names(many[:1]) == "7 (pid 10 on node)"
    assert Party().names(many).endswith("and 24 more")
    assert Party().names([]) == "nobody"
    assert join_ranks([5, 1, 2, 3, 9, 10]) == "1-3, 5, 9-10"
