"""CoEvolve on BFCL multi-turn with Qwen2.5-0.5B-Instruct, for ablations on one GPU of 24 GB such as an L4.

No paper gives these values. The learner's are those of configs/bfcl_qwen3_4b.py, the sizes are smaller, the
toolsets those of configs/bfcl_tiny.py. Not run here, for lack of weights and a GPU: time and score are not
known. The in-process engine generates on the same GPU. By experiments/plan.py the update needs 12.9 GB with
the engine's weights. Rollouts need less, with a cache of up to 4.8 GB. JAX takes only 75% of the memory by
itself:

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 python experiments/main.py --config=configs/bfcl_qwen2_5_0_5b.py \\
        --workdir=runs/qwen2_5_0_5b --config.model=PATH_TO/Qwen2.5-0.5B-Instruct

A T4 (16 GB) has no bfloat16, in which this is planned. experiments/notebooks/small_ablation.ipynb trains
adapters there.
"""

from ml_collections import ConfigDict

from coevolve_jax.config import defaults, parse_arg


def get_config(arg: str = "") -> ConfigDict:
    arg = parse_arg(arg, strategy="coevolve", seed=0, engine="native", explorer="scripted")
    c = defaults(arg.strategy, arg.explorer)
    c.seed = arg.seed
    c.steps = 60
    c.model = "Qwen2.5-0.5B-Instruct"
    c.environment.toolsets = ("GorillaFileSystem", "MessageAPI", "TicketAPI", "TwitterAPI")
    c.environment.workers = 2

    c.data.initial_tasks = 32  # N
    c.data.leak_splits = ("test",)
    c.rollout.tasks_per_step = 8
    c.rollout.temperature = 0.9
    c.rollout.max_length = 8192  # the schemas of two toolsets are 12,000 characters

    c.engine.name = arg.engine
    c.engine.max_concurrency = 32

    c.learner.tis_cap = 2.0  # for two programs in bfloat16; it acts, and the clip does not
    c.learner.logprob_chunk = 1024

    c.evolution.tasks = 16
    c.evolution.contexts = 16
    c.evaluation.tasks = 96
    c.evaluation.temperature = 0.9
    c.checkpoint.every = 20
    return c
