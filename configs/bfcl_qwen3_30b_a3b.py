"""CoEvolve on BFCL multi-turn with Qwen3-30B-A3B-Instruct: the values of the paper.

Paper: arXiv 2604.15840. BFCL-v3 multi-turn base, success in percent: zero-shot 43.5, GRPO on static synthetic
tasks 64.0, CoEvolve 67.0. Hardware there: 16 GPUs. Not run here: no weights and no accelerator were at hand, so
time and score of this code are not known. Training it on GPUs is refused: XLA makes the experts' grouped product a dense
one there. By the compiler's account it fits v6e-64 (28.8 of 33.5 GB, docs/memory.md) and does not fit v5e-64.
SGLang serves the rollouts, as in configs/bfcl_qwen3_4b.py, and the command is

    python experiments/main.py --config=configs/bfcl_qwen3_30b_a3b.py --workdir=runs/qwen3_30b_a3b \\
        --config.model=PATH_TO/Qwen3-30B-A3B-Instruct-2507 --config.engine.url=http://HOST:PORT
"""

from ml_collections import ConfigDict

from coevolve_jax.config import inherit


def get_config(arg: str = "") -> ConfigDict:
    c = inherit(__file__, "bfcl_qwen3_4b.py", arg)  # the paper's settings do not differ between its models
    c.model = "Qwen3-30B-A3B-Instruct-2507"
    return c
