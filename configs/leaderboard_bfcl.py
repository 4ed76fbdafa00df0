"""The first testbed of the leaderboard: BFCL's tools, ten of them weak and seldom met by free exploration.

The plan is the same for all methods, and frozen: 7,040 training rollouts of any role, which 55 batches of
16 x 8 take; evolutions after steps 5, 10, ..., 30, of at most 16 new tasks; a constant learning rate; 8
rollouts per held-out task in the last evaluation. A method that probes ends in fewer steps. Its own settings
are DEFAULTS of its module. docs/guides/enter_the_arena.md has the rules.

    python experiments/compare.py --config=configs/leaderboard_bfcl.py --arms=random,random_probe,blame \\
        --seeds=0:4 --workdir=runs/arena
    python experiments/compare.py --config=configs/leaderboard_bfcl.py:split=test --seeds=200:210 --arms=...

    split      development (to build a method), or test (read once, when the method is frozen)
    weak       seldom, or spread: the base policy of configs/bfcl_headroom.py
"""

from ml_collections import ConfigDict

from coevolve_jax.config import inherit, parse_arg

SPLITS = ("development", "test")


def get_config(arg: str = "") -> ConfigDict:
    arg = parse_arg(arg, split="development", weak="seldom", strategy="coevolve", seed=0, engine="native")
    if arg.split not in SPLITS:
        raise ValueError(f"Config argument split={arg.split!r} must be one of {', '.join(SPLITS)}.")
    given = f"weak={arg.weak},strategy={arg.strategy},seed={arg.seed},engine={arg.engine}"
    c = inherit(__file__, "bfcl_headroom.py", given)
    c.environment.eval_split = arg.split
    c.steps = 55  # the most: without a probe the budget ends here
    c.budget.rollouts = 7040
    c.evolution.freeze_last_steps = 25  # with every = 5: six evolutions, the last after step 30
    c.evaluation.last_rollouts = 8
    c.learner.schedule = "constant"
    return c
