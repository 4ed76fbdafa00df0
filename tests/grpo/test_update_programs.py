"""Absent streams cost nothing: the update's programs are equal, text for text."""

import pytest

from tests.support import update_programs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def digests():
    """The digests here, and those that were recorded."""
    here, recorded = update_programs.versions(), update_programs.recorded()
    if here not in recorded:
        pytest.fail(
            f"tests/support/update_programs.json knows {'; '.join(recorded)}, and here is {here}: run "
            "`python -m tests.support.update_programs` on a commit whose programs are right, and commit it.",
            pytrace=False,
        )
    return update_programs.digests(), recorded[here]


@pytest.mark.parametrize("name", update_programs.CASES)
def test_without_cross_entropy_and_given_references_the_program_is_the_one_recorded(digests, name):
    here, recorded = digests
    assert here[name] == recorded[name]
