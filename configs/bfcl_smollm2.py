"""CoEvolve on BFCL with SmolLM2-135M-Instruct, a real language model, on two CPU cores.

`make smollm2` makes the model's folder. The policy first learns the solutions of explored tasks (warm start).
GRPO and evolution go on from there.

    make demo-smollm2
    python experiments/main.py --config=configs/bfcl_smollm2.py --workdir=runs/smollm2

Arguments are those of configs/bfcl_tiny.py. Hardware: two CPU cores, 16 GB of memory.
Expected time and score: see docs/notes/smollm2.md.
"""

from ml_collections import ConfigDict

from coevolve_jax.config import inherit


def get_config(arg: str = "") -> ConfigDict:
    c = inherit(__file__, "bfcl_tiny.py", arg)
    c.model = "models/smollm2-135m-instruct"
    c.steps = 20

    c.warm_start.steps = 40
    c.warm_start.tasks = 400
    c.warm_start.batch = 8
    c.warm_start.learning_rate = 3e-4
    c.warm_start.checkpoint_every = 10

    c.data.initial_tasks = 64
    c.data.max_calls = 4
    c.evolution.every = 5
    c.evolution.tasks = 16
    c.evolution.contexts = 16
    c.evolution.freeze_last_steps = 5
    c.evaluation.tasks = 64
    c.checkpoint.every = 5

    c.rollout.tasks_per_step = 8
    c.rollout.max_length = 1024  # the tools of three toolsets are 700 tokens
    c.rollout.max_new_tokens = 96
    c.engine.matmul_dtype = "bfloat16"

    c.learner.learning_rate = 2e-5
    c.learner.kl_coef = 0.0  # the reference would cost a third of the update
    c.learner.pack_length = 3584
    c.learner.pack_length_buckets = (2048, 2560, 3072)  # whichever holds a batch's groups with least padding
    c.learner.rows_per_microbatch = 1
    c.learner.prefix_sharing = True
    c.learner.matmul_dtype = "bfloat16"
    return c
