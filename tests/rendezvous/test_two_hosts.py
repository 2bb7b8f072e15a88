"""Two network namespaces stand for two hosts; a pair of virtual wires joins them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator

import pytest

MEET = """
    import json, os
    from gradsync.rendezvous import meet
    meeting = meet("tcp://10.213.7.1:{port}", rank={rank}, world_size=2, timeout={limit})
    meeting.store.set(str({rank}), b"here")
    meeting.store.multi_get(["0", "1"])
    spaces = [member.evidence.net_namespace for member in meeting.members]
    print(json.dumps(spaces), flush=True)
    input()
"""


FORM = """
    import gradsync as dist
    try:
        dist.init_process_group(
            init_method="tcp://10.213.7.1:{port}", rank={rank}, world_size=2, timeout={limit}
        )
    except dist.BackendUnavailable as error:
        print(error, flush=True)
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    names = [f"gs{os.getpid()}{side}" for side in "ab"]
    made = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("-n", names[0], "link", "add", "wire", "type", "veth", "peer", "wire", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.213.7.{number}/24", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs the right to make network namespaces: {error}")
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def start_pair(start, hosts, port: int, limit: float, tokens: tuple[str, str], code: str = MEET):
    return [
        start(
            code.format(port=port, rank=rank, limit=limit),
            prefix=("ip", "netns", "exec", hosts[rank]),
            **({"GRADSYNC_TOKEN": tokens[rank]} if tokens[rank] else {}),
        )
        for rank in range(2)
    ]


def test_hosts_meet_with_the_same_token(start, hosts):
    pair = start_pair(start, hosts, 29517, 20, ("secret-1", "secret-1"))
    spaces = [json.loads(process.stdout.readline() or "null") for process in pair]
    assert spaces[0] == spaces[1], [process.communicate("\n")[1] for process in pair]
    assert spaces[0][0] != spaces[0][1]
    for process in pair:
        process.communicate("\n", timeout=10)


def test_without_token_nothing_listens_beyond_loopback(start, hosts):
    pair = start_pair(start, hosts, 29518, 1.0, ("", ""))
    errors = [process.communicate("\n", timeout=10)[1] for process in pair]
    assert "GRADSYNC_TOKEN" in errors[0]
    assert "RendezvousError" in errors[1]
    assert "Rank 0 serves it" in errors[1]


def test_wrong_token_is_turned_away(start, hosts):
    pair = start_pair(start, hosts, 29519, 1.5, ("secret-1", "secret-2"))
    errors = [process.communicate("\n", timeout=10)[1] for process in pair]
    assert "only 1 of 2 ranks came" in errors[0]
    assert "RendezvousError" in errors[1]
    assert "token" in errors[1]


def test_hosts_that_share_a_kernel_but_no_memory_are_told_apart(start, hosts):
    """Both have one boot id and one host name: only trying shows that memory cannot be shared."""
    pair = start_pair(start, hosts, 29520, 20, ("secret-1", "secret-1"), FORM)
    for process in pair:
        output, errors = process.communicate(timeout=30)
        assert "these cannot: ranks 0 on " in output, errors
        assert "; ranks 1 on " in output
