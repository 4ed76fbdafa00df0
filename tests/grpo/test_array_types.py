"""The array shapes and types in grpo/'s signatures are true."""

import inspect
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import jaxtyped

from coevolve_jax.grpo import advantages, logprobs, losses
from coevolve_jax.grpo.packing import Batch, pack
from tests.support.grpo_cases import samples, trajectory

R, L, D, V = 2, 5, 3, 7
FLOATS = jnp.linspace(-1.0, 1.0, R * L).reshape(R, L)
MASK, SEGMENTS = FLOATS > 0, jnp.ones((R, L), jnp.int32)
HIDDEN, TARGETS = jnp.ones((R, L, D)), jnp.ones((R, L), jnp.int32)

# function -> arguments that its signature allows
CALLS = {
    losses.segment_sums: (FLOATS, SEGMENTS),
    losses.sequence_mean: (FLOATS, MASK, SEGMENTS),
    losses.log_ratio: (FLOATS, FLOATS, MASK, SEGMENTS, "sequence"),
    losses.clipped_surrogate: (FLOATS, FLOATS, 0.2, 0.2),
    losses.truncated_weight: (FLOATS, FLOATS, 2.0),
    losses.proximal_logprobs: (FLOATS, FLOATS, SEGMENTS),
    losses.kl: (FLOATS, FLOATS, "k3"),
    losses.token_weights: (MASK, SEGMENTS, "sequence"),
    losses.denominator: (MASK[None], SEGMENTS[None], "constant", 3),
    losses.cross_entropy: (FLOATS, FLOATS),
    losses.ce_denominator: (FLOATS[None],),
    logprobs.token_logprobs: (HIDDEN, jnp.ones((D, V)), TARGETS),
    advantages.group_advantages: ([1.0, 0.0],),
}


def conforms(value, hint) -> bool:
    if typing.get_origin(hint) is tuple:
        return all(map(conforms, value, typing.get_args(hint)))
    arrays = [h for h in (hint, *typing.get_args(hint)) if hasattr(h, "array_type")]
    return not arrays or isinstance(value, hint)


def wrong(function, args) -> list[str]:
    """Names of the arguments, or "return", that break the signature; sizes of equal name must be equal."""
    hints = typing.get_type_hints(function)
    with jaxtyped("context"):
        given = inspect.signature(function).bind(*args).arguments
        found = [name for name, value in given.items() if not conforms(value, hints[name])]
        return found or ["return"] * (not conforms(function(*args), hints["return"]))


@pytest.mark.parametrize("function", CALLS, ids=lambda f: f.__name__)
def test_signatures_are_true(function):
    args = CALLS[function]
    assert wrong(function, args) == []
    for i, arg in enumerate(args):  # an extra axis, which a wrong signature would allow
        if isinstance(arg, jax.Array):
            assert wrong(function, (*args[:i], arg[None, None], *args[i + 1 :])) != []


def test_no_function_is_left_out():
    public = {
        function
        for module in (losses, logprobs)
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__ and name[0] != "_"
    }
    takes_no_array = {logprobs.block_columns, losses.uses_kl, losses.uses_ages}
    assert public - takes_no_array == CALLS.keys() - {advantages.group_advantages}


def test_a_batch_is_what_it_says():
    rng = np.random.default_rng(0)
    found = samples([trajectory(rng, 20), trajectory(rng, 30)], [1, 2])
    batch = pack(found, pack_length=32, rows_per_microbatch=2, max_rows=2, version=3)
    hints = typing.get_type_hints(Batch)
    with jaxtyped("context"):
        bad = [name for name, x in batch._asdict().items() if x.size and not isinstance(x, hints[name])]
    assert bad == [] and set(batch._fields) == set(hints)
    assert {type(x) for x in batch} == {np.ndarray}
