"""Where does the time of an update go, piece by piece, on this machine?

    python benchmarks/profile_update.py --case=small-ragged

Each piece runs as a program of its own over the packed batch of a case of benchmarks/cases.py. It prints
medians of --repeats runs. CPU seconds stand beside those of the clock: twice as many where both of two cores
are busy. A last column gives the need of the useful tokens at the rate of a large product.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import cases
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from worker_ours import make_batch, make_learner, trajectories

from coevolve_jax.grpo.logprobs import token_logprobs
from coevolve_jax.grpo.objective import microbatch
from coevolve_jax.models.attention import attention
from coevolve_jax.models.decoder import Decoder

UPDATES = [name for name, c in cases.CASES.items() if c.kind == "update" and not c.group]
_CASE = flags.DEFINE_enum("case", "small-ragged", UPDATES, "Whose shapes.")
_ROW = flags.DEFINE_integer("pack_length", 2176, "Tokens of a packed row; a micro-batch is one row.")
_REMAT = flags.DEFINE_boolean("remat", False, "Compute layers again in the backward pass.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Runs of each piece.", lower_bound=1)


def timed(program: Callable) -> tuple[float, float]:
    """Median seconds, by the clock and of CPU, after one run that compiles."""
    jax.block_until_ready(program())
    runs = []
    for _ in range(_REPEATS.value):
        clock, processor = time.perf_counter(), time.process_time()
        jax.block_until_ready(program())
        runs.append((time.perf_counter() - clock, time.process_time() - processor))
    return tuple(map(statistics.median, zip(*runs)))


def with_gradient(function: Callable) -> Callable:
    """A program that gives the function's value and its gradient.

    The gradient is by all arguments but the last, for some change of the first output.
    """

    def both(*args):
        out, pull = jax.vjp(lambda *x: function(*x, args[-1]), *args[:-1])
        first, *others = jax.tree.leaves(out)
        change = jax.random.normal(jax.random.key(1), first.shape, first.dtype)
        return out, pull(jax.tree.unflatten(jax.tree.structure(out), [change, *map(jnp.zeros_like, others)]))

    return jax.jit(both)


def pieces(case: cases.Case, folder: Path, data: dict) -> dict[str, tuple[Callable, int]]:
    """name -> (program, how often an update runs it)."""
    setting = {"pack_length": _ROW.value, "rows_per_microbatch": 1, "remat": _REMAT.value}
    learner, params, config = make_learner(folder, setting)
    batch = make_batch(case, data, trajectories(data), config)
    micros = [microbatch(batch, i) for i in range(int(batch.used))]
    model = learner._objective.model
    c = model.config
    draw = lambda *shape: jax.random.normal(jax.random.key(len(shape)), shape)
    heads = [
        draw(1, _ROW.value, n, c.head_dim) for n in (c.num_attention_heads, *[c.num_key_value_heads] * 2)
    ]
    states = draw(1, _ROW.value, c.hidden_size)
    unembedding, axis = model.apply({"params": params}, method=Decoder.unembedding)

    def hidden(params, micro):
        return model.apply(
            {"params": params}, micro.tokens, micro.positions, micro.segment_ids, method=Decoder.hidden
        )

    def attend(q, k, v, micro):
        return attention(q, k, v, micro.segment_ids, platform="cpu")

    def score(states, unembedding, micro):
        return token_logprobs(
            states, unembedding, micro.targets, vocab_axis=axis, mask=micro.mask, chunk=config.logprob_chunk
        )

    state = learner.init(params)

    def update():
        nonlocal state
        state, _ = learner.update(state, batch)
        return state

    each = lambda program, *args: lambda: [program(*args, micro) for micro in micros]
    layers = c.num_hidden_layers
    return {
        "reference: layers": (each(jax.jit(hidden), params), 1),
        "  of which attention": (each(jax.jit(attend), *heads), layers),
        "reference: log-probabilities": (each(jax.jit(score), states, unembedding), 1),
        "policy: layers": (each(with_gradient(hidden), params), 1),
        "  of which attention ": (each(with_gradient(attend), *heads), layers),
        "policy: log-probabilities": (each(with_gradient(score), states, unembedding), 1),
        "the update": (update, 1),
    }


def needed(case: cases.Case, data: dict) -> list[float]:
    """Operations of each piece on the useful tokens: `cases.operations`, split up."""
    c = cases.model_config(case)
    logprobs = 2.0 * case.vocab_size * c["hidden_size"] * float(np.sum(data["lengths"]))
    tokens = case.prompt + data["lengths"].astype(np.float64)
    heads = c["num_attention_heads"] * c["head_dim"]
    attention = 4 * case.layers * float(np.sum(tokens * (tokens + 1) / 2)) * heads
    total = cases.operations(case, data)
    layers = total / 4 - logprobs
    return [layers, attention, logprobs, 3 * layers, 3 * attention, 3 * logprobs, total]


def main(_) -> None:
    case = cases.CASES[_CASE.value]
    data = cases.random_data(case, seed=3)
    a, product = jax.random.normal(jax.random.key(0), (2048, 2048)), jax.jit(jnp.matmul)
    rate = 2 * 2048**3 / timed(lambda: product(a, a))[0]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        cases.write(case, Path(folder))
        found = pieces(case, Path(folder), data)
    print(
        f"{case.name}, {cases.useful_tokens(case, data)} useful tokens, rows of {_ROW.value}, "
        f"{os.cpu_count()} cores, jax "
        f"{jax.__version__}, {rate / 1e9:.0f} GFLOP/s\n"
        f"{'':<32}{'seconds':>9}{'of processors':>15}{'needed':>9}"
    )
    for (name, (program, runs)), need in zip(found.items(), needed(case, data), strict=True):
        clock, processor = (runs * seconds for seconds in timed(program))
        print(f"{name:<32}{clock:9.2f}{processor:15.2f}{need / rate:9.2f}", flush=True)


if __name__ == "__main__":
    app.run(main)
