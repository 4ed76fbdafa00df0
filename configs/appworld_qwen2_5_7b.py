"""CoEvolve on AppWorld with Qwen2.5-7B-Instruct: the values of the paper.

Paper: arXiv 2604.15840. AppWorld test-normal, task goal completion in percent: zero-shot 1.19, GRPO on static synthetic tasks
26.78, CoEvolve 27.98; test-challenge 8.39. Hardware there: 8 GPUs. Not run here: neither AppWorld's data, nor weights,
nor an accelerator were at hand; docs/notes/memory.md says on what the update fits. SGLang serves the rollouts, as in
configs/appworld_qwen3_4b.py. On four GPUs of 80 GB, of which it takes 49.2 GB by the compiler's account (docs/notes/memory.md):

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 python experiments/main.py --config=configs/appworld_qwen2_5_7b.py \\
        --workdir=runs/appworld_qwen2_5_7b --config.model=PATH_TO/Qwen2.5-7B-Instruct --config.mesh.fsdp=4 \\
        --config.learner.rows_per_microbatch=4 --config.engine.url=http://HOST:PORT
"""

from ml_collections import ConfigDict

from coevolve_jax.config import inherit


def get_config(arg: str = "") -> ConfigDict:
    # The paper's settings do not differ between its models.
    c = inherit(__file__, "appworld_qwen3_4b.py", arg)
    c.model = "Qwen2.5-7B-Instruct"
    return c
