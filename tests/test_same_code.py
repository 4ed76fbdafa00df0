"""The check of wording changes notices changed code and lets words be."""

import pytest

from tests.support.same_code import code

BEFORE = '''
"""A module."""
class A:
    """A class."""
    x: int = 1
    def f(self, a):
        """Does it."""
        # why
        if a < 0:
            raise ValueError(f"a is {a!r}: give more.")
        return "text"
'''


@pytest.mark.parametrize(
    "old, new, messages, same",
    [
        ("Does it.", "Does that.", False, True),
        ('        """Does it."""\n', "", False, True),
        ("# why", "# because", False, True),
        ("give more.", "raise it.", False, False),
        ("give more.", "raise it.", True, True),
        ("{a!r}", "{a}", True, False),
        ('"text"', '"other"', True, False),
        ("a < 0", "a <= 0", True, False),
        ("x: int = 1", "x: int = 2", True, False),
    ],
)
def test_words_may_differ_and_code_may_not(old, new, messages, same):
    assert BEFORE.count(old) == 1
    after = BEFORE.replace(old, new)
    assert (code(BEFORE, messages) == code(after, messages)) == same
