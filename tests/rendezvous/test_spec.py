from __future__ import annotations

import pytest

from gradsync.errors import UsageError
from gradsync.rendezvous.place import AgentPlace, Alone, FilePlace, TcpPlace, UnixPlace
from gradsync.rendezvous.spec import parse

TORCH = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
TORCHRUN = TORCH | {
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "run-7",
    "TORCHELASTIC_RESTART_COUNT": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_nothing_set_is_a_world_of_one():
    spec = parse(None, -1, -1, {})
    assert (spec.rank, spec.world_size, spec.place) == (0, 1, Alone())


@pytest.mark.parametrize("init_method", [None, "env://"])
def test_torch_variables_are_read(init_method):
    spec = parse(init_method, -1, -1, TORCH | {"LOCAL_RANK": "0", "GRADSYNC_TOKEN": "s3cret"})
    assert (spec.rank, spec.world_size, spec.local_rank) == (1, 2, 0)
    assert spec.place == TcpPlace("node-0", 29500)
    assert spec.token == "s3cret"
    assert "s3cret" not in repr(spec)


@pytest.mark.parametrize("init_method", [None, "env://"])
@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
@pytest.mark.parametrize("how", ["absent", "empty"])
def test_partial_environment_names_the_missing_variable(init_method, missing, how):
    env = dict(TORCH)
    if how == "absent":
        del env[missing]
    else:
        env[missing] = ""
    with pytest.raises(ValueError, match=rf"\b{missing}\b"):
        parse(init_method, -1, -1, env)


def test_several_missing_variables_are_named_in_torchs_order():
    env: dict[str, str] = {}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            parse("env://", -1, -1, env)
        env[name] = TORCH[name]
    parse("env://", -1, -1, env)


def test_one_rank_by_environment_still_needs_an_address_but_opens_nothing():
    env = TORCH | {"RANK": "0", "WORLD_SIZE": "1"}
    assert parse("env://", -1, -1, env).place == Alone()
    del env["MASTER_PORT"]
    with pytest.raises(ValueError, match="MASTER_PORT"):
        parse("env://", -1, -1, env)


def test_arguments_beat_the_environment():
    spec = parse(None, 0, 4, TORCH)
    assert (spec.rank, spec.world_size) == (0, 4)
    assert parse("env://?rank=3&world_size=8", -1, -1, TORCH).rank == 3


def test_arguments_alone_need_an_address_unless_alone():
    assert parse(None, 0, 1, {}).place == Alone()
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        parse(None, 0, 2, {})
    with pytest.raises(ValueError, match="WORLD_SIZE"):
        parse(None, 0, -1, {})


def test_launchers_store_comes_first():
    env = TORCH | {"GRADSYNC_STORE": "unix:job-1"}
    assert parse(None, -1, -1, env).place == UnixPlace("job-1", launched=True)
    assert parse("env://", 0, -1, env).rank == 0
    # A URL is explicit, and a world of another size is not the launcher's.
    assert parse("tcp://a:1", 0, 2, env).place == TcpPlace("a", 1)
    assert parse(None, 5, 8, env).place == TcpPlace("node-0", 29500)
    assert parse(None, -1, 1, env).place == Alone()


@pytest.mark.parametrize("value", ["job-1", "unix:", "tcp:a:1"])
def test_malformed_launchers_store_is_refused(value):
    with pytest.raises(UsageError, match="GRADSYNC_STORE"):
        parse(None, -1, -1, TORCH | {"GRADSYNC_STORE": value})


def test_torchruns_agent_serves_and_restarts_are_kept_apart():
    spec = parse(None, -1, -1, TORCHRUN)
    assert spec.place == AgentPlace("node-0", 29500, "gradsync/run-7/3")
    assert (spec.local_rank, spec.local_world_size) == (1, 2)
    own = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert parse(None, -1, -1, own).place == TcpPlace("node-0", 29500)


@pytest.mark.parametrize("port", ["-1", "65536", "many"])
def test_bad_port_is_refused(port):
    with pytest.raises(ValueError, match="MASTER_PORT"):
        parse("env://", -1, -1, TORCH | {"MASTER_PORT": port})
    with pytest.raises(ValueError, match="tcp"):
        parse(f"tcp://host:{port}", 0, 2, {})


def test_tcp_takes_rank_and_size_from_query_or_arguments():
    assert parse("tcp://h:1?rank=1&world_size=2", -1, -1, {}).rank == 1
    spec = parse("tcp://[::1]:77?world_size=2&use_libuv=0", 0, -1, {})
    assert (spec.world_size, spec.place) == (2, TcpPlace("::1", 77))


@pytest.mark.parametrize(
    ("url", "rank", "size", "words"),
    [
        ("tcp://host", 0, 2, "port"),
        ("tcp://:29500", 0, 2, "host"),
        ("tcp://host:1", -1, 2, "rank"),
        ("tcp://host:1", 0, -1, "world_size"),
        ("tcp://host:1?rank=0", 0, 2, "twice"),
        ("tcp://host:1?rank=0&rank=1", -1, 2, "twice"),
        ("tcp://host:1?wrld=2", 0, 2, "wrld"),
        ("tcp://host:1?rank=x", -1, 2, "integer"),
        ("file://", 0, 2, "path"),
        ("file:///tmp/x", -1, 2, "rank"),
        ("file:///tmp/x", 0, -1, "world_size"),
        ("gopher://x", 0, 2, "gopher"),
        ("", 0, 2, "handler"),
        ("tcp://host:1", 2, 2, "rank"),
        ("tcp://host:1", 0, 0, "world_size"),
    ],
)
def test_bad_urls_are_the_callers_mistake(url, rank, size, words):
    with pytest.raises(UsageError, match=words) as caught:
        parse(url, rank, size, {})
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("init_method", [5, b"env://"])
def test_init_method_must_be_text(init_method):
    with pytest.raises(RuntimeError, match="string"):
        parse(init_method, -1, -1, {})


def test_rank_must_be_an_integer():
    with pytest.raises(UsageError, match="rank"):
        parse(None, "0", 2, {})  # type: ignore[arg-type]


def test_file_gives_its_path():
    assert parse("file:///tmp/a b", 0, 2, {}).place == FilePlace("/tmp/a b")
