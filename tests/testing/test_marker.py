"""The marker and the merging of outcomes, without a process."""

import pytest

from gradsync.errors import UsageError
from gradsync.testing import faults
from gradsync.testing.marker import Ranks, unavailable


def parse(*args, **kwargs) -> Ranks:
    return Ranks.parse(pytest.mark.ranks(*args, **kwargs).mark)


def test_marker_says_what_it_says():
    ranks = parse(2, 4, timeout=3, may_leave=["seed"])
    assert ranks.sizes == (2, 4)
    assert ranks.backends == ("shm",)
    assert (ranks.timeout, ranks.group, ranks.may_leave) == (3, True, ("seed",))
    assert parse(2, threads=True).backends == ("threads",)
    assert parse(2, backend=["shm", "mpi"]).backends == ("shm", "mpi")


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((0,), {}, "takes numbers of ranks"),
        (("two",), {}, "takes numbers of ranks"),
        ((2,), {"thread": True}, r"does not know thread.*threads"),
        ((2,), {"may_leave": ["sockets"]}, r"cannot leave 'sockets'.*socket"),
        ((2,), {"faults": ["kill"]}, r"faults takes .* got 'kill'"),
        ((2,), {"faults": [faults.kill(0, "allreduce#1")]}, "'allreduce', which is no operation"),
        ((2, 4), {"faults": [faults.kill(2, "*#1")]}, "on rank 2, but there are 2 ranks"),
        ((2,), {"faults": [faults.kill(0, "*#1")], "group": False}, "group=False makes none"),
        ((2,), {"threads": True, "group": False}, "group=False needs ranks that are processes"),
        ((2,), {"backend": "carrier pigeon"}, "there is no backend 'carrier pigeon'"),
    ],
)
def test_mistakes_are_named(args, kwargs, message):
    with pytest.raises(UsageError, match=message):
        parse(*args, **kwargs)


def test_reasons_for_backends_that_are_not_there():
    assert unavailable("shm") is None
    assert "no engine for 'mpi'" in unavailable("mpi")
    assert "there is no backend 'carrier pigeon'" in unavailable("carrier pigeon")
