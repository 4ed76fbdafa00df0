"""The comparison of methods on warm-started SmolLM2-135M-Instruct: configs/bfcl_smollm2.py at equal rollouts.

1,280 training rollouts of any role, which 20 batches of 8 x 8 take; evolutions after steps 5, 10 and 15. A
method that probes ends in fewer steps. The arms of a seed share the warm-started policy, D_0 and the held-out
tasks: 96 tasks, two rollouts each before RL and four after it.

    python experiments/compare.py --config=configs/bfcl_smollm2_compare.py:split=test --seeds=100:104 \\
        --arms=static,random,random_probe,coevolve,blame --workdir=runs/smollm2

    split      development (to choose settings), or test (read once)

docs/notes/smollm2.md has the plan. Hardware: two CPU cores, 16 GB of memory, 40 to 110 minutes a run.
"""

from ml_collections import ConfigDict

from coevolve_jax.config import inherit, parse_arg

SPLITS = ("development", "test")


def get_config(arg: str = "") -> ConfigDict:
    arg = parse_arg(arg, split="development", strategy="coevolve", seed=0, engine="native")
    if arg.split not in SPLITS:
        raise ValueError(f"Config argument split={arg.split!r} must be one of {', '.join(SPLITS)}.")
    c = inherit(__file__, "bfcl_smollm2.py", f"strategy={arg.strategy},seed={arg.seed},engine={arg.engine}")
    c.environment.eval_split = arg.split
    c.budget.rollouts = 1280
    c.evaluation.tasks = 96
    c.evaluation.every = 0
    c.evaluation.last_rollouts = 4
    # One length, as in the pilot: an accelerator compiles each other one for longer than it saves.
    c.learner.pack_length, c.learner.pack_length_buckets = 2048, ()
    return c
