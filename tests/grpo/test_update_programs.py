"""Absent streams cost nothing: the update's programs are equal, text for text."""

import json

import pytest

from tests.support import update_programs

pytestmark = pytest.mark.slow

RECORDED = json.loads(update_programs.DIGESTS.read_text())


@pytest.fixture(scope="module")
def digests():
    found = update_programs.versions()
    if found != RECORDED["versions"]:
        pytest.fail(
            f"tests/support/update_programs.json was made by {RECORDED['versions']}, here are {found}: run "
            "`python -m tests.support.update_programs` on a commit whose programs are known to be right, and "
            "commit it.",
            pytrace=False,
        )
    return update_programs.digests()


@pytest.mark.parametrize("name", update_programs.CASES)
def test_without_cross_entropy_and_given_references_the_program_is_the_one_recorded(digests, name):
    assert digests[name] == RECORDED["sha256"][name]
