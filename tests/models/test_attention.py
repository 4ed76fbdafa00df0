"""Every implementation of attention against the plain formula, forward and backward.

The GPU and TPU kernels run interpreted on the CPU, and are lowered for their platform without a run.
"""

import contextlib
import functools
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coevolve_jax.models import attention as attn
from coevolve_jax.models import flash, splash
from coevolve_jax.models.context_parallel import places
from coevolve_jax.models.decoder import Decoder
from coevolve_jax.models.packed import Row, Segments, meeting_blocks
from tests.support.gpus import one_gpu

pytestmark = pytest.mark.slow

VARIANTS = {
    "plain": attn.plain,
    "chunked": functools.partial(attn.chunked, size=8),
    "flash": functools.partial(attn.flash, interpret=True),
    "splash": functools.partial(attn.splash, size=128, interpret=True),
}
KERNELS = ["chunked", "flash", "splash"]


def formula(q, k, v, segment_ids, parents=None):
    """softmax(q k / sqrt(D)) v with every head and the whole mask."""
    parents = segment_ids if parents is None else parents
    L, D = q.shape[1], q.shape[3]
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    seen = (segment_ids[:, :, None] == segment_ids[:, None]) | (parents[:, :, None] == segment_ids[:, None])
    seen = seen & (jnp.arange(L)[:, None] >= jnp.arange(L))
    scores = jnp.einsum("blhd,bshd->bhls", q, k) / math.sqrt(D)
    return jnp.einsum("bhls,bshd->blhd", jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf)), v)


def with_gradient(f):
    """Jits (q, k, v, segment_ids, weight[, parents]) -> the output and the gradients of its product with
    weight.

    Both are 0 on padding, where an implementation's output may be any finite value.
    """

    def run(q, k, v, segment_ids, weight, *parents):
        real = (segment_ids > 0)[..., None, None]
        out, pull = jax.vjp(lambda *x: jnp.where(real, f(*x, segment_ids, *parents), 0), q, k, v)
        return out, pull(weight.astype(out.dtype))

    return jax.jit(run)


def inputs(length, heads, kv_heads, head_dim, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda n: rng.normal(size=(2, length, n, head_dim)).astype(np.float32)
    segments = np.array([[1] * 9 + [2] + [3] * (length - 14) + [0] * 4, [1] * length], np.int32)
    return draw(heads), draw(kv_heads), draw(kv_heads), segments, draw(heads)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("shape", [(23, 6, 2, 12), (150, 2, 2, 32)], ids=str)
def test_equals_the_formula_forward_and_backward(name, shape):
    """Covers grouped heads, packed rows, padding, and head dimensions and lengths that no block divides."""
    args = inputs(*shape)
    want, want_grads = with_gradient(formula)(*args)
    got, grads = with_gradient(VARIANTS[name])(*args)
    np.testing.assert_allclose(got, want, atol=1e-5)
    for a, b in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)


@pytest.mark.parametrize("name", KERNELS)
def test_bfloat16_stays_close_and_keeps_its_type(name):
    q, k, v, segments, weight = inputs(23, 6, 2, 12)
    half = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    for parents in ([], [np.where(segments > 1, 1, segments)]):
        want, want_grads = with_gradient(formula)(q, k, v, segments, weight, *parents)
        got, grads = with_gradient(VARIANTS[name])(*half, segments, weight, *parents)
        assert {x.dtype for x in (got, *grads)} == {jnp.dtype(jnp.bfloat16)}
        for a, b in zip((got, *grads), (want, *want_grads), strict=True):
            np.testing.assert_allclose(a.astype(np.float32), b, atol=0.12)


LONG = 300  # several blocks of every kernel
CASES = st.tuples(st.lists(st.integers(1, 23), min_size=1, max_size=8), st.integers(0, 2**31))
JITTED = {name: with_gradient(VARIANTS[name]) for name in ("plain", "chunked")}
REFERENCE = with_gradient(formula)


