"""CoEvolve on AppWorld with Qwen3-30B-A3B-Instruct: the values of the paper.

Paper: arXiv 2604.15840. AppWorld test-normal, task goal completion in percent: zero-shot 31.55, GRPO on static synthetic tasks
48.81, CoEvolve 54.76; test-challenge 31.65. Hardware there: 16 GPUs. Not run here: neither AppWorld's data, nor weights,
nor an accelerator were at hand. Training it on GPUs is refused: XLA makes the experts' grouped product a dense one there;
by the compiler's account it fits v6e-64 (docs/memory.md). SGLang serves the rollouts, as in configs/appworld_qwen3_4b.py:

    python experiments/main.py --config=configs/appworld_qwen3_30b_a3b.py --workdir=runs/appworld_qwen3_30b_a3b \\
        --config.model=PATH_TO/Qwen3-30B-A3B-Instruct-2507 --config.engine.url=http://HOST:PORT
"""

from ml_collections import ConfigDict

from coevolve_jax.config import inherit


def get_config(arg: str = "") -> ConfigDict:
    c = inherit(
        __file__, "appworld_qwen3_4b.py", arg
    )  # the paper's settings do not differ between its models
    c.model = "Qwen3-30B-A3B-Instruct-2507"
    return c
