"""A campaign at full size: Qwen3-4B on BFCL, whose harness evolves too (EvoTrainer, arXiv 2606.03108).

Never run. Hardware as for configs/bfcl_qwen3_4b.py. A version costs one run of 60 steps. Six versions, the
start, and two harnesses on three fresh seeds are thirteen runs.

    python experiments/evolve_harness.py --config=configs/harness_qwen3_4b.py --workdir=runs/campaign \\
        --store=/shared/store --config.model=PATH_TO/Qwen3-4B-Instruct-2507
    ... --final --final_seeds=100:103

One seed of a version: its standard error then comes from the scenarios of the selection set. Measure
config.harness.noise first, by experiments/calibrate_harness.py with some faults and two seeds or more. Runs
of the start alone under some values of config.rollout.salt give a lower bound.
"""

from ml_collections import ConfigDict

from coevolve_jax.config import harness, inherit


def get_config(arg: str = "") -> ConfigDict:
    c = inherit(__file__, "bfcl_qwen3_4b.py", arg)
    c.steps = 60
    c.evaluation.every = 0
    c.harness = harness()
    c.harness.seeds = (0,)
    c.harness.bounds = (
        "learner.learning_rate=1e-7:1e-5",
        "learner.kl_coef=1e-4:0.1",
        "rollout.temperature=0.6:1.2",
    )
    # A lever that another engine's servers would have to be started anew for stays as it is.
    c.harness.levers = (
        "reward.terms", "learner.group_filter", "learner.advantage", "learner.aggregate", "learner.ratio",
        "learner.clip_high", "learner.kl_coef", "learner.learning_rate", "learner.epochs",
        "rollout.temperature", "rollout.group_size", "learner.dynamic_sampling", "rollout.max_steps",
        "data.sampling", "data.min_evolved_share", "strategy.name", "evolution.every", "evolution.tasks",
    )  # fmt: skip
    return c
