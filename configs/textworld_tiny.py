"""CoEvolve on TextWorld's games (docs/environments/textworld.md) with the tiny Qwen3 of the BFCL demo, which has never seen
a text adventure and solves nothing: for seeing the loop run, not for learning.

Hardware: two CPU cores, 4 GB of memory; `make textworld` sets TextWorld up and makes the games.

    python experiments/synthesize.py --config=configs/textworld_tiny.py --tasks=10
    python experiments/main.py --config=configs/textworld_tiny.py --workdir=runs/textworld

Arguments are those of configs/bfcl_tiny.py; harder games: --config.environment.difficulty=2,4
"""

from ml_collections import ConfigDict

from coevolve_jax.config import inherit


def get_config(arg: str = "") -> ConfigDict:
    c = inherit(__file__, "bfcl_tiny.py", arg)
    del c.environment.toolsets
    c.environment.name = "textworld"
    c.environment.python = ".textworld/bin/python"
    c.environment.difficulty = (1, 2)  # the lowest and the highest level, from 1 to 8
    c.environment.games = 6  # of each level, for training and as many for evaluation
    c.environment.call_timeout = 5.0  # seconds; a game starts in 0.01 to 0.1 s
    c.rollout.max_length = 1024  # tokens: a room is described in about 100
    c.rollout.max_steps = 10
    c.rollout.max_observation = 400  # characters
    c.learner.row_length = 1024
    return c
