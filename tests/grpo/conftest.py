"""The parameters that several files of these tests begin with."""

import pytest

from tests.support.grpo_cases import init_params


@pytest.fixture(scope="module")
def params():
    return init_params()
