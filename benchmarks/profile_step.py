"""Where does the time of a GRPO step go, on this machine?

    python benchmarks/profile_step.py --config=configs/bfcl_tiny.py

Runs a few steps of the real loop's pieces after one to compile, and prints seconds per step by piece.
"""

import functools
import os
import platform
import threading
import time
from collections import defaultdict

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import jax
from absl import app, flags
from ml_collections import config_flags

from coevolve_jax import build
from coevolve_jax.distributed import sharding
from coevolve_jax.grpo.filter import FilterState
from coevolve_jax.grpo.learn import learn
from coevolve_jax.grpo.learner import Learner
from coevolve_jax.loop.collect import Roller
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies.base import grpo_samples, trajectories_of
from coevolve_jax.strategies.batches import collect_batch
from coevolve_jax.synthesis.pipeline import SynthesisRequest
from coevolve_jax.synthesis.task_pool import TaskPool

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file.", lock_config=True)
_STEPS = flags.DEFINE_integer("steps", 5, "Steps to time.")
flags.mark_flag_as_required("config")


BETWEEN = "between ticks: text, tools"


class Timers:
    """Seconds and calls by name; a piece's seconds exclude those of pieces nested in its thread."""

    def __init__(self):
        self.own, self.calls, self._threads = defaultdict(float), defaultdict(int), threading.local()

    @property
    def _inner(self) -> list[float]:
        """Seconds of the pieces nested in each open piece of this thread."""
        return self._threads.__dict__.setdefault("inner", [0.0])

    def wrap(self, owner, method: str, name: str) -> None:
        """Replaces owner.method by one that is timed until its result is ready."""
        plain = getattr(owner, method)

        @functools.wraps(plain)
        def timed(*args, **kwargs):
            start = time.perf_counter()
            self._inner.append(0.0)
            result = jax.block_until_ready(plain(*args, **kwargs))
            took = time.perf_counter() - start
            self.own[name] += took - self._inner.pop()
            self._inner[-1] += took
            self.calls[name] += 1
            return result

        setattr(owner, method, timed)


def main(_) -> None:
    c = _CONFIG.value
    policy = build.policy(c.model)
    learner = Learner(
        policy.config,
        c.learner,
        policy.params,
        temperature=c.rollout.temperature,
        mesh=sharding.make_mesh(**c.mesh),
    )
    with build.env_pool(c) as env_pool:
        engine = build.engine(c, policy)
        agent = build.agent(c, policy, engine, env_pool)
        tasks = TaskPool()
        build.synthesizer(c, build.explorer(c), env_pool, None).synthesize_unguided(
            tasks,
            build.scenarios(c),
            SynthesisRequest(
                wanted=c.data.initial_tasks, kind="initial", step=0, rng=rng_for(c.seed, "initial")
            ),
        )
        state, timers, tokens, trained = learner.init(policy.params), Timers(), 0, 0
        started = None
        for step in range(_STEPS.value + 2):
            if step == 2:  # two steps have compiled the programs
                for method in ("fit", "copy", "feed", "decode"):
                    timers.wrap(engine._programs, method, f"engine: {method}")
                timers.wrap(engine, "_advance", "engine: around its programs")
                timers.wrap(agent, "rollout_groups", BETWEEN)
                timers.wrap(learner, "_update", "update: the program")
                started, busy = time.perf_counter(), env_pool.busy
            groups = collect_batch(c, step, tasks, Roller(c, agent, step))
            samples, _ = grpo_samples(c, groups, FilterState())
            state, _ = learn(c, learner, state, samples)
            engine.update_weights(learner.policy(state), step + 1)
            if started:
                tokens += sum(int(t.mask.sum()) for t in trajectories_of(groups))
                trained += sum(len(t.ids) for t in trajectories_of(groups))
        busy = (env_pool.busy - busy) / _STEPS.value
    total = (time.perf_counter() - started) / _STEPS.value
    timers.own[BETWEEN] -= sum(
        s for name, s in timers.own.items() if name.startswith("engine")
    )  # in other threads
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}, "
        f"{c.rollout.tasks_per_step} x {c.rollout.group_size} trajectories, "
        f"{trained / _STEPS.value:.0f} tokens of which {tokens / _STEPS.value:.0f} sampled, per step"
    )
    for name, seconds in sorted(timers.own.items(), key=lambda item: -item[1]):
        per_step = seconds / _STEPS.value
        print(
            f"{name:<30}{per_step:8.3f} s {per_step / total:6.1%}  {timers.calls[name] / _STEPS.value:5.1f} "
            f"calls"
        )
    print(f"{'  a worker of the environment':<30}{busy:8.3f} s {busy / total:6.1%}")
    rest = total - sum(timers.own.values()) / _STEPS.value
    print(f"{'everything else':<30}{rest:8.3f} s {rest / total:6.1%}\n{'step':<30}{total:8.3f} s")


if __name__ == "__main__":
    app.run(main)