@settings(max_examples=12, deadline=None)
@given(CASES)
def test_any_packing_of_segments(case):
    lengths, seed = case
    q, k, v, segments, weight = inputs(23, 6, 2, 12, seed)
    packed = np.repeat(np.arange(1, len(lengths) + 1), lengths)[:23]
    segments[1] = np.pad(packed, (0, 23 - len(packed)))
    want, want_grads = REFERENCE(q, k, v, segments, weight)
    for f in JITTED.values():
        got, grads = f(q, k, v, segments, weight)
        for a, b in zip((got, *grads), (want, *want_grads), strict=True):
            np.testing.assert_allclose(a, b, atol=3e-5)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("shape", [(23, 6, 2, 12), (300, 2, 1, 32)], ids=str)
def test_prompts_that_several_segments_share(name, shape):
    """Two prompts with three branches and one, an own segment, padding; and a row without sharing."""
    q, k, v, segments, weight = inputs(*shape)
    part = shape[0] // 23
    row = np.repeat([1, 2, 3, 4, 5, 6, 7, 0], np.array([7, 3, 1, 4, 2, 2, 3, 0]) * part)
    segments[0] = np.pad(row, (0, shape[0] - len(row)))
    parents = np.stack([np.array([0, 1, 1, 1, 1, 5, 5, 7])[segments[0]], segments[1]]).astype(np.int32)
    want, want_grads = with_gradient(formula)(q, k, v, segments, weight, parents)
    got, grads = with_gradient(VARIANTS[name])(q, k, v, segments, weight, parents)
    for a, b in zip((got, *grads), (want, *want_grads), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)
    assert np.abs(want - with_gradient(formula)(q, k, v, segments, weight)[0]).max() > 0.1


@settings(max_examples=12, deadline=None)
@given(CASES)
def test_any_packing_of_segments_that_share(case):
    """A segment's parent is any earlier one of its row, or itself."""
    lengths, seed = case
    q, k, v, segments, weight = inputs(23, 6, 2, 12, seed)
    segments[1] = np.pad(np.repeat(np.arange(1, len(lengths) + 1), lengths), (0, 23))[:23]
    rng = np.random.default_rng(seed)
    before = np.array([0, *(rng.integers(1, s + 1) for s in range(1, 24))])
    parents = before[segments].astype(np.int32)
    want, want_grads = REFERENCE(q, k, v, segments, weight, parents)
    for f in JITTED.values():
        got, grads = f(q, k, v, segments, weight, parents)
        for a, b in zip((got, *grads), (want, *want_grads), strict=True):
            np.testing.assert_allclose(a, b, atol=3e-5)


# Lengths of segments, as parts of a row; the rest is padding.
LAYOUTS = st.one_of(
    st.just([LONG]),  # one segment is the whole row
    st.lists(st.integers(1, 3), min_size=1, max_size=LONG),
    st.lists(st.integers(1, LONG), min_size=1, max_size=9),
)
SPREAD = {name: with_gradient(VARIANTS[name]) for name in ("flash", "splash")}


def laid(lengths, length: int) -> np.ndarray:
    """A row's segments [1, length] of these lengths, as far as they fit."""
    row = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)[:length]
    return np.pad(row, (0, length - len(row)))[None]


@settings(max_examples=12, deadline=None)
@given(LAYOUTS, LAYOUTS, st.integers(0, 2**31))
def test_kernels_bound_to_any_segments(first, second, seed):
    """Rows have several blocks; segments begin and end anywhere."""
    q, k, v, _, weight = inputs(LONG, 2, 1, 8, seed)
    segments = np.concatenate([laid(first, LONG), laid(second, LONG)])
    want, want_grads = REFERENCE(q, k, v, segments, weight)
    for f in SPREAD.values():
        got, grads = f(q, k, v, segments, weight)
        np.testing.assert_allclose(got, want, atol=1e-5)
        for a, b in zip(grads, want_grads, strict=True):
            np.testing.assert_allclose(a, b, atol=3e-5)


