"""Measures the cost of SGLang: the client beside the server's own time, a weight push, a step's rollouts.

    python benchmarks/serving.py --config=configs/bfcl_tiny.py:engine=sglang

Launches the server that the config names (or attaches to config.engine.url). The client and the bare request
are interleaved. It prints medians, with this process's CPU seconds beside those of the clock.
"""

import asyncio
import os
import statistics
import time
from contextlib import closing

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import aiohttp
import numpy as np
from absl import app, flags
from ml_collections import config_flags

from coevolve_jax import build, event_loop
from coevolve_jax.loop.collect import Roller
from coevolve_jax.rollout.engine import Request, Sampling
from coevolve_jax.seeding import rng_for
from coevolve_jax.synthesis.pipeline import SynthesisRequest
from coevolve_jax.synthesis.task_pool import TaskPool

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file.", lock_config=True)
_ROUNDS = flags.DEFINE_integer("rounds", 10, "Rounds of each measurement.")
_TOKENS = flags.DEFINE_integer("tokens", 32, "Tokens per message.")
flags.mark_flag_as_required("config")


def bare(url: str, bodies: list[dict]) -> None:
    """Posts each body and drops the answer: the server's own share."""

    async def post(session, body):
        async with session.post(url + "/generate", json=body) as response:
            response.raise_for_status()
            await response.read()

    async def all_at_once():
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(post(session, body) for body in bodies))

    event_loop.run(all_at_once())


def timed(function) -> tuple[float, float]:
    """Wall seconds and this process's CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - wall, time.process_time() - cpu


def flush(url: str) -> None:
    """Drops the server's cached prefixes, so that all measurements start alike."""

    async def post():
        async with aiohttp.ClientSession() as session:
            async with session.post(url + "/flush_cache") as response:
                await response.read()

    event_loop.run(post())


def client(engine, url: str, prompts: list[list[int]], tokens: int, rounds: int) -> None:
    params = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
    whole = {"input_ids": prompts, "sampling_params": [params] * len(prompts), "return_logprob": True}
    single = [{"input_ids": p, "sampling_params": params, "return_logprob": True} for p in prompts]
    requests = [Request(i, np.asarray(p, np.int32), Sampling(1.0, tokens), i) for i, p in enumerate(prompts)]
    ways = {
        "one request for all": lambda: bare(url, [whole]),
        "a request for each, bare": lambda: bare(url, single),
        "a request for each, ours": lambda: event_loop.run(engine.generate(requests)),
    }
    took = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            flush(url)
            took[name].append(timed(way))
    count = len(prompts) * tokens
    print(f"{len(prompts)} messages of {tokens} tokens, medians of {rounds}:")
    for name, seconds in took.items():
        wall, cpu = (statistics.median(column) for column in zip(*seconds[1:]))
        own = f"this process computes {cpu:5.3f} s, {cpu / wall:.1%}"
        print(f"  {name:<26}{wall:6.3f} s  {count / wall:6.0f} tokens/s; {own}")


def pushes(engine, params, rounds: int) -> None:
    seconds = [timed(lambda: engine.update_weights(params, version))[0] for version in range(1, rounds + 2)][
        1:
    ]
    print(
        f"weight push: {1e3 * statistics.median(seconds):.0f} ms median, {1e3 * max(seconds):.0f} ms at most"
    )
    engine.update_weights(params, 0)


def main(argv) -> None:
    c = _CONFIG.value
    policy = build.policy(c.model)
    with build.env_pool(c) as env_pool, closing(build.engine(c, policy)) as engine:
        agent = build.agent(c, policy, engine, env_pool)
        tasks = TaskPool(None)
        build.synthesizer(c, build.explorer(c), env_pool, None).synthesize_unguided(
            tasks,
            build.scenarios(c),
            SynthesisRequest(
                wanted=c.rollout.tasks_per_step, kind="initial", step=0, rng=rng_for(c.seed, "initial")
            ),
        )
        if c.engine.name == "sglang":
            prompts = [policy.chat.prompt(build.family(c).tools(task), task.turns[0].query) for task in tasks]
            client(
                engine,
                engine.urls[0],
                [prompts[i % len(prompts)] for i in range(64)],
                _TOKENS.value,
                _ROUNDS.value,
            )
            pushes(engine, policy.params, _ROUNDS.value)
        batch = list(tasks)[: 64 // c.rollout.group_size]
        Roller(c, agent, 0)(batch, c.rollout.group_size)
        agent.usage()
        seconds, _ = timed(lambda: Roller(c, agent, 1)(batch, c.rollout.group_size))
        share = agent.usage().utilization
        busy = f"engine {share['engine']:.0%} and workers {share['workers']:.0%} busy"
        print(f"64 trajectories by the {c.engine.name} engine: {seconds:.1f} s, {busy}")


if __name__ == "__main__":
    app.run(main)
