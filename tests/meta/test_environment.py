"""Every variable is documented, and a typo is an error."""

import os
from pathlib import Path

import pytest

from gradsync.config import VARIABLES, environment, reject_unknown
from gradsync.errors import UsageError

DOCS = Path(__file__).parents[2] / "docs" / "environment.md"


def test_every_variable_is_documented():
    text = DOCS.read_text()
    for variable in VARIABLES:
        assert f"`{variable.name}`" in text


def test_unknown_name_is_refused_with_the_known_ones(monkeypatch):
    monkeypatch.setenv("GRADSYNC_TOKN", "x")
    with pytest.raises(UsageError, match=r"GRADSYNC_TOKN.*GRADSYNC_TOKEN"):
        reject_unknown()


def test_there_are_few():
    assert len(VARIABLES) <= 25


def test_environment_is_that_of_the_process(monkeypatch):
    seen = environment()
    monkeypatch.setenv("GRADSYNC_SAMPLE", "caf\u00e9")
    assert seen["GRADSYNC_SAMPLE"] == seen.get("GRADSYNC_SAMPLE") == "caf\u00e9"
    assert dict(seen) == dict(os.environ)
    monkeypatch.delenv("GRADSYNC_SAMPLE")
    assert "GRADSYNC_SAMPLE" not in seen
    assert seen.get("GRADSYNC_SAMPLE", "else") == "else"
    with pytest.raises(KeyError):
        seen["GRADSYNC_SAMPLE"]
    monkeypatch.setitem(os.environb, b"GRADSYNC_SAMPLE", b"\xff")
    assert seen["GRADSYNC_SAMPLE"] == os.environ["GRADSYNC_SAMPLE"]
