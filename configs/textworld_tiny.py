"""CoEvolve on TextWorld's games (docs/environments/textworld.md) with a tiny Qwen3 of its own.

The policy errs with most of the verbs that change something. Hardware: two CPU cores, 4 GB of memory; `make
textworld` sets TextWorld up and makes the games. Expected time and score: see docs/notes/textworld.md.

    make demo ENV=textworld
    python experiments/synthesize.py --config=configs/textworld_tiny.py --tasks=10
    python experiments/main.py --config=configs/textworld_tiny.py --workdir=runs/textworld

Arguments are those of configs/bfcl_tiny.py; harder games: --config.environment.difficulty=2,4
"""

from ml_collections import ConfigDict

from coevolve_jax.config import inherit


def get_config(arg: str = "") -> ConfigDict:
    c = inherit(__file__, "bfcl_tiny.py", arg)
    c.model = "models/tiny_qwen3_textworld"
    c.steps = 24
    del c.environment.toolsets
    c.environment.name = "textworld"
    c.environment.python = ".textworld/bin/python"
    c.environment.difficulty = (1, 2)
    c.environment.games = 12
    c.environment.call_timeout = 5.0  # a game starts in 0.01 to 0.1 s
    c.data.leak_splits = ()  # the test split's games are made when they are asked for
    c.data.initial_tasks = 64  # a task takes about a second of a core, most of it for shortening
    c.rollout.tasks_per_step = 8
    c.evolution.every = 8
    c.evolution.freeze_last_steps = 8
    c.evaluation.tasks = 96
    c.evaluation.every = 8
    # This policy copies: it begins at -0.037 nats, and its groups have spread at -0.02.
    c.health.logprob = -0.01
    c.rollout.max_steps = 10
    c.rollout.max_observation = 100  # what is to be done stands in the user's words
    return c
