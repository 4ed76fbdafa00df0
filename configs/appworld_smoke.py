"""CoEvolve on a few tasks of our own in AppWorld's engine (docs/environments/appworld.md) with the tiny Qwen3 of the BFCL demo,
which has never seen Python and solves nothing: for seeing the loop run, not for learning. No score of AppWorld comes out.

Hardware: two CPU cores, 4 GB of memory; `make appworld` sets AppWorld up and makes the tasks.

    python experiments/synthesize.py --config=configs/appworld_smoke.py --tasks=10
    python experiments/main.py --config=configs/appworld_smoke.py --workdir=runs/appworld

Arguments are those of configs/bfcl_tiny.py.
"""

from ml_collections import ConfigDict

from coevolve_jax.config import inherit


def get_config(arg: str = "") -> ConfigDict:
    c = inherit(__file__, "bfcl_tiny.py", arg)
    del c.environment.toolsets
    c.environment.name = "appworld"
    c.environment.python = ".appworld/bin/python"
    c.environment.train_split = "own_train"
    c.environment.eval_split = "own_development"
    c.data.leak_splits = ()
    c.environment.call_timeout = 60.0  # a piece of code may take 20
    c.steps = 2
    c.data.initial_tasks = 8  # N
    c.rollout.tasks_per_step = 4
    c.rollout.group_size = 2  # K
    c.rollout.max_length = 4096  # tokens: one that was trained on calls needs many for Python
    c.rollout.max_new_tokens = 320
    c.rollout.max_steps = 30
    c.rollout.max_observation = 400
    c.learner.pack_length = 4096
    c.learner.rows_per_microbatch = 1
    c.evolution.every = 1  # F
    c.evolution.steps = 16  # S: what is in an app is seen once one is logged in to it
    c.evolution.freeze_last_steps = 1
    c.evolution.tasks = 3
    c.evolution.contexts = 3
    c.evolution.rounds = 1  # R
    c.evolution.proposals = 2
    c.evaluation.tasks = 2
    return c
