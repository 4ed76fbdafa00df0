"""CoEvolve on tau2's telecom domain (docs/environments/tau2.md) with a tiny Qwen3 of its own.

The policy errs with 17 of its 43 tools. Hardware: two CPU cores, 4 GB of memory; `make tau2` sets tau2 up.
Expected time and score: see docs/notes/tau2.md.

    make demo ENV=tau2
    python experiments/synthesize.py --config=configs/tau2_tiny.py --tasks=10
    python experiments/main.py --config=configs/tau2_tiny.py --workdir=runs/tau2

Arguments are those of configs/bfcl_tiny.py. The policy has never seen other domains, whose calls are longer:
--config.environment.domains="('retail',)" --config.rollout.max_length=2048 --config.learner.pack_length=2048
--config.rollout.max_new_tokens=192
"""

from ml_collections import ConfigDict

from coevolve_jax.config import inherit


def get_config(arg: str = "") -> ConfigDict:
    c = inherit(__file__, "bfcl_tiny.py", arg)
    c.model = "models/tiny_qwen3_tau2"
    c.steps = 40
    del c.environment.toolsets
    c.environment.name = "tau2"
    c.environment.python = ".tau2/bin/python"
    c.environment.domains = ("telecom",)
    c.environment.call_timeout = 5.0  # a world starts in a millisecond
    c.rollout.max_steps = 10
    c.rollout.max_observation = 100  # what is to be done stands in the user's words
    return c
