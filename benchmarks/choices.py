"""Measures the machine's matrix rate, and the value of some choices of this code.

    python benchmarks/choices.py

Each choice takes turns with its alternative, on the demo's shapes (models/tiny_qwen3) unless others are
named. It prints medians of --repeats runs after one to compile.
"""

import os
import statistics
import time

import jax
import jax.numpy as jnp
from absl import app, flags

from coevolve_jax.grpo.logprobs import token_logprobs
from coevolve_jax.models import attention, blockwise, hf_io
from coevolve_jax.rollout.native import sample_token

_REPEATS = flags.DEFINE_integer("repeats", 15, "Runs of each program.", lower_bound=1)
_MODEL = flags.DEFINE_string("model", "models/tiny_qwen3", "Whose shapes are timed.")
ROWS, LENGTH = 8, 512


def timed(**programs) -> dict[str, float]:
    """Median seconds of each program; the programs take turns."""
    seconds = {name: [] for name in programs}
    for _ in range(_REPEATS.value + 1):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(s[1:]) for name, s in seconds.items()}


def bind(function, *args):
    """A program without arguments whose inputs are not compiled in."""
    compiled = jax.jit(function)
    return lambda: compiled(*args)


def main(_) -> None:
    config, params = hf_io.load(_MODEL.value)
    random = lambda *shape: jax.random.normal(jax.random.key(len(shape)), shape)
    a = random(2048, 2048)
    rate = 2 * 2048**3 / timed(matmul=bind(jnp.matmul, a, a))["matmul"]
    print(
        f"{os.cpu_count()} cores, jax {jax.__version__}: {rate / 1e9:.0f} GFLOP/s in a float32 product of "
        f"2048 x 2048"
    )

    # The layers' stream as one matrix, or with its rows apart.
    mlp = jax.tree.map(lambda x: x[0], params["layers"]["mlp"])

    def mlp_loss(p, x):
        kernel = lambda name: p[name]["kernel"]
        return jnp.sum((jax.nn.silu(x @ kernel("gate_proj")) * (x @ kernel("up_proj"))) @ kernel("down_proj"))

    rows = random(2 * ROWS, LENGTH, config.hidden_size)
    both = jax.grad(mlp_loss, argnums=(0, 1))
    show(
        "MLP of 8,192 tokens, forward and backward: stream [B, L, D], [B * L, D]",
        apart=bind(both, mlp, rows),
        joined=bind(both, mlp, rows.reshape(-1, config.hidden_size)),
    )

    # Causal attention in blocks of queries, or in one.
    q = random(ROWS, LENGTH, config.num_attention_heads, config.head_dim)
    k = random(ROWS, LENGTH, config.num_key_value_heads, config.head_dim)
    segments = jnp.ones((ROWS, LENGTH), jnp.int32)

    def attention_loss(blocks):
        def loss(q, k):
            attention.BLOCKS, kept = blocks, attention.BLOCKS  # read when traced
            out = jnp.sum(attention.attention(q, k, k, segments, platform="cpu"))
            attention.BLOCKS = kept
            return out

        return jax.grad(loss, argnums=(0, 1))

    show(
        f"attention of {ROWS} rows of {LENGTH}, forward and backward: 1 block, {attention.BLOCKS} blocks",
        one=bind(attention_loss(1), q, k),
        blocks=bind(attention_loss(attention.BLOCKS), q, k),
    )

    # Packed rows: products over short rows, or one long row that skips blocks of other segments.
    packed = jnp.repeat(jnp.arange(1, 1 + ROWS * LENGTH // 256), 256)
    skipping = jax.grad(lambda q, k, s: jnp.sum(attention.chunked(q, k, k, s)), argnums=(0, 1))
    whole = jax.grad(lambda q, k, s: jnp.sum(attention.plain(q, k, k, s)), argnums=(0, 1))
    as_one = lambda x: x.reshape(1, -1, *x.shape[2:])
    show(
        f"attention of {len(packed)} tokens in segments of 256, forward and backward: plain, chunked",
        plain=bind(whole, q, k, packed.reshape(ROWS, LENGTH)),
        chunked=bind(skipping, as_one(q), as_one(k), packed[None]),
    )

    # Segments that share a prompt: small blocks, or large ones.
    prompt, length, count = 512, 256, 6
    shared = jnp.repeat(jnp.arange(1, count + 2), jnp.array([prompt] + [length] * count))[None]
    rows = [random(1, prompt + length * count, *x.shape[2:]) for x in (q, k, k)]

    def block_loss(size):
        attend = lambda *x: jnp.sum(attention.chunked(*x, shared, jnp.ones_like(shared), size=size))
        return jax.grad(attend, argnums=(0, 1, 2))

    sizes = blockwise.SMALL_BLOCK, blockwise.LARGE_BLOCK
    show(
        f"attention of {count} segments of {length} after one prompt of {prompt}, forward and backward: "
        f"blocks of {sizes[0]}, of {sizes[1]}",
        small=bind(block_loss(sizes[0]), *rows),
        large=bind(block_loss(sizes[1]), *rows),
    )

    # Log-probabilities in a large vocabulary: all at once, or tile by tile.
    states, table, targets = random(512, 256), random(151936, 256), jnp.arange(512)

    def score(whole):
        total = lambda h, w: jnp.sum(token_logprobs(h, w, targets, vocab_axis=0, chunk=512, whole=whole)[0])
        return bind(jax.grad(total, argnums=(0, 1)), states, table)

    show(
        "log-probabilities of 512 tokens of 151,936, forward and backward: whole, in tiles",
        whole=score(True),
        tiles=score(False),
    )

    # Sampling from it: one running sum, or the sums of blocks and then one within a block.
    logits, keys = random(64, 151936), jax.random.split(jax.random.key(0), 64)
    ones = jnp.ones(64)

    def running_sum(x):
        mass = jnp.cumsum(jax.nn.softmax(x), axis=-1)
        return jnp.sum(mass < jax.vmap(jax.random.uniform)(keys)[:, None] * mass[:, -1:], axis=-1)

    show(
        "sampling 64 tokens of 151,936: one step, two steps",
        one=bind(running_sum, logits),
        two=bind(
            lambda x: sample_token.sample(x, ones, sample_token.draw(keys, x.shape[1]), ones > 0), logits
        ),
    )


def show(title: str, **programs) -> None:
    seconds = timed(**programs)
    print(f"{title}: {', '.join(f'{1e3 * s:.1f} ms' for s in seconds.values())}")


if __name__ == "__main__":
    app.run(main)
