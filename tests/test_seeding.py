"""Randomness by (seed, purpose, step): what is drawn for one purpose says nothing of another."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coevolve_jax.seeding import NUMBERED, rng_for

draws = lambda *key: tuple(rng_for(*key).integers(2**32, size=4).tolist())


def test_the_numbered_purposes_draw_what_they_always_drew():
    assert [rng_for(7, purpose, 3, 1).integers(1000) for purpose in NUMBERED] == [
        np.random.default_rng([7, i, 3, 1]).integers(1000) for i in range(5)
    ]


def test_every_seed_purpose_step_and_repetition_has_draws_of_its_own():
    purposes = (*NUMBERED, "probe", "explore", "a purpose of mine")
    keys = [*itertools.product((0, 1), purposes, (0, 1)), *((0, p, 0, r) for p in purposes for r in (1, 2))]
    assert len({draws(*key) for key in keys}) == len(keys)


@given(st.text(), st.integers(0, 2**31), st.integers(0, 1000))
def test_any_name_is_a_purpose_and_gives_the_same_again(purpose, seed, step):
    assert draws(seed, purpose, step) == draws(seed, purpose, step)
