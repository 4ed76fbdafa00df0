"""CoEvolve on tau2's domains (docs/environments/tau2.md) with the tiny Qwen3 of the BFCL demo, which has never seen their
tools and solves nothing: for seeing the loop run, not for learning.

Hardware: two CPU cores, 4 GB of memory; `make tau2` sets tau2 up.

    python experiments/synthesize.py --config=configs/tau2_tiny.py --tasks=10
    python experiments/main.py --config=configs/tau2_tiny.py --workdir=runs/tau2

Arguments are those of configs/bfcl_tiny.py; other domains: --config.environment.domains="('retail',)"
"""

from ml_collections import ConfigDict

from coevolve_jax.config import inherit


def get_config(arg: str = "") -> ConfigDict:
    c = inherit(__file__, "bfcl_tiny.py", arg)
    del c.environment.toolsets
    c.environment.name = "tau2"
    c.environment.python = ".tau2/bin/python"
    c.environment.domains = ("telecom",)  # of telecom, retail, airline
    c.environment.call_timeout = 5.0  # seconds; a world starts in a millisecond
    c.rollout.max_length = 2048  # tokens: the names of telecom's 43 tools take 500, an answer up to 300
    c.rollout.max_new_tokens = 192  # airline's longest calls have 170
    c.rollout.max_steps = 10
    c.rollout.max_observation = 400  # characters
    c.learner.row_length = 2048
    return c
