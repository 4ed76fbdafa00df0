"""Randomness by (seed, purpose, step): draws for one purpose say nothing about another."""

import hashlib
import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coevolve_jax.seeding import rng_for, salted

PURPOSES = ("held_out", "initial", "sample", "rollout", "evolve", "evaluation", "probe", "a purpose of mine")
draws = lambda *key: tuple(rng_for(*key).integers(2**32, size=4).tolist())


def test_a_digest_of_all_arguments_is_the_seed():
    digest = hashlib.sha256(b'["sample", 7, 3, 1]').hexdigest()
    assert rng_for(7, "sample", 3, 1).integers(1000) == np.random.default_rng(int(digest, 16)).integers(1000)


def test_every_seed_purpose_step_and_repetition_has_draws_of_its_own():
    again = [(), (0,), (1,), (0, 0), (1, 0)]
    keys = [(s, p, t, *r) for s, p, t, r in itertools.product((0, 1, 2**32), PURPOSES, (0, 1), again)]
    assert len({draws(*key) for key in keys}) == len(keys)
    assert draws(3, "held_out") not in [
        tuple(np.random.default_rng(n).integers(2**32, size=4)) for n in (0, 3)
    ]


@given(st.text(), st.integers(0, 2**31), st.integers(0, 1000))
def test_any_name_is_a_purpose_and_gives_the_same_again(purpose, seed, step):
    assert draws(seed, purpose, step) == draws(seed, purpose, step)


def test_a_salt_gives_other_streams_and_none_gives_the_seeds_own():
    seeds, salts = range(50), range(1, 50)
    assert [salted(seed, 0) for seed in seeds] == list(seeds)
    assert len({salted(seed, salt) for seed in seeds for salt in salts} | set(seeds)) == 50 * 50
    digest = hashlib.sha256(b'["salt", 7, 3]').hexdigest()
    assert salted(7, 3) == salted(7, 3) == int(digest[:16], 16)
