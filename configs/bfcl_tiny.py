"""CoEvolve on BFCL's real multi-turn environment with the tiny Qwen3 in this repository.

Paper: "CoEvolve: Training LLM Agents via Agent-Data Mutual Evolution" (arXiv 2604.15840). The values here fit
two CPU cores; configs/bfcl_qwen3_4b.py has the paper's. coevolve_jax/config/keys.py explains every key.
Hardware: two CPU cores, 4 GB of memory. Expected time and score: see docs/notes/results.md.

    python experiments/main.py --config=configs/bfcl_tiny.py --workdir=runs/demo

Arguments follow a colon:

    python experiments/main.py --config=configs/bfcl_tiny.py:strategy=random,seed=1 --workdir=runs/random

    strategy   coevolve, random, static, another of docs/strategies.md, or a module of yours
    seed       a whole number
    engine     native, or sglang (a server generates)
    explorer   scripted, llm, policy, or a module of yours
"""

from ml_collections import ConfigDict

from coevolve_jax.config import defaults, parse_arg


def get_config(arg: str = "") -> ConfigDict:
    arg = parse_arg(arg, strategy="coevolve", seed=0, engine="native", explorer="scripted")
    c = defaults(arg.strategy, arg.explorer)
    c.seed = arg.seed
    c.steps = 60
    c.model = "models/tiny_qwen3"
    c.engine.name = arg.engine

    c.environment.toolsets = ("GorillaFileSystem", "MessageAPI", "TicketAPI", "TwitterAPI")
    c.environment.workers = 2
    c.environment.call_timeout = 2.0

    c.data.min_evolved_share = 0.5
    c.data.leak_splits = ("test",)

    c.rollout.tasks_per_step = 16
    c.rollout.max_length = 512
    c.rollout.max_new_tokens = 64
    c.rollout.max_observation = 160
    c.engine.dtype = "float32"

    # At 3e-4 this policy is certain of every token by step 30, and learns no more.
    c.learner.learning_rate = 1e-4
    c.learner.adam_b2 = 0.95
    c.learner.kl_coef = 0.01
    c.learner.pack_length = 512
    c.learner.rows_per_microbatch = 4
    c.learner.dtype = "float32"
    c.learner.remat = False

    c.signals.rare_percent = 1.0  # the paper's 5 calls nearly every one of our tools rare
    return c