def by_parts(f, parts: int):
    """The implementation f, for each part of rows by itself, as devices of a context axis run it."""

    def run(q, k, v, segment_ids, *parents):
        out = jnp.zeros(q.shape, q.dtype)
        for part in range(parts):
            own = places(part, parts, q.shape[1])
            given = (x[:, own] for x in (segment_ids, *parents))
            found = f(q[:, own], k, v, *given, row=Row(jnp.asarray(segment_ids), own))
            out = out.at[:, own].set(found)
        return out

    return run


# Rows of 24 and of 304 tokens, whose chunks of 3 and of 76 end inside blocks.
PARTS = {name: (24, with_gradient(by_parts(VARIANTS[name], 4))) for name in ("plain", "chunked")}
PARTS |= {name: (304, with_gradient(by_parts(VARIANTS[name], 2))) for name in ("flash", "splash")}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.nightly if n == "flash" else ()) for n in PARTS]
)
@settings(max_examples=8, deadline=None)
@given(case=st.tuples(LAYOUTS, LAYOUTS, st.booleans(), st.integers(0, 2**31)))
def test_parts_of_rows_give_what_the_rows_give(name, case):
    """Segments cross the borders of chunks; prompts lie in other parts; there is padding."""
    (first, second, shares, seed), (length, f) = case, PARTS[name]
    q, k, v, _, weight = inputs(length, 2, 1, 8, seed)
    segments = np.concatenate([laid(first, length), laid(second, length)])
    rng = np.random.default_rng(seed)
    before = [0, *(rng.integers(1, s + 1) if shares else s for s in range(1, length + 1))]
    given = q, k, v, segments, weight, np.array(before, np.int32)[segments]
    for a, b in zip(jax.tree.leaves(f(*given)), jax.tree.leaves(REFERENCE(*given)), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)


