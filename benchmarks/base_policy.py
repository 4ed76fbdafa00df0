"""What a policy can do before RL: success on the held-out tasks by number of calls, and groups with both outcomes.

python benchmarks/base_policy.py --config=configs/bfcl_tiny.py --tasks=192
"""

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from absl import app, flags
from ml_collections import config_flags

from coevolve_jax import build
from coevolve_jax.evaluate import evaluate
from coevolve_jax.seeding import rng_for
from coevolve_jax.synthesis.pipeline import Synthesizer
from coevolve_jax.synthesis.task_pool import TaskPool

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file.", lock_config=True)
_TASKS = flags.DEFINE_integer("tasks", 192, "Held-out tasks.")
flags.mark_flag_as_required("config")


def main(_) -> None:
    c = _CONFIG.value
    policy = build.policy(c.model)
    with build.env_pool(c) as env_pool:
        agent = build.agent(c, policy, build.engine(c, policy), env_pool)
        tasks = TaskPool()
        Synthesizer(build.explorer(c), build.family(c).tools, env_pool, c, guard=None).explore_unguided(
            tasks,
            build.held_out_scenarios(c),
            wanted=_TASKS.value,
            kind="held_out",
            step=0,
            rng=rng_for(c.evaluation.seed, "held_out"),
        )
        for temperature, samples in ((1.0, c.rollout.group_size), (0.0, 1)):
            result, _ = evaluate(agent, list(tasks), samples=samples, temperature=temperature, seed=1)
            by_calls = {n: f"{s / trials:.0%}" for n, (s, trials) in result.by_calls.items()}
            print(
                f"temperature {temperature:g}, {samples} samples of {_TASKS.value} tasks: success {result.success:.1%}, "
                f"by calls {by_calls}, groups with both outcomes {result.mixed_groups:.0%}, ends {result.stops}"
            )


if __name__ == "__main__":
    app.run(main)
