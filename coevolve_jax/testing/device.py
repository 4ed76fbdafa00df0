"""Checks of an accelerator: kernels against plain code, the engine against the CPU, speeds, short training.

`checks` lists them. Each returns its figures, or raises ValueError with one sentence. On a CPU the kernels
run interpreted, on small arrays, so that the checks themselves are tested.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from coevolve_jax import build, shipped
from coevolve_jax import config as configs
from coevolve_jax.models.attention import IMPLEMENTATIONS, plain
from coevolve_jax.models.grouped_matmul import grouped_matmul
from coevolve_jax.planning.topologies import PEAKS
from coevolve_jax.rollout.engine import Request, Sampling
from coevolve_jax.rollout.native.engine import NativeEngine

TINY = "models/tiny_qwen3"
CLOSE = 0.03  # of the largest value: bfloat16 inputs, sums in other orders
SAME = 1e-2  # nats
PAGES = 4096  # tokens of a cache in pages
KERNELS = {"gpu": ("flash",), "tpu": ("splash",), "cpu": ("flash", "splash")}
PROMPTS = ("List the files here.", "Open a ticket about the login page.", "Post 'done'.", "Who is on call?")


class Size(NamedTuple):
    """length: of a row, in tokens. side: of square matrices. copied: bytes. steps: of GRPO."""

    length: int
    heads: int
    head_dim: int
    side: int
    copied: int
    steps: int


FULL = Size(length=4096, heads=8, head_dim=64, side=8192, copied=2**30, steps=10)
SMALL = Size(length=256, heads=2, head_dim=32, side=256, copied=2**22, steps=1)


class LeftOut(Exception):
    """A check that cannot be made here. Its text says what it would need."""


def checks(size: Size, folder: Path, train: Callable) -> dict[str, Callable[[], dict[str, Any]]]:
    """Maps names of checks to functions that make them.

    folder: for the files of runs. train: `coevolve_jax.train.train`, which trains in this process.
    """
    found: dict[str, Callable[[], dict[str, Any]]] = {"devices": devices}
    for kernel in KERNELS[jax.default_backend()]:
        for shared in (False, True):
            name = f"attention by {kernel}" + " with shared prompts" * shared
            found[name] = functools.partial(attention, kernel, size, shared)
    run = functools.partial(grpo, train, size)
    static = {"strategy.name": "static", "data.initial_tasks": 16, "evaluation.tasks": 8}
    found |= {
        "grouped product": functools.partial(grouped, size),
        "memory bandwidth": functools.partial(bandwidth, size),
        "matrix products": functools.partial(products, size),
        "engine against the CPU": functools.partial(engine, folder, 0),
        "engine in pages against the CPU": functools.partial(engine, folder, PAGES),
        "GRPO of the tiny policy": functools.partial(run, folder / "tiny", "bfcl_tiny", static),
        "GRPO with LoRA": functools.partial(
            run, folder / "lora", "bfcl_tiny", {**static, "learner.lora_rank": 8}
        ),
        "GRPO of SmolLM2-135M": functools.partial(
            run, folder / "smollm2", "bfcl_smollm2", {**static, **learns(size)}
        ),
        "SGLang": sglang,
    }
    return found


def learns(size: Size) -> dict[str, Any]:
    """Values with which a model that solves nothing yet has an update to compute in each step.

    A CPU would take ten minutes for it.
    """
    if size is not FULL:
        return {"warm_start.steps": 0}
    return {
        "warm_start.steps": size.steps,
        "warm_start.tasks": 32,
        "learner.skip_zero_variance_groups": False,
    }


def devices() -> dict[str, Any]:
    """Names the devices, their memory and the versions."""
    first = jax.devices()[0]
    memory = (first.memory_stats() or {}).get("bytes_limit") if first.platform != "cpu" else None
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy")}
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "devices": jax.device_count(),
        "memory_gb": memory and round(memory / 1e9, 1),
        "python": sys.version.split()[0],
        **versions,
    }


def attention(kernel: str, size: Size, shared: bool) -> dict[str, Any]:
    """Compares a kernel with `plain`, forward and backward. shared: segments share a prompt."""
    rng, row = np.random.default_rng(0), size.length
    draw = lambda: jnp.asarray(rng.normal(size=(2, row, size.heads, size.head_dim)), jnp.bfloat16)
    q, k, v, weight = draw(), draw(), draw(), draw()
    parts = np.repeat([1, 2, 3, 4], row // 4)
    segments = jnp.asarray(np.stack([parts, np.where(np.arange(row) < row - 7, parts, 0)]), jnp.int32)
    parents = [jnp.where(segments > 1, 1, segments)] if shared else []
    f = IMPLEMENTATIONS[kernel]
    if jax.default_backend() == "cpu":
        f = functools.partial(f, interpret=True)

    def both(f, *x):
        real = (segments > 0)[..., None, None]
        out, pull = jax.vjp(lambda *x: jnp.where(real, f(*x, segments, *parents), 0), *x)
        return out, *pull(weight.astype(out.dtype))

    ours = jax.jit(functools.partial(both, f))
    theirs = jax.jit(functools.partial(both, plain))(*(x.astype(jnp.float32) for x in (q, k, v)))
    worst = max(far(a, b) for a, b in zip(ours(q, k, v), theirs))
    return {"worst": close(f"attention by {kernel}", worst), "seconds": timed(ours, q, k, v)}


def grouped(size: Size) -> dict[str, Any]:
    """Compares the grouped product of experts with one product for each expert."""
    rng = np.random.default_rng(0)
    sizes = np.array([0, 5, size.side // 2, size.side - size.side // 2 - 5])
    x = jnp.asarray(rng.normal(size=(size.side, size.side // 2)), jnp.bfloat16)
    matrices = jnp.asarray(rng.normal(size=(4, size.side // 2, size.side // 2)), jnp.bfloat16)
    product = jax.lax.ragged_dot
    if jax.default_backend() != "tpu":  # what models/moe.py takes there is an instruction of its own
        product = functools.partial(grouped_matmul, interpret=jax.default_backend() == "cpu")
    ours = jax.jit(product)
    ends = np.cumsum([0, *sizes])
    parts = [x[a:b].astype(jnp.float32) @ m.astype(jnp.float32) for a, b, m in zip(ends, ends[1:], matrices)]
    given = x, matrices, jnp.asarray(sizes, jnp.int32)
    worst = far(ours(*given), jnp.concatenate(parts))
    return {"worst": close("the grouped product", worst), "seconds": timed(ours, *given)}


def bandwidth(size: Size) -> dict[str, Any]:
    """Measures how fast a device's memory is read and written."""
    x = jax.random.normal(jax.random.key(0), (size.copied // 4,), jnp.float32)
    seconds = timed(jax.jit(lambda x: x + 1), x, queued=8)  # whose results a device of 16 GB holds
    return {"gb_per_second": round(2 * size.copied / seconds / 1e9, 1)}


def products(size: Size) -> dict[str, Any]:
    """Measures bfloat16 products, as a share of the published peak where that is known."""
    x = jax.random.normal(jax.random.key(0), (size.side, size.side), jnp.bfloat16)
    rate = 2 * size.side**3 / timed(jax.jit(lambda x: x @ x), x)
    peak = PEAKS.get(jax.devices()[0].device_kind)
    return {"tflops": round(rate / 1e12, 2), "share_of_peak": peak and round(rate / peak, 3)}


def engine(folder: Path, cache_tokens: int) -> dict[str, Any]:
    """Compares greedy tokens of the in-process engine here with those of a process on the CPU.

    cache_tokens: the size of its cache in pages. With 0 it has rows, as the CPU's always has.
    """
    file = folder / "cpu_tokens.json"
    if not file.exists():
        write_cpu_tokens(file)
    start = time.perf_counter()
    ours, theirs = tokens(cache_tokens), json.loads(file.read_text())
    seconds, worst, same, total = time.perf_counter() - start, 0.0, 0, 0
    for (ids, logprobs), (wanted, told) in zip(ours, theirs, strict=True):
        differ = [n for n, (a, b) in enumerate(zip(ids, wanted)) if a != b]
        common = differ[0] if differ else min(len(ids), len(wanted))
        worst = max([worst, *(abs(a - b) for a, b in zip(logprobs[:common], told[:common]))])
        same, total = same + common, total + len(wanted)
    if worst > SAME or same < total // 2:
        raise ValueError(
            f"The engine's tokens are the CPU's in {same} of {total}, with log-probabilities up to "
            f"{worst:.3g} nats apart, where {SAME} is allowed."
        )
    return {"same": same, "tokens": total, "worst_nats": worst, "seconds": seconds}


def write_cpu_tokens(file: Path) -> None:
    """Has a process on the CPU write its tokens."""
    program = "import sys; from coevolve_jax.testing import device; device.write_tokens(sys.argv[1])"
    path = os.pathsep.join((str(shipped.PACKAGE.parent), os.environ.get("PYTHONPATH", "")))
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    run_program([sys.executable, "-c", program, str(file)], file.with_suffix(".log"), env)


def write_tokens(file: str) -> None:
    Path(file).write_text(json.dumps(tokens()))


def tokens(cache_tokens: int = 0) -> list[tuple[list[int], list[float]]]:
    """Ids and log-probabilities of greedy answers of the tiny policy to PROMPTS."""
    policy = build.policy(TINY)
    prompts = [np.asarray(policy.chat.prompt((), text), np.int32) for text in PROMPTS]
    longest, new = max(map(len, prompts)), 24
    sampling = Sampling(0.0, new, policy.chat.stop_ids)
    sizes: Any = {"slots": 4, "max_length": longest + new, "cache_tokens": cache_tokens}
    made = NativeEngine(policy.config, policy.params, max_new_tokens=new, seed=0, **sizes)
    with closing(made):
        asked = [Request(i, prompt, sampling, seed=i) for i, prompt in enumerate(prompts)]
        answers = asyncio.run(made.generate(asked))
    return [([int(i) for i in a.ids], [float(p) for p in a.logprobs]) for a in answers]


def grpo(
    train: Callable, size: Size, workdir: Path, config: str, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Trains some steps by GRPO in this process, since a TPU takes one at a time, and reads the speed."""
    small = {
        "steps": size.steps,
        "rollout.tasks_per_step": 4,
        "rollout.group_size": 4,
        "checkpoint.every": 100,
    }
    if importlib.util.find_spec("bfcl_eval") is None:
        raise LeftOut(f"BFCL's packages are not here: {shipped.command('setup')} bfcl installs them.")
    made = configs.override(configs.load_file(config), {**values, **small})
    if not shipped.folder(made.model).is_dir():
        raise LeftOut(f"{made.model} is not here: in a checkout make smollm2 brings it.")
    with open(workdir.with_suffix(".log"), "w") as log:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            train(made, workdir)
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    if not all(np.isfinite(row["grad_norm"]) for row in rows if row["grad_norm"] is not None):
        raise ValueError(f"A gradient of {workdir} is not finite: see its metrics.jsonl.")
    speeds = rows[-1]["throughput"]
    return {"steps": len(rows), "seconds_of_last_step": rows[-1]["seconds"]["step"], **speeds}


def sglang() -> dict[str, Any]:
    """Starts an SGLang server of this interpreter with the tiny policy."""
    if importlib.util.find_spec("sglang") is None:
        raise LeftOut("SGLang is not installed for this interpreter.")
    if jax.default_backend() == "tpu":
        raise LeftOut("This process has the TPU, and a server of SGLang would need it: start one by itself.")
    from coevolve_jax.rollout.sglang.server import Server

    start = time.perf_counter()
    with Server(TINY, context_length=1024) as server:
        server.wait_until_ready()
        return {"sglang": metadata.version("sglang"), "seconds_to_start": time.perf_counter() - start}


def run_program(command: list[str], log: Path, env: Mapping[str, str]) -> None:
    """Runs a command with its output in `log`. Raises ValueError with its last line if it fails."""
    with open(log, "w") as file:
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=dict(env)).returncode
    if status:
        last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise ValueError(f"A process ended with status {status} ({last[:200]}): see {log}.")


def timed(f: Callable, *arguments: Any, times: int = 5, queued: int = 20) -> float:
    """Median seconds of a call, of `queued` that wait for one another on the device.

    A call by itself would be timed with the half millisecond that it takes to start one.
    """
    jax.block_until_ready(f(*arguments))
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        for _ in range(queued):
            last = f(*arguments)
        jax.block_until_ready(last)
        seconds.append((time.perf_counter() - start) / queued)
    return float(np.median(seconds))


def far(found: Any, wanted: Any) -> float:
    """The largest difference, as a share of the largest value that is wanted."""
    wanted = np.asarray(wanted, np.float32)
    return float(np.abs(np.asarray(found, np.float32) - wanted).max() / np.abs(wanted).max())


def close(what: str, worst: float) -> float:
    """Returns `worst`. Raises ValueError where it is more than CLOSE, or no number."""
    if not worst <= CLOSE:
        raise ValueError(
            f"{what} differs from plain code by {worst:.3g} of its largest value, above {CLOSE}."
        )
    return worst
