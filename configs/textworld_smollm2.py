"""CoEvolve on TextWorld's games with SmolLM2-135M-Instruct, a real language model, on two CPU cores.

The learner and the engine are those of configs/bfcl_smollm2.py, the games those of configs/textworld_tiny.py.
`make smollm2` makes the model's folder, `make textworld` sets TextWorld up and makes the games.

    python experiments/main.py --config=configs/textworld_smollm2.py --workdir=runs/textworld_smollm2

Arguments are those of configs/bfcl_tiny.py. Hardware: two CPU cores, 16 GB of memory.
It was never run: time and score are not known.
"""

from ml_collections import ConfigDict

from coevolve_jax.config import inherit


def get_config(arg: str = "") -> ConfigDict:
    c = inherit(__file__, "bfcl_smollm2.py", arg)
    games = inherit(__file__, "textworld_tiny.py", arg)
    c.environment = games.environment
    c.data.leak_splits = games.data.leak_splits
    c.rollout.max_steps = games.rollout.max_steps
    c.rollout.max_observation = games.rollout.max_observation
    c.warm_start.tasks = 200  # a game takes about a second of a core
    return c
