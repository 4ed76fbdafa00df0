"""CoEvolve on BFCL multi-turn with Qwen3-30B-A3B-Instruct: the values of the paper.

Paper: arXiv 2604.15840. BFCL-v3 multi-turn base, success in percent: zero-shot 43.5, GRPO on static synthetic
tasks 64.0, CoEvolve 67.0. Hardware there: 16 GPUs. Not run here, for lack of weights and an accelerator: time
and score are not known. By the compilers' accounts (docs/notes/memory.md) it fits 16 GPUs of 80 GB (46.1 GB
of each) and v6e-64. It fits 8 such GPUs only with learner.optimizer_offload=True (50.1 GB). v5e-64 takes rows
of 12,288 with mesh.expert=8. SGLang serves the rollouts from machines of its own, as in
configs/bfcl_qwen3_4b.py. On two hosts of 8 GPUs, the same command on each (docs/guides/train_your_model.md):

    python experiments/main.py --config=configs/bfcl_qwen3_30b_a3b.py --workdir=SHARED/qwen3_30b_a3b \\
        --processes=auto --config.model=PATH_TO/Qwen3-30B-A3B-Instruct-2507 --config.mesh.fsdp=16 \\
        --config.learner.rows_per_microbatch=16 --config.engine.url=http://HOST:PORT

On v6e-64, 64 takes the place of 16.
"""

from ml_collections import ConfigDict

from coevolve_jax.config import inherit


def get_config(arg: str = "") -> ConfigDict:
    c = inherit(__file__, "bfcl_qwen3_4b.py", arg)  # the paper's settings do not differ between its models
    c.model = "Qwen3-30B-A3B-Instruct-2507"
    c.engine.cache_tokens = 2**21  # ours; 206 GB: each of 64 devices must hold the longest conversation
    return c