def test_every_part_of_a_row_takes_as_long():
    """One segment fills the row; all parts together hold the row's places once."""
    row, own = jnp.ones((1, 2048), jnp.int32), [places(part, 4, 2048) for part in range(4)]
    np.testing.assert_array_equal(np.sort(np.concatenate(own)), np.arange(2048))
    found = [flash.pairs(Segments(row[:, part], None), Row(row, part)) for part in own]
    for kernel, size in (("forward", 128), ("dq", 64), ("dkv", 64)):
        blocks = 2048 // size
        assert {int(one[kernel][0]) for one in found} == {blocks * (blocks + 1) // 2 // 4 * size**2}


@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(1, 900), min_size=1, max_size=9))
def test_kernels_multiply_the_blocks_with_a_token_that_sees_another_and_no_more(lengths):
    """Estimates count the blocks that the kernels' loops visit (NaNs prove the visits, below)."""
    segments = laid(lengths, 1536)
    seen = np.tril((segments == segments.T) & (segments > 0))
    counted = Segments(jnp.asarray(segments), None), Row.of(jnp.asarray(segments))
    for pairs, sizes in ((flash.pairs, (128, 64, 64)), (splash.pairs, (512, 512, 512))):
        for found, size in zip(pairs(*counted).values(), sizes, strict=True):
            blocks = seen.reshape(1536 // size, size, -1, size).any(axis=(1, 3))
            # A block of padding visits itself, so that its output is a number.
            assert found == (blocks | np.eye(len(blocks), dtype=bool)).sum() * size**2


@pytest.mark.parametrize("name", KERNELS)
def test_padding_costs_its_own_blocks_and_is_finite(name):
    q, k, v, _, _ = inputs(LONG, 2, 1, 8)
    segments = np.repeat([[1], [0]], LONG, 1).astype(np.int32)
    assert np.isfinite(jax.jit(VARIANTS[name])(q, k, v, segments)).all()
    row = jnp.asarray(segments[1:])
    meets, _ = meeting_blocks(Segments(row, None).blocks(64), Row.of(row).blocks(64))
    np.testing.assert_array_equal(meets, np.eye(5, dtype=bool))


BLOCKS = [("chunked", 8), ("flash", 128), ("splash", 128)]


@pytest.mark.parametrize("name, size", BLOCKS)
def test_blocks_of_other_segments_are_not_visited(name, size):
    """A NaN in a visited block would spread: no mask keeps it out of a product. Backward is alike."""
    q, k, v, _, weight = inputs(3 * size, 2, 1, 8)
    segments = np.repeat([[1, 2, 2], [1, 2, 3]], size, 1).astype(np.int32)
    first = (np.arange(3 * size) < size)[:, None, None]
    out, _ = with_gradient(VARIANTS[name])(q, k, np.where(first, np.nan, v), segments, weight)
    assert np.isnan(out[:, :size]).all() and np.isfinite(out[:, size:]).all()
    _, grads = with_gradient(VARIANTS[name])(q, k, v, segments, np.where(first, weight, np.nan))
    for grad in grads:
        assert np.isfinite(grad[:, :size]).all() and np.isnan(grad[:, size:]).all()


@pytest.mark.parametrize("name, size", BLOCKS)
def test_blocks_between_a_segment_and_what_it_shares_are_not_visited(name, size):
    q, k, v, _, _ = inputs(4 * size, 2, 1, 8)
    segments = np.repeat([[1, 2, 3, 4]] * 2, size, 1).astype(np.int32)
    parents = np.repeat([[1, 1, 1, 4]] * 2, size, 1).astype(np.int32)
    v = np.where(segments[..., None, None] == 2, np.nan, v)
    out = jax.jit(VARIANTS[name])(q, k, v, segments, parents)
    out = out.reshape(2, 4, -1)
    assert np.isnan(out[:, 1]).all() and np.isfinite(out[:, [0, 2, 3]]).all()


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_crosses_segments_or_comes_from_the_future(name):
    q, k, v, segments, _ = inputs(23, 6, 2, 12)
    attend = jax.jit(VARIANTS[name])
    before = attend(q, k, v, segments)
    here = (np.arange(23) == 12)[:, None, None]  # in segment 3 of row 0, which covers places 10 to 18
    after = attend(q, np.where(here, 7, k), np.where(here, -7, v), segments)
    changed = np.abs(after - before).max((2, 3)) > 0
    np.testing.assert_array_equal(np.flatnonzero(changed[0]), np.arange(12, 19))
    np.testing.assert_array_equal(np.flatnonzero(changed[1]), np.arange(12, 23))


def largest_tensor(text: str) -> int:
    """Elements of the largest array that a StableHLO module names."""
    sizes = re.findall(r"tensor<((?:\d+x)+)[a-z]", text)
    return max(math.prod(map(int, size.rstrip("x").split("x"))) for size in sizes)


@pytest.mark.parametrize(
    ("f", "platform", "kernel"),
    [
        (attn.flash, "cuda", "triton"),
        (attn.splash, "tpu", "tpu_custom_call"),
        (attn.chunked, "cuda", None),
        (attn.chunked, "tpu", None),
        (attn.plain, "cpu", None),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_lowers_for_its_platform_without_an_l_by_l_array(f, platform, kernel):
    """Qwen3-4B's heads, 16,384 tokens, forward and backward; `plain` shows that the measure works."""
    L, shape = 16384, lambda heads: jax.ShapeDtypeStruct((1, 16384, heads, 128), jnp.bfloat16)
    segments = jax.ShapeDtypeStruct((1, L), jnp.int32)
    args = shape(32), shape(8), shape(8), segments, shape(32)
    for parents in ([], [segments]):
        with one_gpu() if platform == "cuda" else contextlib.nullcontext():
            text = with_gradient(f).trace(*args, *parents).lower(lowering_platforms=(platform,)).as_text()
        assert (kernel or "") in text
        if f is attn.plain:
            assert largest_tensor(text) >= L * L
        else:
            assert largest_tensor(text) <= L * 32 * 128 < L * L


def test_auto_takes_the_platforms_own():
    assert [attn.choose(p, 16384) for p in ("gpu", "tpu", "cpu")] == ["flash", "splash", "chunked"]
    assert attn.choose("cpu", 512) == "plain"
    q, k, v, segments, _ = inputs(23, 6, 2, 12)
    auto = jax.jit(functools.partial(attn.attention, platform="cpu"))
    plain = jax.jit(attn.plain)
    np.testing.assert_array_equal(auto(q, k, v, segments), plain(q, k, v, segments))
    np.testing.assert_array_equal(auto(q, k, v), plain(q, k, v, np.ones((2, 23), np.int32)))


def test_an_unknown_name_is_refused():
    q, k, v, segments, _ = inputs(23, 6, 2, 12)
    with pytest.raises(ValueError, match="Attention 'fast' .*use auto, plain, chunked, flash, splash"):
        attn.attention(q, k, v, segments, "fast", platform="cpu")


def test_the_model_takes_the_named_implementation(tiny_config, monkeypatch):
    tokens = np.arange(32, dtype=np.int32)[None] % tiny_config.vocab_size
    params = jax.jit(Decoder(tiny_config).init)(jax.random.key(0), tokens)["params"]
    used = []
    noted = lambda *x: used.append(1) or attn.chunked(*x, size=8)
    monkeypatch.setitem(attn.IMPLEMENTATIONS, "chunked", noted)
    logits = {
        n: jax.jit(Decoder(tiny_config, attention=n).apply)({"params": params}, tokens)
        for n in ("plain", "chunked")
    }
    assert used
    np.testing.assert_allclose(logits["chunked"], logits["plain"], atol=1e-5)


@pytest.mark.nightly
def test_kernels_run_on_each_devices_rows_and_heads():
    """The program runs in a process of its own: JAX fixes the number of devices at its start."""
    program = """
import functools, jax, numpy as np, pytest
from coevolve_jax.distributed import sharding
from coevolve_jax.models import attention as attn
from coevolve_jax.models import context_parallel
from tests.support.gpus import as_gpus
rng = np.random.default_rng(0)
q, k, v, w = (rng.normal(size=(4, 12, h, 8)).astype(np.float32) for h in (4, 2, 2, 4))
segments = np.repeat([[1, 1, 1, 2, 2, 2, 2, 2, 3, 0, 0, 0]], 4, 0)
parents = np.minimum(segments, 1)
def run(f, *parents):
    def both(q, k, v):
        out, pull = jax.vjp(lambda *x: f(*x, segments, *parents), q, k, v)
        return out, pull(w)
    return both
mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
args = jax.device_put((q, k, v), sharding.head_sharding(mesh))
kernels = [functools.partial(f, interpret=True) for f in (attn.flash, attn.splash)]
for f in (attn.chunked, *[attn.on_each_device(kernel, mesh) for kernel in kernels]):
    for given in ([], [parents]):
        got, want = jax.jit(run(f, *given))(*args), jax.jit(run(attn.plain, *given))(q, k, v)
        assert got[0].addressable_shards[0].data.shape == (1, 12, 2, 8), got[0].sharding
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, want)
split = sharding.make_mesh(fsdp=2, context=2, tensor=2)
def of_rows(*x):
    attend = attn.on_each_device(kernels[0], split)
    out = attend(*[context_parallel.split(split, a) for a in x])
    assert out.shape == (8, 6, 4, 8)
    return context_parallel.join(split, out)
got, want = (jax.jit(run(f, parents))(q, k, v) for f in (of_rows, attn.plain))
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, want)
with pytest.raises(ValueError, match="Rows of 12 tokens .*context axis of 4.* multiples of 8"):
    context_parallel.split(sharding.make_mesh(context=4), segments)
for name, platform, on in (("flash", "cuda", as_gpus(mesh)), ("splash", "tpu", mesh)):
    given = dict(platform="cpu", parents=parents)
    spread = jax.jit(lambda q, k, v: attn.attention(q, k, v, segments, name, on, **given))
    shapes = args if on is mesh else [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    text = spread.trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
    assert {"cuda": "triton", "tpu": "tpu_custom_call"}[platform] in text and "manual_computation" in text
with pytest.raises(ValueError, match="2 key-value heads .*tensor axis of 4"):
    attn.attention(q, k, v, segments, "flash", sharding.make_mesh(tensor=4), platform="cpu")
"""
    flags = os.environ | {"XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"}
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(attn.__file__).parents[2], env=flags)
