"""CoEvolve on BFCL multi-turn with Qwen2.5-7B-Instruct: the values of the paper.

Paper: arXiv 2604.15840. BFCL-v3 multi-turn base, success in percent: zero-shot 13.5, GRPO on static synthetic
tasks 56.0, CoEvolve 61.5. Hardware there: 8 GPUs. Not run here, for lack of weights and an accelerator: time
and score are not known. docs/notes/memory.md says where it fits. SGLang serves the rollouts, as in
configs/bfcl_qwen3_4b.py. On four GPUs of 80 GB a micro-batch has one row for each. By the compiler's account
the update takes 49.2 GB of each. JAX takes 60 GB (75%) by default, and 72 GB (90%) here:

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 python experiments/main.py --config=configs/bfcl_qwen2_5_7b.py \\
        --workdir=runs/qwen2_5_7b --config.model=PATH_TO/Qwen2.5-7B-Instruct --config.mesh.fsdp=4 \\
        --config.learner.rows_per_microbatch=4 --config.engine.url=http://HOST:PORT
"""

from ml_collections import ConfigDict

from coevolve_jax.config import inherit


def get_config(arg: str = "") -> ConfigDict:
    c = inherit(__file__, "bfcl_qwen3_4b.py", arg)  # the paper's settings do not differ between its models
    c.model = "Qwen2.5-7B-Instruct"
    return c
