"""Every variable is documented, and a typo is an error."""

from pathlib import Path

import pytest

from gradsync.config import VARIABLES, reject_unknown
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
