"""Measures an update and the in-process engine at a real model's size, with random weights, on this device.

    JAX_PLATFORMS= python benchmarks/full_size.py --config=configs/bfcl_qwen3_4b.py --output=full_size.json

Weights of the architecture of config.model are drawn on the device, so no checkpoint is needed. Two batches
are updated on: rollouts that fill a row each, and rollouts with BFCL's lengths, packed. Beside the seconds
stand the share of the published peak (MFU) and the memory, measured and planned. The engine then samples
for --slots conversations at once.
"""

import functools
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from ml_collections import config_flags

from coevolve_jax import event_loop
from coevolve_jax.distributed import sharding
from coevolve_jax.grpo.learner import Learner
from coevolve_jax.grpo.packing import Batch, pack
from coevolve_jax.models import hf_io
from coevolve_jax.models.decoder import ModelConfig
from coevolve_jax.planning import plan
from coevolve_jax.planning.aot import batches
from coevolve_jax.planning.topologies import GB, PEAKS
from coevolve_jax.rollout.engine import Request, Sampling
from coevolve_jax.rollout.native.engine import NativeEngine

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file whose model is measured.")
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write; rewritten after each measurement.")
_PARTS = flags.DEFINE_list("parts", ["full", "packed", "engine"], "What to measure.")
_LENGTH = flags.DEFINE_integer("pack_length", 0, "Tokens of a row; 0: config.learner.pack_length.")
_ROWS = flags.DEFINE_integer("rows", 2, "Rows of the full batch; a micro-batch is one row.", lower_bound=1)
_GROUPS = flags.DEFINE_integer("groups", 4, "Groups of the packed batch.", lower_bound=1)
_LENGTHS = flags.DEFINE_list("lengths", ["2600", "700"], "Mean tokens of its prompts, and of what follows.")
_SLOTS = flags.DEFINE_integer("slots", 64, "Conversations of the engine at once.", lower_bound=1)
_PROMPT = flags.DEFINE_integer("prompt", 1024, "Tokens of a prompt of the engine.", lower_bound=1)
_NEW = flags.DEFINE_integer("new", 256, "Tokens that each conversation samples.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Runs of each measurement, after one that compiles.")


