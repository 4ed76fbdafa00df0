"""CoEvolve on AppWorld with Qwen3-30B-A3B-Instruct: the values of the paper.

Paper: arXiv 2604.15840. AppWorld test-normal, task goal completion in percent: zero-shot 31.55, GRPO on static synthetic tasks
48.81, CoEvolve 54.76; test-challenge 31.65. Hardware there: 16 GPUs. Not run here: neither AppWorld's data, nor weights,
nor an accelerator were at hand; by the compilers' accounts it fits 16 GPUs of 80 GB and v6e-64 (docs/notes/memory.md). SGLang
serves the rollouts, as in configs/appworld_qwen3_4b.py, from machines of its own. On two hosts of 8 GPUs, the same on each:

    python experiments/main.py --config=configs/appworld_qwen3_30b_a3b.py --workdir=SHARED/appworld_qwen3_30b_a3b \\
        --processes=auto --config.model=PATH_TO/Qwen3-30B-A3B-Instruct-2507 --config.mesh.fsdp=16 \\
        --config.learner.rows_per_microbatch=16 --config.engine.url=http://HOST:PORT

On v6e-64, 64 takes the place of 16.
"""

from ml_collections import ConfigDict

from coevolve_jax.config import inherit


def get_config(arg: str = "") -> ConfigDict:
    # The paper's settings do not differ between its models.
    c = inherit(__file__, "appworld_qwen3_4b.py", arg)
    c.model = "Qwen3-30B-A3B-Instruct-2507"
    c.engine.cache_tokens = 2**21  # ours, as in configs/bfcl_qwen3_30b_a3b.py
    return c
