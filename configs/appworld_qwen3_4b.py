"""CoEvolve on AppWorld with Qwen3-4B-Instruct: the values of the paper.

Paper: arXiv 2604.15840, settings table and section 4. AppWorld test-normal, task goal completion in percent: zero-shot 16.67, GRPO
on static synthetic tasks 28.57, CoEvolve 35.71; test-challenge 17.03. Hardware there: 8 GPUs. Not run here: neither
AppWorld's data, nor weights, nor an accelerator were at hand. SGLang serves the rollouts (docs/guides/serve_with_sglang.md), on one machine
of 8 GPUs from half of them; `make appworld` first:

    CUDA_VISIBLE_DEVICES=4,5,6,7 python experiments/serve.py --model=PATH_TO/Qwen3-4B-Instruct-2507 --port=30000 \\
        --context_length=25600 --max_running_requests=256 --dtype=bfloat16 -- --dp-size=4
    CUDA_VISIBLE_DEVICES=0,1,2,3 python experiments/main.py --config=configs/appworld_qwen3_4b.py --workdir=runs/appworld_qwen3_4b \\
        --config.model=PATH_TO/Qwen3-4B-Instruct-2507 --config.mesh.fsdp=4 --config.engine.url=http://127.0.0.1:30000

Tasks are made by rules here; as in the paper, by a model behind an endpoint: explorer=llm, as in configs/bfcl_qwen3_4b.py.
The values that the paper does not give are those of that file, marked "ours" there, and those marked here.
"""

from ml_collections import ConfigDict

from coevolve_jax.config import inherit


def get_config(arg: str = "") -> ConfigDict:
    c = inherit(__file__, "bfcl_qwen3_4b.py", arg)
    del c.environment.toolsets
    c.environment.name = "appworld"
    c.environment.python = ".appworld/bin/python"
    c.environment.train_split = "train"
    c.environment.eval_split = "dev"  # "test_normal", "test_challenge": to be read once
    c.data.leak_splits = ("test_normal", "test_challenge")
    c.environment.call_timeout = 60.0  # ours; a piece of code may take 20
    c.rollout.tool_call_format = "python"  # the first Python block of a message is run
    c.rollout.max_steps = 30  # the paper's cap
    c.evolution.steps = 16  # ours: what is in an app is seen once one is logged in to it
    return c