def drawn(model: ModelConfig, dtype: str, seed: int):
    """Random parameters on the device: kernels of the usual spread, scales of norms 1."""

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def leaf(key, shape, name):
        if name == "scale":
            return jnp.ones(shape, dtype)
        return (0.02 * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    shapes, tree = jax.tree_util.tree_flatten_with_path(hf_io.abstract_params(model))
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return jax.tree.unflatten(tree, [leaf(k, x.shape, path[-1].key) for k, (path, x) in zip(keys, shapes)])


def batch_of(kind: str, model: ModelConfig, config, rows: int) -> Batch[np.ndarray]:
    """A batch of random tokens with the lengths of `kind`, and half of the rollouts successful."""
    size = config.rollout.group_size
    made = (
        batches.full_rows(_ROWS.value, config.learner.pack_length)
        if kind == "full"
        else batches.made_up(
            _GROUPS.value, size, batches.Lengths(*map(int, _LENGTHS.value)), config.learner.pack_length
        )
    )
    rng = np.random.default_rng(0)
    for i, sample in enumerate(made):
        t = sample.trajectory
        t.ids[:] = rng.integers(0, model.vocab_size, len(t.ids))
        if kind == "packed":  # a group shares its prompt
            first = made[i - i % size].trajectory
            prompt = int(np.argmax(first.mask))
            t.ids[:prompt] = first.ids[:prompt]
        t.logprobs[:] = np.where(t.mask, -np.log(model.vocab_size), 0)
        sample.advantages[:] = 1.0 if i % 2 else -1.0
    return pack(
        made,
        pack_length=config.learner.pack_length,
        rows_per_microbatch=1,
        max_rows=rows,
        prefix_sharing=config.learner.prefix_sharing,
    )


def seconds_of(call) -> tuple[float, list[float]]:
    """Seconds of the first call, which compiles, and of --repeats later ones."""
    found = []
    for _ in range(1 + _REPEATS.value):
        start = time.perf_counter()
        jax.block_until_ready(call())
        found.append(time.perf_counter() - start)
    return found[0], found[1:]


def peak_gb() -> float | None:
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use", 0) / GB or None


def updates(config, model: ModelConfig, kinds: list[str]):
    """Yields a name and figures: the plan's, then for each kind of batch. One program serves them all."""
    mesh = sharding.make_mesh()
    params = drawn(model, "float32", 0)
    reference = jax.tree.map(lambda x: x.astype(config.learner.dtype), params)
    learner = Learner(
        model, config.learner, reference, temperature=config.rollout.temperature, mesh=mesh, seed=0
    )
    if not learner.keeps_reference:
        del reference
    state = learner.init(params)
    del params
    planned = plan.plan(model, config.learner, mesh, rows=1, length=config.learner.pack_length)
    rows = max(_ROWS.value, _GROUPS.value * config.rollout.group_size)
    yield "planned_gb", planned.total / GB
    peak = PEAKS.get(jax.devices()[0].device_kind)
    for kind in kinds:
        batch = batch_of(kind, model, config, rows)

        def step():
            nonlocal state
            state, metrics = learner.update(state, batch)
            return metrics

        first, later = seconds_of(step)
        last = step()
        if not (bool(last["finite"]) and bool(last["applied"])):
            raise ValueError(f"The update of {kind} rows was not applied: {last}.")
        real = batch.segment_ids[: int(batch.used)] > 0
        median, operations = float(np.median(later)), learner.flops(batch, 1)
        figures = {
            "rows": int(batch.used),
            "tokens": int(real.sum()),
            "learned": int(batch.mask.sum()),
            "first_seconds": first,
            "seconds": later,
            "tokens_per_second": real.sum() / median,
            "tflops": operations / median / 1e12,
            "mfu": peak and operations / median / peak,
            "peak_gb": peak_gb(),  # so far, in this process
            "grad_norm": float(last["grad_norm"]),
        }
        print(kind, json.dumps(figures), flush=True)
        yield kind, figures


def engine(config, model: ModelConfig) -> dict:
    """Samples --new tokens for each of --slots conversations with a prompt of their own."""
    params = drawn(model, "bfloat16", 0)
    made = NativeEngine(
        model,
        params,
        slots=_SLOTS.value,
        cache_tokens=_SLOTS.value * -(-(_PROMPT.value + _NEW.value) // 512) * 512
        if config.engine.cache_tokens
        else 0,
        max_length=_PROMPT.value + _NEW.value,
        max_new_tokens=_NEW.value,
        seed=0,
        dtype=jnp.bfloat16,
    )
    rng, served = np.random.default_rng(0), 0

    def sample(new: int) -> int:
        nonlocal served
        ids = range(served, served := served + _SLOTS.value)
        prompts = rng.integers(0, model.vocab_size, (_SLOTS.value, _PROMPT.value)).astype(np.int32)
        asked = [Request(i, p, Sampling(1.0, new), seed=i) for i, p in zip(ids, prompts)]
        answers = event_loop.run(made.generate(asked))
        made.release(ids)
        return sum(len(a.ids) for a in answers)

    times: dict = {}
    for name, new in (("prompts_and_one_token", 1), ("whole", _NEW.value)):
        times[name] = dict(zip(("first_seconds", "seconds"), seconds_of(lambda n=new: sample(n))))
    feed, whole = (float(np.median(times[name]["seconds"])) for name in times)
    rate = _SLOTS.value * (_NEW.value - 1) / (whole - feed)
    found = {
        **times,
        "prompt_tokens_per_second": _SLOTS.value * _PROMPT.value / feed,
        "sampled_tokens_per_second": rate,
        "milliseconds_per_token_of_all": 1e3 * _SLOTS.value / rate,
        "peak_gb": peak_gb(),
    }
    made.close()
    print("engine", json.dumps(found), flush=True)
    return found


def main(argv) -> None:
    if len(argv) > 1:
        sys.exit(f"Error: unexpected argument {argv[1]!r}: options begin with --, see --help.")
    config = _CONFIG.value
    with config.unlocked():
        config.learner.pack_length = _LENGTH.value or config.learner.pack_length
        config.learner.rows_per_microbatch = 1
    model = plan.load_model(config.model)
    first = jax.devices()[0]
    found: dict = {
        "model": config.model,
        "device": first.device_kind,
        "jax": jax.__version__,
        "pack_length": config.learner.pack_length,
        "memory_gb": ((first.memory_stats() or {}).get("bytes_limit") or 0) / GB or None,
        "slots": _SLOTS.value,
        "prompt": _PROMPT.value,
        "new": _NEW.value,
    }
    write = lambda: _OUTPUT.value and Path(_OUTPUT.value).write_text(json.dumps(found, indent=1))
    if kinds := [kind for kind in _PARTS.value if kind != "engine"]:
        found["update"] = {}
        for name, figures in updates(config, model, kinds):
            found["update"][name] = figures
            write()
    if "engine" in _PARTS.value:
        found["engine"] = engine(config, model)
        write()


if __name__ == "__main__":
    flags.mark_flags_as_required(["config"])
    app.run(main)
